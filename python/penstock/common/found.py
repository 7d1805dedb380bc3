"""What a path leads to, as the native module finds it, wherever that is kept."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock import _native
from penstock.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""How Git LFS begins the text that it leaves in the place of a file."""
POINTER_BYTES = len(_POINTER)
"""The length of that beginning."""


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


def of_git_lfs(start: bytes) -> bool:
    """Whether a file that begins so, with 64 bytes or more, is a pointer of Git LFS."""
    return start.startswith(_POINTER)


def unfetched(path: str) -> CheckpointNotFoundError:
    """The error for a file of which there is a pointer of Git LFS only."""
    return CheckpointNotFoundError(
        f"{path} is a pointer of Git LFS, and the file that it stands for was not fetched: run"
        " `git lfs pull` in its repository",
        path=path,
    )


def check_fetched(path: str) -> None:
    """Refuses a file of which Git LFS has left a pointer only.

    Raises:
        CheckpointNotFoundError: It is one.
        OSError: The file cannot be read.
    """
    if of_git_lfs(_native.read_start(path, POINTER_BYTES)):
        raise unfetched(path)


@contextmanager
def naming_pointers() -> Iterator[None]:
    """Reports a damaged file as a Git LFS pointer if it is one.

    Raises:
        CheckpointNotFoundError: It is one.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        if error.file is not None and _is_pointer(path := os.path.join(error.path, error.file)):
            raise unfetched(path) from error
        raise


def _is_pointer(path: str) -> bool:
    try:
        return of_git_lfs(_native.read_start(path, POINTER_BYTES))
    except OSError:
        return False
