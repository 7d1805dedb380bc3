"""What is in a directory that `torch.distributed.checkpoint` (DCP) is pointed at.

DCP writes its `.metadata` last, so a directory of its own is complete where that is. Launchers and
trainers look for that name (torchtitan takes no step without it), so a save in DCP's place leaves a
*mark* under it once the checkpoint is committed. Which of the two a directory holds:

- neither a manifest nor DCP's `.metadata`: nothing, or what is left of a save of DCP that died;
- one of the two: that one;
- both: Penstock's saves note the digest of the `.metadata` that they replace. Where that is what is
  there, the process died between the commit and the mark; else DCP has saved over it since.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from penstock.checkpoint.loading.dcp_files import (
    MARK,
    METADATA,
    check_finished,
    data_files,
    is_marked,
    metadata_of_ranks,
)
from penstock.checkpoint.loading.foreign import is_checkpoint
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.errors import StorageError
from penstock.integrations.dcp.layout import NOTE
from penstock.io import durable

REPLACED = "replaced"
"""The member of the note of `layout` that has the digest of the `.metadata` that was replaced."""


def holds_dcp(path: str) -> bool:
    """Whether the newest that is complete there is of DCP's own format.

    Raises:
        IncompleteCheckpointError: There is what a save of DCP has left that did not end.
        CorruptCheckpointError: There are both, and Penstock's is damaged.
    """
    if is_checkpoint(path):
        digest = dcp_digest(path)
        return digest is not None and digest != _replaced(path)
    names = _names(path)
    # Without a digest: of a large checkpoint every rank would read all of its metadata for that.
    if (METADATA in names and not is_marked(path)) or metadata_of_ranks(names):
        return True
    check_finished(path, names)
    return False


def dcp_digest(path: str) -> str | None:
    """SHA-256 of the `.metadata` of DCP's in a directory; None where there is none."""
    try:
        with open(os.path.join(path, METADATA), "rb") as file:
            data = file.read(len(MARK) + 1)
            if data == MARK:
                return None
            found = hashlib.sha256(data)
            while data := file.read(1 << 20):
                found.update(data)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed(error, path) from error
    return found.hexdigest()


def mark(path: str) -> None:
    """Leaves the mark, and removes what a checkpoint of DCP's own had there.

    Raises:
        StorageError: The operating system failed an operation. The checkpoint is complete.
    """
    try:
        target = os.path.join(path, METADATA)
        if dcp_digest(path) is not None or not os.path.exists(target):
            durable.replace(target, MARK)
        names = _names(path)
        for name in (*metadata_of_ranks(names), *data_files(names)):
            os.unlink(os.path.join(path, name))
        durable.sync(path)
    except OSError as error:
        raise _failed(error, path) from error


def _replaced(path: str) -> Any:
    checkpoint = OpenCheckpoint(path)
    try:
        with checkpoint.reading():
            note = checkpoint.metadata().get(NOTE)
    finally:
        checkpoint.release()
    return note.get(REPLACED) if isinstance(note, dict) else None


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _failed(error: OSError, path: str) -> StorageError:
    where = error.filename or path
    return StorageError(f"{where}: {error.strerror}", path=str(where), errno=error.errno)
