"""`private_directory`: a directory in memory, for files of a sealed save that only a path takes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

from penstock.errors import CannotSealError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY = "/dev/shm"  # noqa: S108  every file there is in a directory of its own


@contextlib.contextmanager
def private_directory(*, is_sealed: bool) -> Iterator[str]:
    """A temporary directory that no other user reads, and that is removed afterwards.

    Frameworks hand some small files over by their paths. In a sealed save such files must not reach
    a disk, so the directory is in memory then.

    Args:
        is_sealed: Whether its files belong to a sealed checkpoint.

    Raises:
        CannotSealError: There is no file system in memory; nothing was written.
    """
    if is_sealed and not (os.path.ismount(_MEMORY) and os.access(_MEMORY, os.W_OK | os.X_OK)):
        raise CannotSealError(
            f"{_MEMORY} is no file system in memory that can be written: small files of a sealed "
            "checkpoint pass through one; mount one there, or save without sealing=",
            path=_MEMORY,
        )
    # Made by `mkdtemp`, so only its owner enters it.
    with tempfile.TemporaryDirectory(prefix="penstock-", dir=_MEMORY if is_sealed else None) as one:
        yield one
