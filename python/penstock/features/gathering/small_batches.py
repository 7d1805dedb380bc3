"""`SmallBatches`: gathers small batches of rows by one native call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.features.gathering.pending import PendingRows
from penstock.tensors import dtypes
from penstock.tensors.copying import bump_versions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import _native
    from penstock.features.gathering.results import Results
    from penstock.features.sources.file_watch import FileWatch


class SmallBatches:
    """Gathers batches by one native call that reads the ids and makes the result, too.

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
        self._results = results
        self._files = files
        self._has_tensors = False
        self._native: _native.SmallGathers | None = results.small_gathers(
            reader, tuple(row_shape), files.times
        )

    def gather(self, ids: Any, out: Any = None) -> Any:
        """The rows of some ids; None, and nothing is done, if the usual way has to be taken."""
        # PyTorch may be imported after the table is open.
        if not self._has_tensors and (dtypes.is_tensor(ids) or dtypes.is_tensor(out)):
            self._add_tensors()
        # Read after that, as the table may have been closed meanwhile.
        native = self._native
        if native is None or (found := native.gather(ids, out)) is None:
            return None
        rows, batch = found
        if out is not None:
            bump_versions([out])
        return rows if batch is None else PendingRows(batch, rows, self._files.check).result()

    def _add_tensors(self) -> None:
        if (native := self._native) is not None:
            self._results.add_tensors(native)
            self._has_tensors = True

    def close(self) -> None:
        """Leaves all batches to the usual way, which raises where the table is closed."""
        self._native = None
