"""`RowFormat`: the tensor of a table as its file stores it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedStateError
from penstock.features.sources.table_metadata import Align, row_bytes_for
from penstock.features.writing.table_file import TableFile
from penstock.io.digested_file import DigestedFile, ReservedFile
from penstock.tensors import dtypes
from penstock.tensors.file_tensor import FileTensor

if TYPE_CHECKING:
    from penstock.io.tensor_io import TensorIO
    from penstock.tensors.file_tensor import FileTarget

_KEY_CHARS_MAX = 1024
_DECOY = "penstock.sealed"
"""The only name in the header of a sealed file; `docs/format.md`, 9.6."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The tensor of a table as its file stores it.

    Attributes:
        key: Its name.
        dtype: A `torch.dtype`.
        dtype_name: Name of the type, as in `docs/format.md`.
        row_bytes: Bytes of a row with its padding.
        row_shape: The shape of a row with its padding.
    """

    key: str
    dtype: Any
    dtype_name: str
    row_bytes: int
    row_shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        key: str,
        dtype: str,
        item_bytes: int,
        shape: tuple[int, ...],
        align: Align,
    ) -> RowFormat:
        """The form in which rows of some shape and type are stored."""
        if not isinstance(key, str):
            raise TypeError(f"key={key!r}: must be text")
        if not 0 < len(key) <= _KEY_CHARS_MAX or key == "__metadata__" or not key.isprintable():
            raise ValueError(f"key={key!r:.80}: must be a name of 1 to {_KEY_CHARS_MAX} characters")
        if dtype not in dtypes.HEADER_TYPES:
            raise UnsupportedStateError(
                f"a table of {dtype} cannot be stored: safetensors has no name for it",
                key=key,
            )
        value_bytes = math.prod(shape) * item_bytes
        row_bytes = row_bytes_for(value_bytes, item_bytes, align)
        is_padded = row_bytes != value_bytes
        row_shape = (row_bytes // item_bytes,) if is_padded else shape
        return cls(key, dtypes.torch_dtype(dtype), dtype, row_bytes, row_shape)

    def file(
        self, path: str, io: TensorIO, rows: int | None, *, is_sealed: bool = False
    ) -> TableFile:
        """Creates a file for the table; ``rows`` is None if their number is unknown."""
        nbytes = None if rows is None else rows * self.row_bytes
        if is_sealed:
            return TableFile(path, io, _DECOY, "uint8", 1, nbytes, is_sealed=True)
        return TableFile(path, io, self.key, self.dtype_name, 1 + len(self.row_shape), nbytes)

    def tensor(self, file: TableFile, io: TensorIO, rows: int) -> FileTensor:
        """The tensor of a finished file, as an entry of a state."""
        held = DigestedFile(ReservedFile(file.path, file.nbytes), file.chunks, io, _no_target)
        held.sealer = file.sealer
        return FileTensor(held, file.begin, self.key, self.dtype, (rows, *self.row_shape))


def _no_target(tensor: FileTensor) -> FileTarget:
    raise AssertionError(f"nothing is loaded in the place of {tensor}")
