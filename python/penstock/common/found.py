"""Queries on local paths and bucket URLs: existence, kind, size, Git LFS pointers."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock import _native
from penstock.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""The first bytes of the text file that Git LFS leaves in place of a file."""
POINTER_BYTES = len(_POINTER)
"""The length of that prefix."""


def is_there(path: str) -> bool:
    """Whether a path that can only be a file exists."""
    return _native.has_file(path)


def is_directory(path: str) -> bool:
    """Whether a path is a directory."""
    found = _native.stat(path)
    return found is not None and found[0] == "directory"


def has_bytes(path: str, expected: int) -> bool:
    """Whether a path is a file of this many bytes; False if it cannot be examined."""
    try:
        found = _native.stat(path)
    except StorageError:
        return False
    return found == ("file", expected)


def of_git_lfs(start: bytes) -> bool:
    """Whether a file's first 64 or more bytes are those of a Git LFS pointer."""
    return start.startswith(_POINTER)


def unfetched(path: str) -> CheckpointNotFoundError:
    """Returns the error for a file whose Git LFS contents were not fetched."""
    return CheckpointNotFoundError(
        f"{path} is a pointer of Git LFS, and the file that it stands for was not fetched: run"
        " `git lfs pull` in its repository",
        path=path,
    )


def check_fetched(path: str) -> None:
    """Refuses a file that is a Git LFS pointer."""
    if of_git_lfs(_native.read_start(path, POINTER_BYTES)):
        raise unfetched(path)


@contextmanager
def naming_pointers() -> Iterator[None]:
    """Reports a damaged file as a Git LFS pointer if it is one."""
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
