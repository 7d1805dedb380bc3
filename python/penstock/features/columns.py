"""`Columns`: the layout of a table's row."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.features.sources.elements import name_of
from penstock.features.writing.row_format import RowFormat
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Column:
    """One column: a part of each row.

    Attributes:
        name: Its name.
        shape: Its shape in one row.
        dtype: Name of its element type, as in `docs/format.md`.
        item_bytes: Bytes of an element.
        offset: Where it begins in a row, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the column in one row."""
        return math.prod(self.shape) * self.item_bytes


class Columns:
    """The columns of a row, one after another, each at its type's alignment.

    Args:
        columns: The shape and element type of each column, by name.

    Attributes:
        nbytes: Bytes of a row.
    """

    def __init__(self, columns: Mapping[str, tuple[Any, Any]]) -> None:
        if not isinstance(columns, Mapping):
            raise TypeError(
                f"columns={columns!r:.80}: must be a mapping, as {{'weight': (128, 'float32')}}"
            )
        found: dict[str, Column] = {}
        end = 0
        for name, given in columns.items():
            shape, dtype = _sizes_and_type(name, given)
            kind = name_of(dtype)
            if min(shape, default=0) < 0:
                raise ValueError(f"columns: {name!r}: sizes {shape} are none")
            item_bytes = dtypes.ITEM_BYTES.get(kind, 0)
            # Refuses here, not after training, a column that a snapshot could not store.
            RowFormat.of(name, kind, item_bytes, shape, False)
            begin = -(-end // item_bytes) * item_bytes
            column = Column(name, shape, kind, item_bytes, begin)
            if column.nbytes == 0:
                raise ValueError(f"columns: {name!r}: sizes {shape} have no elements")
            found[name] = column
            end = begin + column.nbytes
        if not found:
            raise ValueError("columns: there are none: a row has at least one")
        self._columns = found
        step = math.lcm(*(column.item_bytes for column in found.values()))
        self.nbytes = -(-end // step) * step

    def __iter__(self) -> Iterator[Column]:
        return iter(self._columns.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and self._columns == other._columns

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def names(self) -> list[str]:
        """Names of the columns, in the order of a row."""
        return list(self._columns)

    def to_json(self) -> list[dict[str, Any]]:
        """The columns as the table's metadata stores them."""
        return [
            {"name": column.name, "shape": list(column.shape), "dtype": column.dtype}
            for column in self
        ]

    @classmethod
    def from_json(cls, noted: list[dict[str, Any]]) -> Columns:
        """The columns that a table's metadata describes."""
        return cls({one["name"]: (tuple(one["shape"]), one["dtype"]) for one in noted})

    def view(self, buffer: Any, name: str) -> Any:
        """A view of one column of some rows."""
        column = self._columns[name]
        part = buffer[..., column.offset : column.offset + column.nbytes]
        if isinstance(buffer, np.ndarray):
            elements = part.view(dtypes.numpy_dtype(column.dtype))
        else:
            elements = part.view(dtypes.torch_dtype(column.dtype))
        return elements.reshape((*buffer.shape[:-1], *column.shape))


def _sizes_and_type(name: str, given: Any) -> tuple[tuple[int, ...], Any]:
    try:
        shape, dtype = given
        sizes = (shape,) if hasattr(shape, "__index__") else tuple(shape)
        return tuple(operator.index(size) for size in sizes), dtype
    except (TypeError, ValueError):
        raise TypeError(
            f"columns: {name!r}: {given!r:.80}: must be sizes and a type, as (128, 'float32')"
        ) from None
