"""`Rows`: rows of a table in memory, accessed by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.features.gathering.batches import on_host
from penstock.tensors import dtypes
from penstock.tensors.memory import check_strided

if TYPE_CHECKING:
    from penstock.features.columns import Columns


class Rows(Mapping[str, Any]):
    """Rows of a table: a mapping from each column's name to a view of their common memory.

    Writing to a view changes the rows; `Table.update` then stores them.

    Attributes:
        columns: The layout of a row.
        buffer: The bytes of all rows, ``uint8``, those of a row in the last dimension.
    """

    __slots__ = ("buffer", "columns")

    def __init__(self, columns: Columns, buffer: Any) -> None:
        self.columns = columns
        self.buffer = buffer

    def __getitem__(self, name: str) -> Any:
        if name not in self.columns:
            raise KeyError(f"{name!r}: the columns are {', '.join(self.columns.names)}")
        return self.columns.view(self.buffer, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self[name][...] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns.names)

    def __len__(self) -> int:
        return len(self.columns)

    def __repr__(self) -> str:
        shape = tuple(self.buffer.shape[:-1])
        return f"<Rows {', '.join(self.columns.names)} of {shape}>"


def packed(
    columns: Columns, shape: tuple[int, ...], values: Mapping[str, Any], *, is_whole: bool = True
) -> Rows:
    """Packs a caller's values of each column into rows.

    Args:
        columns: The layout of a row.
        shape: Shape of the ids.
        values: A tensor or an array for each column: the shape of the ids followed by that of the
            column.
        is_whole: Whether every column is required; else missing columns are zero.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"rows: {type(values).__name__}: pass a mapping of {', '.join(columns.names)} to rows"
        )
    missing = [name for name in columns.names if is_whole and name not in values]
    unknown = [str(name) for name in values if name not in columns]
    if missing or unknown:
        problem = f"no {missing[0]!r}" if missing else f"{unknown[0]!r} is no column"
        raise ValueError(
            f"rows: {problem}: an update writes whole rows, of {', '.join(columns.names)}"
        )
    rows = Rows(columns, np.zeros((*shape, columns.nbytes), np.uint8))
    for column in columns:
        if column.name not in values:
            continue
        value = values[column.name]
        is_torch = not isinstance(value, np.ndarray)
        if is_torch:
            torch = dtypes.import_torch()
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"rows: {column.name!r}: {type(value).__name__}: use a tensor or an array"
                )
            check_strided(value, f"rows: {column.name!r}")
            kind = dtypes.torch_names().get(value.dtype, (None,))[0]
        else:
            kind = dtypes.numpy_name(value.dtype)
        wanted = (*shape, *column.shape)
        if kind != column.dtype or tuple(value.shape) != wanted:
            raise ValueError(
                f"rows: {column.name!r}: {kind} of shape {tuple(value.shape)}: needed is"
                f" {column.dtype} of shape {wanted}"
            )
        if 0 in wanted:
            # PyTorch cannot view a tensor without elements as another type.
            continue
        if is_torch:
            target = columns.view(torch.from_numpy(rows.buffer), column.name)
            target.copy_(on_host(value.detach(), column.name)[0])
        else:
            rows[column.name][...] = value
    return rows
