"""Rows in memory, in files that are mapped, and in databases."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock_bench.peers.gather.base import KEY, Plain
from penstock_bench.workloads import row_content

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock_bench.peers.gather.base import Setting

_Array = np.ndarray[Any, Any]

_LMDB_TIMES_BYTES = 4
"""The largest map, relative to the rows: a tree whose rows are of a page wastes up to half."""
_ROCKSDB_FILE_ROWS = 1 << 17


class Resident(Plain):
    """`torch.index_select` of a tensor that has all rows up to the last that is asked for.

    Args:
        reuses: Whether results go to memory that is used again, which has no page faults; else each
            is a tensor of its own, as loaders make them.
    """

    def __init__(self, *, reuses: bool = False) -> None:
        self._reuses = reuses

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Reads them."""
        import torch

        count = 1 + max(int(ids.max()) for ids in batches)
        read = np.fromfile(setting.file, np.int64, count * setting.words, offset=setting.offset)
        self._rows = torch.from_numpy(read).view(count, setting.words)
        self._out: Any = torch.empty((max(map(len, batches)), setting.words), dtype=torch.int64)
        self._torch = torch

    def one(self, ids: _Array) -> _Array:
        """The rows of a batch."""
        index = self._torch.from_numpy(ids)
        out = self._out[: len(ids)] if self._reuses else None
        found: _Array = self._torch.index_select(self._rows, 0, index, out=out).numpy()
        return found


class Memmap(Plain):
    """`numpy.memmap`, indexed by the ids."""

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Maps it."""
        self._rows: Any = _mapped(setting, "r")

    def one(self, ids: _Array) -> _Array:
        """The rows of a batch."""
        return np.asarray(self._rows[ids])


class RandomMapped(Memmap):
    """The same, of a mapping that the kernel does not read ahead in."""

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Maps it."""
        with open(setting.file, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapping.madvise(mmap.MADV_RANDOM)
        count = setting.rows * setting.words
        whole = np.frombuffer(mapping, np.int64, count, setting.offset)
        self._rows = whole.reshape(setting.rows, setting.words)


class TorchMapped(Plain):
    """`torch.index_select` of a tensor over a mapping."""

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Maps it; copy-on-write, as tensors may be written to."""
        import torch

        self._rows = torch.from_numpy(_mapped(setting, "c"))
        self._torch = torch

    def one(self, ids: _Array) -> _Array:
        """The rows of a batch."""
        index = self._torch.from_numpy(ids)
        found: _Array = self._torch.index_select(self._rows, 0, index).numpy()
        return found


def _mapped(setting: Setting, mode: Any) -> _Array:
    shape = setting.rows, setting.words
    return np.memmap(setting.file, np.int64, mode, setting.offset, shape)


class Lance(Plain):
    """Lance, a columnar format made for rows at random: `take` of a column of vectors."""

    def prepare(self, setting: Setting, batches: Sequence[_Array]) -> None:
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

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Opens it."""
        import lance

        self._dataset = lance.dataset(str(setting.files / "dataset"))
        self._words = setting.words

    def one(self, ids: _Array) -> _Array:
        """The rows of a batch, by one call."""
        column = self._dataset.take(ids, columns=[KEY])[KEY].combine_chunks()
        found: _Array = column.flatten().to_numpy()
        return found.reshape(-1, self._words)


class Lmdb(Plain):
    """LMDB, a B+ tree in a mapped file; no read-ahead, which is what its makers advise.

    A key is the number of its row, big-endian.
    """

    def prepare(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Writes the tree, in the order of its keys."""
        import lmdb

        map_bytes = _LMDB_TIMES_BYTES * setting.rows * (setting.row_bytes + 64) + (64 << 20)
        database = lmdb.open(setting.place, map_size=map_bytes, sync=False, writemap=True)
        chunks = row_content.chunks(setting.rows, setting.row_bytes)
        with database, database.begin(write=True) as transaction:
            transaction.cursor().putmulti(pairs(chunks), append=True)

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Opens it to be read."""
        import lmdb

        database = lmdb.open(setting.place, readonly=True, lock=False, readahead=False)
        self._cursor = database.begin(buffers=True).cursor()
        self._words = setting.words

    def one(self, ids: _Array) -> _Array:
        """The rows of a batch, by one call."""
        found = self._cursor.getmulti(keys(ids))
        return np.frombuffer(b"".join([row for _, row in found]), np.int64).reshape(-1, self._words)


class RocksDict(Plain):
    """RocksDB, as rocksdict binds it: what embedding tables of FBGEMM lie in.

    Keys as those of LMDB; not compressed; its own block cache.
    """

    def prepare(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Writes sorted tables, which the database takes in."""
        fill_rocksdb(setting.place, row_content.chunks(setting.rows, setting.row_bytes))

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Opens it to be read."""
        import rocksdict

        access = rocksdict.AccessType.read_only()
        self._database = rocksdict.Rdict(setting.place, rocksdb_options(), access_type=access)
        self._words = setting.words

    def one(self, ids: _Array) -> _Array:
        """The rows of a batch, by one call."""
        found: Any = self._database.get([*keys(ids)])
        return np.frombuffer(b"".join(found), np.int64).reshape(-1, self._words)


def keys(ids: _Array) -> list[bytes]:
    """The key of each id: eight bytes whose order is that of the numbers."""
    return list(map(struct.Struct(">Q").pack, ids.tolist()))


def pairs(chunks: Iterator[_Array]) -> Iterator[tuple[bytes, bytes]]:
    """The rows of chunks with their keys, in the order of these."""
    first = 0
    for rows in chunks:
        for key, row in zip(keys(np.arange(first, first + len(rows))), rows, strict=True):
            yield key, row.tobytes()
        first += len(rows)


def rocksdb_options() -> Any:
    """Options of a database of rows, which are not compressed."""
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    return options


def fill_rocksdb(place: str, chunks: Iterator[_Array]) -> None:
    """Makes a database of rows, by sorted tables that it takes in."""
    import rocksdict

    database = rocksdict.Rdict(place, rocksdb_options())
    files: list[str] = []
    writer: Any = None
    for index, (key, row) in enumerate(pairs(chunks)):
        if index % _ROCKSDB_FILE_ROWS == 0:
            if writer is not None:
                writer.finish()
            files.append(f"{place}-{len(files)}.sst")
            writer = rocksdict.SstFileWriter(options=rocksdb_options())
            writer.open(files[-1])
        writer[key] = row
    writer.finish()
    database.ingest_external_file(files)
    database.close()
    for file in files:
        Path(file).unlink(missing_ok=True)
