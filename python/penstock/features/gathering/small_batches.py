"""`SmallBatches`: gathers small batches of rows into new tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.features.gathering.pending import PendingRows
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import _native
    from penstock.features.gathering.results import Results
    from penstock.features.sources.file_watch import FileWatch


class SmallBatches:
    """Gathers batches by one native call that makes the tensor, too.

    The usual way takes a dozen calls of PyTorch and NumPy: for a small batch of cached rows, as
    long as to copy the rows.

    Args:
        reader: Reads the rows.
        results: Allocates other results; the memory is shared.
        row_shape: Shape of a row.
        files: The table's files.
    """

    def __init__(
        self,
        reader: _native.RowReader,
        results: Results,
        row_shape: Sequence[int],
        files: FileWatch,
    ) -> None:
        self._reader = reader
        self._results = results
        self._row_shape = tuple(row_shape)
        self._files = files
        self._has_asked = False
        self._is_closed = False
        self._native: _native.RowTensors | None = None

    def gather(self, ids: Any) -> Any:
        """The rows of some ids; None, and nothing is done, if the usual way has to be taken."""
        native = self._native or self._opened(ids)
        if native is None or self._is_closed or (found := native.gather(ids)) is None:
            return None
        rows, batch = found
        return rows if batch is None else PendingRows(batch, rows, self._files.check).result()

    def close(self) -> None:
        """Leaves all batches to the usual way, which raises where the table is closed."""
        # Another thread may be opening it.
        self._native, self._is_closed = None, True

    def _opened(self, ids: Any) -> _native.RowTensors | None:
        # PyTorch may be imported after the table is open.
        if not self._has_asked and dtypes.is_tensor(ids):
            self._has_asked = True
            self._native = self._results.row_tensors(
                self._reader, self._row_shape, self._files.times
            )
        return self._native
