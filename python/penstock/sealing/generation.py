"""`generate`: new keys in files of their own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from penstock import _native

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["generate"]


def generate(
    path: str | os.PathLike[str] | Path, *, kind: Literal["x25519", "key-file"] = "x25519"
) -> str:
    """Makes a key and writes it to a new file that only its owner can read (mode 0600).

    Args:
        path: The file, which must not exist. The directory must.
        kind: ``"x25519"`` for a pair of keys, of which the public one is given to those who save;
            age's tools read the file. ``"key-file"`` for one symmetric key, which those who save
            need, too.

    Returns:
        The key's name in public: the recipient ``age1…``, or the fingerprint of a symmetric key.

    Raises:
        StorageError: The file exists or cannot be written; an `OSError` too.
        ValueError: ``kind`` is none of the two.

    Example:
        >>> import tempfile
        >>> generate(tempfile.mkdtemp() + "/team.key", kind="key-file").partition(":")[0]
        'penstock-key'
    """
    return _native.generate_key(os.fspath(path), kind)
