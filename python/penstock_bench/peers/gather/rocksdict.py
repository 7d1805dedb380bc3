"""RocksDB, as rocksdict binds it: what embedding tables of FBGEMM lie in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock_bench.peers.gather.base import Plain
from penstock_bench.peers.gather.lmdb import keys
from penstock_bench.workloads import row_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_bench.peers.gather.base import Setting

_FILE_ROWS = 1 << 17


class RocksDict(Plain):
    """Rows by the number of each, big-endian, not compressed; its own block cache."""

    def prepare(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Writes sorted tables, which the database takes in."""
        import rocksdict

        options = _options(rocksdict)
        database = rocksdict.Rdict(str(setting.files / "database"), options)
        files: list[str] = []
        first, writer = 0, None
        for rows in row_content.chunks(setting.rows, setting.row_bytes):
            for key, row in zip(keys(np.arange(first, first + len(rows))), rows, strict=True):
                if writer is None:
                    files.append(str(setting.files / f"{len(files)}.sst"))
                    writer = rocksdict.SstFileWriter(options=options)
                    writer.open(files[-1])
                writer[key] = row.tobytes()
            first += len(rows)
            is_full = first >= len(files) * _FILE_ROWS or first == setting.rows
            if writer is not None and is_full:
                writer.finish()
                writer = None
        database.ingest_external_file(files)
        database.close()
        for file in files:
            (setting.files / file).unlink(missing_ok=True)

    def open(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Opens it to be read."""
        import rocksdict

        self._database = rocksdict.Rdict(
            str(setting.files / "database"),
            _options(rocksdict),
            access_type=rocksdict.AccessType.read_only(),
        )
        self._words = setting.words

    def one(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows of a batch, by one call."""
        found: Any = self._database.get([*keys(ids)])
        return np.frombuffer(b"".join(found), np.int64).reshape(-1, self._words)


def _options(rocksdict: Any) -> Any:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    return options
