"""What a path leads to, as the native module finds it, wherever that is kept."""

from __future__ import annotations

from penstock import _native
from penstock.errors import StorageError


def is_there(path: str) -> bool:
    """Whether a path that is nothing or a file's leads to something.

    Raises:
        StorageError: The system does not let it be looked at.
    """
    return _native.has_file(path)


def is_directory(path: str) -> bool:
    """Whether a path leads to a directory.

    Raises:
        StorageError: The system does not let it be looked at.
    """
    found = _native.look(path)
    return found is not None and found[0] == "directory"


def has_bytes(path: str, expected: int) -> bool:
    """Whether a path leads to a file of so many bytes, as far as the system lets that be seen."""
    try:
        found = _native.look(path)
    except StorageError:
        return False
    return found == ("file", expected)
