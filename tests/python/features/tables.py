"""Tables of known content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import penstock
from penstock.features.sources.source import RowSegment, Source
from penstock.io.files.file_marks import FileMark

if TYPE_CHECKING:
    from pathlib import Path


SHAPE = (1000, 24)
"""Sizes of the tables that ranks save together."""


def table_of(
    directory: Path,
    *,
    rows: int,
    width: int,
    dtype: str = "float32",
    offset: int = 0,
    padding: int = 0,
    parts: int = 1,
    checks: Any = None,
) -> tuple[Source, np.ndarray[Any, Any]]:
    """Writes a table to files of its own; returns its source and rows.

    Args:
        directory: Directory of the files.
        rows: Number of rows.
        width: Elements in a row.
        dtype: Type of the elements.
        offset: Bytes before the first row of each file.
        padding: Unused elements after each row.
        parts: Number of files.
        checks: Computes the checksums of a file's content; None for none.
    """
    rng = np.random.default_rng(rows * 31 + width)
    stored = rng.integers(0, 250, (rows, width + padding)).astype(dtype)
    row_bytes = stored[:1].nbytes if rows else (width + padding) * stored.itemsize
    segments, sums, first = [], [], 0
    for part, piece in enumerate(np.array_split(stored, parts)):
        path = directory / f"part-{part}"
        path.write_bytes(b"\xee" * offset + piece.tobytes())
        segments.append(
            RowSegment(
                path=str(path),
                offset=offset,
                first_row=first,
                rows=len(piece),
                mark=FileMark.of(path.stat()),
            )
        )
        first += len(piece)
        if checks is not None:
            sums.append(checks(piece.tobytes()))
    source = Source(
        path=str(directory),
        key="",
        dtype=dtype,
        row_shape=(width,),
        row_bytes=row_bytes,
        rows=rows,
        segments=tuple(segments),
        checks=None if checks is None else np.concatenate(sums),
        padding_bytes=padding * stored.itemsize,
    )
    return source, stored[:, :width].copy()


def save_cut(path: Path) -> None:
    """Saves a table of counted numbers on all ranks, sharded by rows and by columns."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    table = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    rows, columns = (distribute_tensor(table, mesh, [Shard(dim)]) for dim in (0, 1))
    penstock.save(path, {"rows": rows, "columns": columns})
