"""`DataFile`: an open file for reading or writing tensors."""

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
