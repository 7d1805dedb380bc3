"""Recognizes checkpoints in the native format of PyTorch's Distributed Checkpoint (DCP).

DCP writes data as ``__<rank>_<number>.distcp``, and last of all `METADATA`, or one such file per
rank if the ranks did not communicate. Only these describe the contents of the data files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.layout.boxes import check_tiled
from penstock.common.found import is_there
from penstock.errors import CorruptCheckpointError, IncompleteCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.checkpoint.layout.boxes import Block

METADATA = ".metadata"
"""The name of the metadata file that completes a DCP checkpoint."""

MARK = (
    b"Here is a Penstock checkpoint (manifest.json), and none of DCP's own format. What reads it:\n"
    b"penstock.load, StorageReader of penstock.integrations.dcp, dcp.load after enable() of that\n"
    b"module. This file is for tools that look for its name.\n"
)
"""Contents of the file that `penstock.integrations.dcp` writes under that name after a commit."""

_DATA = re.compile(r"__\d+_\d+\.distcp")
_OF_A_RANK = re.compile(r"__\d+\.metadata")


def data_files(names: Iterable[str]) -> list[str]:
    """Returns the names of data files among those of a directory."""
    return sorted(filter(_DATA.fullmatch, names))


def metadata_of_ranks(names: Iterable[str]) -> list[str]:
    """Returns the names of metadata files that ranks wrote without communication."""
    return sorted(filter(_OF_A_RANK.fullmatch, names))


def is_marked(path: str) -> bool:
    """Whether a directory has `MARK`, and no metadata of DCP's own."""
    try:
        return _native.read_start(os.path.join(path, METADATA), len(MARK) + 1) == MARK
    except OSError:
        return False


def drop_mark(path: str) -> None:
    """Removes the mark of a deleted checkpoint, and the directory if it is then empty.

    Tools take a directory with the mark for a checkpoint. Files that cannot be removed stay, as do
    those that another save has begun meanwhile: the checkpoint is deleted all the same.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            is_here = _is_alone(fd) and os.path.samestat(os.fstat(fd), os.stat(path))
            has_manifest = is_there(os.path.join(path, _native.MANIFEST))
            if is_here and is_marked(path) and not has_manifest:
                os.unlink(METADATA, dir_fd=fd)
                os.rmdir(path)
        finally:
            os.close(fd)


def _is_alone(fd: int) -> bool:
    """Takes the lease of a directory while it is open; returns whether no save holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # NFS without such locks: a save there recreates a directory that has disappeared.
        return True
    return True


def check_finished(path: str, names: Iterable[str]) -> None:
    """Refuses the remains of an unfinished save, which has data files but no metadata."""
    data = data_files(names)
    if data:
        raise IncompleteCheckpointError(
            f"{path}: DCP's save there never finished: {METADATA}, which it writes last, is "
            f"missing beside {_few(data)}; take an earlier checkpoint, and remove this directory",
            path=path,
        )


def check_files(path: str, storage_data: Any) -> None:
    """Refuses a checkpoint with missing or truncated files."""
    ends: dict[str, int] = {}
    for place in storage_data.values():
        if place.offset < 0 or place.length < 0:
            raise CorruptCheckpointError(
                f"{os.path.join(path, METADATA)} is cut or damaged: an item in "
                f"{place.relative_path} has {place.length} bytes at {place.offset}",
                path=os.path.join(path, METADATA),
            )
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    missing = sorted(
        name for name, end in ends.items() if _bytes_of(os.path.join(path, name)) < end
    )
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise IncompleteCheckpointError(
            f"{path}: {_few(missing)} of DCP's checkpoint there {verb} missing or cut: copy the "
            "directory again, or take another checkpoint",
            path=path,
        )


def check_pieces(
    path: str, name: str, size: tuple[int, ...], pieces: Iterable[Block], *, is_whole: bool
) -> None:
    """Refuses a tensor whose metadata does not locate each element exactly once.

    ``is_whole``: all elements must be present. DCP lets a process save only its own.
    """
    try:
        check_tiled(size, pieces, is_whole=is_whole)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{path}: {name} is damaged: {error}", path=path, tensor=name
        ) from error


def _bytes_of(file: str) -> int:
    found = _native.stat(file)
    return -1 if found is None else found[1]


def _few(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
