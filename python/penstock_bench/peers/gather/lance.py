"""Lance: a columnar format made for rows at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock_bench.peers.gather.base import KEY, Plain
from penstock_bench.workloads import row_content

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from penstock_bench.peers.gather.base import Setting


class Lance(Plain):
    """`LanceDataset.take` of a column of vectors."""

    def prepare(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Writes the column."""
        import lance
        import pyarrow as pa

        kind = pa.list_(pa.int64(), setting.words)
        schema = pa.schema([(KEY, kind)])

        def made() -> Iterator[Any]:
            for rows in row_content.chunks(setting.rows, setting.row_bytes):
                column = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), setting.words)
                yield pa.record_batch([column], schema=schema)

        lance.write_dataset(made(), str(setting.files / "dataset"), schema=schema)

    def open(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Opens it."""
        import lance

        self._dataset = lance.dataset(str(setting.files / "dataset"))
        self._words = setting.words

    def one(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows of a batch, by one call."""
        column = self._dataset.take(ids, columns=[KEY])[KEY].combine_chunks()
        found: np.ndarray[Any, Any] = column.flatten().to_numpy()
        return found.reshape(-1, self._words)
