"""`write_snapshot`: writes all rows of a `Table` as a checkpoint."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.common.progress import shown
from penstock.features.gathering.results import target_of
from penstock.features.sources.table_metadata import TableMetadata, beside_name, with_table_metadata
from penstock.features.writing.publish import publish
from penstock.features.writing.row_format import RowFormat
from penstock.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.common.progress import Progress
    from penstock.features.columns import Columns
    from penstock.io.tensor_io import TensorIO
    from penstock.reports import Fallback
    from penstock.tensors.native_rows import TensorTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport:
    """The result of `Table.snapshot`.

    Attributes:
        path: The checkpoint's directory.
        checkpoint_id: Unique identity of the checkpoint.
        rows: The number of rows.
        columns: Names of the tensors, one for each column.
        bytes: Bytes of the rows in their files.
        seconds: Wall time of the whole call.
        fallbacks: Faster ways that could not be used, each with its reason.
    """

    path: str
    checkpoint_id: str
    rows: int
    columns: tuple[str, ...]
    bytes: int
    seconds: float
    fallbacks: tuple[Fallback, ...]


def write_snapshot(
    where: str,
    columns: Columns,
    sizes: tuple[int, int, int],
    read: Callable[[int, TensorTarget], None],
    *,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    options: Options | None,
    progress: bool | Progress,
) -> SnapshotReport:
    """Writes all rows, piece by piece, as one tensor for each column.

    Args:
        where: The checkpoint's directory.
        columns: The layout of a row.
        sizes: The number of rows, bytes of a row as it is read, rows of a piece.
        read: Reads the rows of a piece, given its number, into memory.
        metadata: Plain JSON to store with the checkpoint.
        overwrite: Replace a complete checkpoint that is there.
        options: Settings of the I/O.
        progress: Whether and how progress is shown.
    """
    began = time.perf_counter()
    rows, row_bytes, piece_rows = sizes
    formats = {
        column.name: RowFormat.of(column.name, column.dtype, column.item_bytes, column.shape, False)
        for column in columns
    }
    table_metadata = {
        column.name: TableMetadata.of(column.name, column.shape).to_json() for column in columns
    }
    full_metadata = with_table_metadata(metadata, table_metadata)
    needed_bytes = rows * sum(row_format.row_bytes for row_format in formats.values())
    fallbacks: dict[Fallback, None] = {}

    def fill(io: TensorIO, places: Mapping[str, str]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        memory = np.empty((min(rows, piece_rows), row_bytes), np.uint8)
        with ExitStack() as stack:
            update = stack.enter_context(shown(progress, "writing"))
            files = {
                name: stack.enter_context(closing(row_format.file(places[name], io, rows)))
                for name, row_format in formats.items()
            }
            for piece, first in enumerate(range(0, rows, piece_rows)):
                here = memory[: min(piece_rows, rows - first)]
                read(piece, target_of(here))
                for column in columns:
                    part = here[:, column.offset : column.offset + column.nbytes]
                    files[column.name].append(np.ascontiguousarray(part).reshape(-1))
                if update is not None:
                    update(needed_bytes * (first + len(here)) // rows, needed_bytes)
            for name, row_format in formats.items():
                file = files[name]
                file.finish((rows, *row_format.row_shape))
                state[name] = row_format.tensor(file, io, rows)
                state[beside_name(name)] = file.checks
                fallbacks.update(dict.fromkeys(file.fallbacks))
        return state

    checkpoint_id, leftovers = publish(
        where,
        columns.names,
        fill,
        metadata=full_metadata,
        overwrite=overwrite,
        options=Options() if options is None else options,
        needed_bytes=needed_bytes,
    )
    return SnapshotReport(
        path=where,
        checkpoint_id=checkpoint_id,
        rows=rows,
        columns=tuple(columns.names),
        bytes=needed_bytes,
        seconds=time.perf_counter() - began,
        fallbacks=(*fallbacks, *leftovers),
    )
