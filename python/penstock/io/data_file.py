"""`DataFile`: an open file that tensors are read from or written to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock import _native
from penstock.io.arguments import decode_local_path
from penstock.reports import Fallback

if TYPE_CHECKING:
    from typing import Self

AnyFile: TypeAlias = Any
"""A path, a descriptor, an object with a ``fileno``, or an open `DataFile`."""


class DataFile:
    """A file that is open, for whoever comes back to it: opening takes longer than a small read.

    `penstock.offload.TensorIO.open` makes it. Closed, it lets transfers that are under way end.

    Attributes:
        path: The file.
    """

    def __init__(self, native: _native.DataFile) -> None:
        self._native: _native.DataFile | None = native
        self.path = os.fspath(native.path)

    @property
    def nbytes(self) -> int:
        """Bytes that it has now.

        Raises:
            ValueError: It is closed.
        """
        return self._opened.nbytes

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is bypassed.

        Raises:
            ValueError: It is closed.
        """
        return self._opened.direct

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._native is None

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Why the page cache is not bypassed, where that was left open.

        Raises:
            ValueError: It is closed.
        """
        reason = self._opened.fallback
        return () if reason is None else (Fallback(reason, "buffered"),)

    def close(self) -> None:
        """Lets it go."""
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
    """The native file of whatever names it.

    Raises:
        StorageError: The system does not open it.
        UnsupportedPathError: It is a URL.
        ValueError: It is closed, or open to be read only.
        TypeError: It names no file.
    """
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
