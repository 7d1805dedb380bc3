"""Reads the small files that were saved with a checkpoint; `docs/format.md`, 3.7."""

from __future__ import annotations

import errno
import json
import os

import numpy as np

from penstock import _native
from penstock.errors import CorruptCheckpointError, StorageError
from penstock.tensors.memory import of_array, to_source

_ALL_BYTES = (1 << 64) - 1


def read(path: str, checkpoint_id: str) -> dict[str, bytes]:
    """Returns their contents by name, checked against their digests.

    Args:
        path: The checkpoint's directory.
        checkpoint_id: Its id, from the verified manifest.
    """
    try:
        manifest = json.loads(_content(path, _native.MANIFEST))
    except RecursionError:
        # Metadata that is nested endlessly, with a correct digest.
        raise _damaged(path, _native.MANIFEST, "it nests too deeply") from None
    if manifest["id"] != checkpoint_id:
        raise CorruptCheckpointError(
            f"{path} was replaced while it was read: try again", path=path, file=_native.MANIFEST
        )
    found = {}
    for row in manifest.get("beside", ()):
        content = _content(path, row["file"])
        if len(content) != row["bytes"] or _digest(content) != row["digest"]:
            raise _damaged(path, row["file"], "its bytes are not what was saved")
        found[row["name"]] = content
    return found


def _content(path: str, name: str) -> bytes:
    where = os.path.join(path, name)
    try:
        return _native.read_start(where, _ALL_BYTES)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise _damaged(path, name, "it is missing") from error
        raise


def _digest(content: bytes) -> str:
    source = to_source(of_array(np.frombuffer(content, np.uint8), "file"), "file")
    return f"crc64nvme:{_native.digests([source])[0]:016x}"


def _damaged(path: str, name: str, detail: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {name}: {detail}; files= of penstock.export gives others",
        path=path,
        file=name,
    )
