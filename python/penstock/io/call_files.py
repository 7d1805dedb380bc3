"""`CallFiles`: opens each file of one call once."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Literal

from penstock.io.data_file import AnyFile, reach
from penstock.reports import Fallback

if TYPE_CHECKING:
    from penstock import _native


class CallFiles:
    """The files of one call, each opened once.

    Files arrive with their requests, one by one. A file object is kept alive while it is known by
    its identity; a descriptor is known by the device and inode that it refers to as well.
    """

    def __init__(self, direct: str, mode: Literal["r", "w"]) -> None:
        self._direct = direct
        self._mode = mode
        self._known: dict[Any, tuple[_native.DataFile, AnyFile]] = {}

    def of(self, file: AnyFile) -> _native.DataFile:
        """Returns the native file of a caller's file."""
        key = _key(file)
        if key not in self._known:
            self._known[key] = reach(file, self._mode, self._direct), file
        return self._known[key][0]

    @property
    def first(self) -> _native.DataFile | None:
        """Any file of the call; None if there is none."""
        return next((native for native, _ in self._known.values()), None)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Reasons why files of the call do not bypass the page cache."""
        reasons = {native.fallback for native, _ in self._known.values()} - {None}
        return tuple(Fallback(reason, "buffered") for reason in sorted(map(str, reasons)))


def _key(file: AnyFile) -> Any:
    """Returns a key that distinguishes the files of one call."""
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    if isinstance(file, int):
        with contextlib.suppress(OSError, OverflowError):
            stat = os.fstat(file)
            return file, stat.st_dev, stat.st_ino
    return (id(file),)
