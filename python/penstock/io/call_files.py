"""`CallFiles`: the files that one call names, as often as it names them."""

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

    Requests may come one by one, and their files go as they come: what is known by its identity is
    held, and a descriptor is known by what it is of as well.
    """

    def __init__(self, direct: str, mode: Literal["r", "w"]) -> None:
        self._direct = direct
        self._mode = mode
        self._known: dict[Any, tuple[_native.DataFile, AnyFile]] = {}

    def of(self, file: AnyFile) -> _native.DataFile:
        """The native file of one."""
        key = _key(file)
        if key not in self._known:
            self._known[key] = reach(file, self._mode, self._direct), file
        return self._known[key][0]

    @property
    def first(self) -> _native.DataFile | None:
        """One of them, if there are any."""
        return next((native for native, _ in self._known.values()), None)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Why the page cache is not bypassed, of whichever it is not."""
        reasons = {native.fallback for native, _ in self._known.values()} - {None}
        return tuple(Fallback(reason, "buffered") for reason in sorted(map(str, reasons)))


def _key(file: AnyFile) -> Any:
    """What tells a file from the others of a call."""
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    if isinstance(file, int):
        with contextlib.suppress(OSError, OverflowError):
            stat = os.fstat(file)
            return file, stat.st_dev, stat.st_ino
    return (id(file),)
