"""`DataFile`: an open file for reading or writing tensors; `CallFiles`: those of one call."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock import _native
from penstock.reports import Fallback
from penstock.tensors.arguments import decode_local_path

if TYPE_CHECKING:
    from typing import Self

AnyFile: TypeAlias = Any
"""A path, a descriptor, an object with a ``fileno``, or an open `DataFile`."""


class DataFile:
    """An open file for repeated transfers, as opening takes longer than a small read.

    Created by `penstock.offload.TensorIO.open`. Closing it does not interrupt running transfers.

    Attributes:
        path: The path of the file.
    """

    def __init__(self, native: _native.DataFile) -> None:
        self._native: _native.DataFile | None = native
        self.path = os.fspath(native.path)

    @property
    def nbytes(self) -> int:
        """The current size of the file, in bytes.

        Raises:
            ValueError: The file is closed.
        """
        return self._opened.nbytes

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is bypassed.

        Raises:
            ValueError: The file is closed.
        """
        return self._opened.direct

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._native is None

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Reasons why the page cache is not bypassed, if ``direct`` is ``"auto"``.

        Raises:
            ValueError: The file is closed.
        """
        reason = self._opened.fallback
        return () if reason is None else (Fallback(reason, "buffered"),)

    def close(self) -> None:
        """Closes the file."""
        self._native = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DataFile {self.path!r}{' closed' if self.closed else ''}>"

    @property
    def _opened(self) -> _native.DataFile:
        if self._native is None:
            raise ValueError(f"{self.path} is closed: open it again with TensorIO.open")
        return self._native


def reach(file: AnyFile, mode: Literal["r", "w"], direct: str) -> _native.DataFile:
    """Returns the native file for a path, descriptor, file object or `DataFile`."""
    if isinstance(file, DataFile):
        native = file._opened
    elif isinstance(file, int) and not isinstance(file, bool):
        native = _native.DataFile.of_descriptor(file, direct)
    elif hasattr(file, "fileno"):
        native = _native.DataFile.of_descriptor(file.fileno(), direct)
    else:
        return _native.DataFile.open(decode_local_path(file), mode == "w", direct)
    if mode == "w" and not native.writable:
        raise ValueError(f"{native.path} is open to be read only: open it to write")
    return native


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
