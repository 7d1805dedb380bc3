"""Rows that wait for calls of Penstock's: each says what its measurement needs.

`table.gather(ids, out=tensor)` with a tensor of the GPU: rows of 1 KiB and 4 KiB from a table in
memory, beside kernel reads of pinned memory and the copy engine, and from the disk beside fio's
random reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benches.gpu.run import Run


def gather(run: Run) -> None:
    """Rows by id into memory of the GPU."""
    run.results.skip("gather", "`gather` has no tensors of a GPU for its `out` yet")
