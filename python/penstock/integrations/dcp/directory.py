"""Tells the format of a directory used with `torch.distributed.checkpoint` (DCP).

DCP writes its `.metadata` last, so a directory of its own is complete if it has that. Launchers and
trainers look for that name (torchtitan ignores steps without it), so a save in DCP's place writes a
*mark* under it once the checkpoint is committed. A directory holds:

- neither a manifest nor DCP's `.metadata`: nothing, or the rest of a save of DCP that died;
- one of the two: a checkpoint of that format;
- both: Penstock's saves record the digest of the `.metadata` that they replace. If the file has
  that digest, the process died between the commit and the mark; else DCP has saved over it since.
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
from penstock.errors import StorageError
from penstock.integrations.dcp.layout import NOTE
from penstock.plugin import OpenCheckpoint, SealingKeys, durable, is_checkpoint

NO_KEYS = SealingKeys()
"""No keys but those that the environment names."""

REPLACED = "replaced"
"""The member of the note of `layout` that holds the digest of the replaced `.metadata`."""


def holds_dcp(path: str, keys: SealingKeys = NO_KEYS) -> bool:
    """Whether the newest complete checkpoint in a directory is of DCP's own format.

    Args:
        path: The directory.
        keys: The keys that open a sealed checkpoint there.
    """
    if is_checkpoint(path):
        digest = dcp_digest(path)
        return digest is not None and digest != _replaced(path, keys)
    names = _names(path)
    # Without a digest, for which every rank would read all metadata of a large checkpoint.
    if (METADATA in names and not is_marked(path)) or metadata_of_ranks(names):
        return True
    check_finished(path, names)
    return False


def dcp_digest(path: str) -> str | None:
    """SHA-256 of DCP's `.metadata` in a directory; None if there is none."""
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
    """Writes the mark, and removes the files of a checkpoint of DCP's own."""
    try:
        target = os.path.join(path, METADATA)
        if dcp_digest(path) is not None or not os.path.exists(target):
            durable.replace(target, MARK)
        names = _names(path)
        replaced = [*metadata_of_ranks(names), *data_files(names)]
        for name in replaced:
            os.unlink(os.path.join(path, name))
        if replaced:
            durable.sync(path)
    except OSError as error:
        raise _failed(error, path) from error


def _replaced(path: str, keys: SealingKeys) -> Any:
    checkpoint = OpenCheckpoint(path, unsealing=keys.unsealing)
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
