"""Creates a file under another name, without writing its bytes again if possible."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Literal, TypeAlias

from penstock.errors import StorageError

Way: TypeAlias = Literal["reflink", "hard link", "copy"]
"""How a file got its other name."""

_FICLONE = 0x40049409
"""Shares the blocks of a file with an empty one: ioctl_ficlone(2)."""

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)

NO_LINK = (
    errno.EPERM,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EXDEV,
    errno.EMLINK,
)
"""Errors for a file that cannot be hard-linked to that place."""


def reflink(source: str, target: str) -> bool:
    """Creates a file that shares the blocks of another; returns whether this is supported."""
    try:
        with open(source, "rb") as old, open(target, "xb") as new:
            try:
                fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                os.remove(target)
                return False
    except OSError as error:
        raise _failed("share the blocks of", source, error) from error
    return True


def hard_link(source: str, target: str) -> None:
    """Creates a hard link to a file."""
    try:
        os.link(source, target)
    except OSError as error:
        remedy = ": leave --hard-link out to copy it" if error.errno in NO_LINK else ""
        raise _failed("link", source, error, remedy) from error


def _failed(what: str, path: str, error: OSError, remedy: str = "") -> StorageError:
    message = f"cannot {what} {path}: {error.strerror}{remedy}"
    return StorageError(message, path=path, errno=error.errno)
