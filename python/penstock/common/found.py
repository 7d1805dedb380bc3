"""Queries on local paths and bucket URLs: existence, kind, size, Git LFS pointers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING

from penstock import _native
from penstock.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""The first bytes of the text file that Git LFS leaves in place of a file."""
POINTER_BYTES = len(_POINTER)
"""The length of that prefix."""

_LOOKERS = 32
"""Threads that look at files at the same time."""

_LOOKED_AT = 64
"""Files that a thread looks at in one go; so many or fewer need no thread."""


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


def first_without_bytes(files: Sequence[tuple[str, int]]) -> int | None:
    """The index of the first path that is not a file of its number of bytes; None if all are.

    Threads look at many of them at a time: a file system over a network takes a part of a
    millisecond for each, which the ranks of a large job would add up to minutes. Without further
    threads, as in an interpreter that ends, this one looks at the rest.
    """

    def search(begin: int) -> int | None:
        end = min(begin + _LOOKED_AT, len(files))
        return next((index for index in range(begin, end) if not has_bytes(*files[index])), None)

    begins = range(0, len(files), _LOOKED_AT)
    if len(begins) < 2:
        return search(0)
    tasks: list[Future[int | None]] = []
    with ThreadPoolExecutor(_LOOKERS) as pool, suppress(RuntimeError):
        for begin in begins:
            tasks.append(pool.submit(search, begin))  # noqa: PERF401 - some may be taken
    answers = chain((task.result() for task in tasks), map(search, begins[len(tasks) :]))
    return next((index for index in answers if index is not None), None)


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
