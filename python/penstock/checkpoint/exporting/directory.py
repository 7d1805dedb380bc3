"""Creates directories atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from typing import TYPE_CHECKING
from uuid import uuid4

from penstock.errors import CheckpointExistsError, PenstockError, StorageError
from penstock.io.files import durable

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def appearing(path: str) -> Iterator[str]:
    """Yields a directory to fill, which is then moved to its final path, durably.

    Only an empty directory may exist at the final path.
    """
    _check_free(path)
    parent = os.path.dirname(path)
    filling = f"{path}.{uuid4().hex}.tmp"
    with _storage_errors(filling):
        os.makedirs(parent, exist_ok=True)
        os.mkdir(filling)
    try:
        yield filling
        with _storage_errors(path):
            for entry in os.scandir(filling):
                durable.sync(entry.path)
            durable.sync(filling)
            _check_free(path)
            os.rename(filling, path)
            durable.sync(parent)
    except BaseException:
        shutil.rmtree(filling, ignore_errors=True)
        raise


def _check_free(path: str) -> None:
    with _storage_errors(path):
        try:
            is_free = not os.listdir(path)
        except FileNotFoundError:
            is_free = True
    if not is_free:
        raise CheckpointExistsError(
            f"{path} is there and not empty: name a new directory, or remove it first", path=path
        )


def write(directory: str, name: str, content: bytes) -> None:
    """Writes a file."""
    path = os.path.join(directory, name)
    with _storage_errors(path), open(path, "wb") as file:
        file.write(content)


def replace(directory: str, name: str, content: bytes) -> None:
    """Replaces a file durably and atomically."""
    path = os.path.join(directory, name)
    # Others may export here at the same time.
    with _storage_errors(path):
        durable.replace(path, content, beside=f"{path}.{uuid4().hex}.tmp")


@contextlib.contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        # Some of them are also OSErrors.
        raise
    except OSError as error:
        number = error.errno or errno.EIO
        where = error.filename or path
        message = f"cannot write {where}: {error.strerror}"
        if number == errno.ENOSPC:
            message += ": make room, and try again"
        raise StorageError(message, path=os.fsdecode(where), errno=number) from error
