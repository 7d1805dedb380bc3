"""Rows of tables that need not fit into memory, read by id.

>>> import numpy as np, penstock.features, tempfile
>>> path = tempfile.mkdtemp() + "/table"
>>> rows = np.arange(8.0).reshape(4, 2)
>>> report = penstock.features.write(path, rows)
>>> with penstock.features.open(path, cache=penstock.features.Cache(1 << 20)) as table:
...     table.gather([2, 0]).tolist()
[[4.0, 5.0], [0.0, 1.0]]
"""

from __future__ import annotations

from penstock.features.cache import Cache
from penstock.features.device import DeviceFeatures, cuda_header
from penstock.features.features import Features, FeaturesStats
from penstock.features.gathering.lookahead import HintedRows
from penstock.features.gathering.pending import PendingRows
from penstock.features.indexed.indexed_rows import IndexedRows, IndexedStats
from penstock.features.indexed.opening import open_indexed
from penstock.features.indexed.ragged import Ragged
from penstock.features.opening import open
from penstock.features.rank import rank
from penstock.features.rows import Rows
from penstock.features.snapshot import SnapshotReport
from penstock.features.table import Table
from penstock.features.writing.write import WriteReport, write
from penstock.reports.tables import CompactionReport, TableStats

__all__ = [
    "Cache",
    "CompactionReport",
    "DeviceFeatures",
    "Features",
    "FeaturesStats",
    "HintedRows",
    "IndexedRows",
    "IndexedStats",
    "PendingRows",
    "Ragged",
    "Rows",
    "SnapshotReport",
    "Table",
    "TableStats",
    "WriteReport",
    "cuda_header",
    "open",
    "open_indexed",
    "rank",
    "write",
]
