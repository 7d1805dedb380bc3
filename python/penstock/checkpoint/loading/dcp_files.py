"""The files of a checkpoint in the own format of PyTorch's Distributed Checkpoint (DCP).

DCP writes data as ``__<rank>_<number>.distcp``, and last of all `METADATA`, or one for each rank
where these did not talk. What is in data files is said there only.
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
"""What DCP calls the file that makes a directory one of its checkpoints."""

MARK = (
    b"Here is a Penstock checkpoint (manifest.json), and none of DCP's own format. What reads it:\n"
    b"penstock.load, StorageReader of penstock.integrations.dcp, dcp.load after install() of that\n"
    b"module. This file is for tools that look for its name.\n"
)
"""What `penstock.integrations.dcp` leaves under that name once a checkpoint is committed."""

_DATA = re.compile(r"__\d+_\d+\.distcp")
_OF_A_RANK = re.compile(r"__\d+\.metadata")


def data_files(names: Iterable[str]) -> list[str]:
    """Which of the names in a directory are those of data."""
    return sorted(filter(_DATA.fullmatch, names))


def metadata_of_ranks(names: Iterable[str]) -> list[str]:
    """Which of them are those of metadata that ranks have written without the others."""
    return sorted(filter(_OF_A_RANK.fullmatch, names))


def is_marked(path: str) -> bool:
    """Whether a directory has `MARK`, and no metadata of DCP's own."""
    try:
        return _native.read_start(os.path.join(path, METADATA), len(MARK) + 1) == MARK
    except OSError:
        return False


def drop_mark(path: str) -> None:
    """Removes the mark where the checkpoint was deleted, and the directory if it is empty then.

    Tools take a directory for a checkpoint where it is. What cannot be removed stays, and so does
    what another save has begun in meanwhile: the checkpoint is gone all the same.
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
    """Takes the lease of a directory for as long as it is open; tells whether no save has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # There are no such locks (NFS): there a save makes a directory anew that it finds gone.
        return True
    return True


def check_finished(path: str, names: Iterable[str]) -> None:
    """Refuses what is left of a save that did not end, where there is no metadata.

    Raises:
        IncompleteCheckpointError: There is data.
    """
    data = data_files(names)
    if data:
        raise IncompleteCheckpointError(
            f"{path}: DCP's save there never finished: {METADATA}, which it writes last, is "
            f"missing beside {_few(data)}; take an earlier checkpoint, and remove this directory",
            path=path,
        )


def check_files(path: str, storage_data: Any) -> None:
    """Refuses a checkpoint of which files are missing or cut.

    Args:
        path: The directory.
        storage_data: Where its metadata says that items lie.

    Raises:
        IncompleteCheckpointError: They do not.
        CorruptCheckpointError: An item would begin before its file does.
    """
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
    """Refuses a tensor of which its metadata does not say where each element lies.

    Args:
        path: The directory.
        name: The tensor's.
        size: Its shape.
        pieces: Where each of its pieces begins, and its shape.
        is_whole: Whether all elements have to be there: DCP lets a process save its own alone.

    Raises:
        CorruptCheckpointError: Pieces overlap, lie outside of it, or leave elements out.
    """
    try:
        check_tiled(size, pieces, is_whole=is_whole)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{path}: {name} is damaged: {error}", path=path, tensor=name
        ) from error


def _bytes_of(file: str) -> int:
    found = _native.look(file)
    return -1 if found is None else found[1]


def _few(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
