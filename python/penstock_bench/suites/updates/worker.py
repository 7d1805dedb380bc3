"""Rows written anew, in a process of its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.features import Table
from penstock.offload import TensorIO
from penstock_bench.peers.gather.libraries import fill_rocksdb, keys, rocksdb_options

ROW_BYTES = 512
_CHUNK_ROWS = 1 << 15
_COLUMN = {"row": (ROW_BYTES // 8, "int64")}


@dataclass(frozen=True)
class Task:
    """One process.

    Files stay from round to round. A process joins the group that limits its memory; None for
    none.
    """

    kind: str
    directory: str
    group: str | None
    rows: int
    batch_rows: int
    batches: int
    flushes: int
    seed: int


def prepare(task: Task) -> dict[str, Any]:
    """Makes the table."""
    {"table": _table, "pwrite": _file, "queue": _file, "rocksdict": _database}[task.kind](task)
    return {}


def run(task: Task) -> dict[str, Any]:
    """Writes rows anew, and looks whether the last of them are there."""
    if task.group is not None:
        Path(task.group).write_text("0")
    random = np.random.default_rng(task.seed)
    batches = [
        random.choice(task.rows, task.batch_rows, replace=False)
        for _ in range(task.batches * task.flushes)
    ]
    rows = _rows(np.arange(task.batch_rows), task.seed)
    writer = {"table": _Table, "pwrite": _Pwrite, "queue": _Queue, "rocksdict": _RocksDict}
    with writer[task.kind](task) as one:
        # A library that begins a log does it now.
        one.update(batches[0][:1], rows[:1])
        one.flush()
        spent, begun = time.process_time(), time.perf_counter()
        for index, ids in enumerate(batches):
            one.update(ids, rows)
            if (index + 1) % task.batches == 0:
                one.flush()
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - spent
        ids = batches[-1]
        found = one.read(ids[:100])
    if not np.array_equal(found, rows[:100]):
        raise AssertionError(f"{task.kind} has not written what it was given")
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, **one.report()}


def _rows(ids: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    words = ROW_BYTES // 8
    return (ids[:, None] * words + np.arange(words) + seed).astype(np.int64)


def _chunks(rows: int) -> Any:
    for first in range(0, rows, _CHUNK_ROWS):
        yield _rows(np.arange(first, min(rows, first + _CHUNK_ROWS)), 0)


def _table(task: Task) -> None:
    init = ({"row": chunk} for chunk in _chunks(task.rows))
    Table.create(task.directory, task.rows, _COLUMN, init=init).close()


def _file(task: Task) -> None:
    with open(task.directory, "wb") as file:
        for chunk in _chunks(task.rows):
            file.write(chunk.tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _database(task: Task) -> None:
    fill_rocksdb(task.directory, _chunks(task.rows))


class _Writer:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets it go."""

    def report(self) -> dict[str, Any]:
        """Further figures of its own."""
        return {}


class _Table(_Writer):
    def __init__(self, task: Task) -> None:
        self._table = Table(task.directory, compaction_bytes=None)

    def update(self, ids: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
        self._table.update(ids, {"row": rows})

    def flush(self) -> None:
        self._table.flush()

    def read(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self._table.lookup(ids)["row"]
        return found

    def close(self) -> None:
        begun = time.perf_counter()
        self._report = self._table.compact()
        self._seconds = time.perf_counter() - begun
        self._table.close()

    def report(self) -> dict[str, Any]:
        return {"compaction_seconds": self._seconds, "compacted_rows": self._report.rows}


class _Pwrite(_Writer):
    def __init__(self, task: Task) -> None:
        self._file = os.open(task.directory, os.O_RDWR)

    def update(self, ids: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
        # In order of their places, which is the best that it can do.
        order = np.argsort(ids)
        for place, row in zip((ids[order] * ROW_BYTES).tolist(), rows[order], strict=True):
            os.pwrite(self._file, row, place)

    def flush(self) -> None:
        os.fdatasync(self._file)

    def read(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = [os.pread(self._file, ROW_BYTES, int(one) * ROW_BYTES) for one in ids]
        return np.frombuffer(b"".join(found), np.int64).reshape(len(ids), -1)

    def close(self) -> None:
        os.close(self._file)


class _Queue(_Writer):
    """Writes in place as well, of half pages too, but with a full queue."""

    def __init__(self, task: Task) -> None:
        self._io = TensorIO()
        self._file = self._io.open(task.directory, "w")

    def update(self, ids: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
        places = (ids * ROW_BYTES).tolist()
        requests = ((row, self._file, place) for row, place in zip(rows, places, strict=True))
        self._io.write_all(requests).result()

    def flush(self) -> None:
        os.fdatasync(self._descriptor())

    def _descriptor(self) -> int:
        if not hasattr(self, "_synced"):
            self._synced = os.open(self._file.path, os.O_RDWR)
        return self._synced

    def read(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = np.empty((len(ids), ROW_BYTES // 8), np.int64)
        places = (ids * ROW_BYTES).tolist()
        requests = ((row, self._file, place) for row, place in zip(found, places, strict=True))
        self._io.read_all(requests).result()
        return found

    def close(self) -> None:
        self._file.close()
        self._io.close()
        os.close(self._descriptor())


class _RocksDict(_Writer):
    def __init__(self, task: Task) -> None:
        import rocksdict

        self._database = rocksdict.Rdict(task.directory, rocksdb_options())
        self._batch = rocksdict.WriteBatch
        self._lazy, self._synced = rocksdict.WriteOptions(), rocksdict.WriteOptions()
        # The log is written at once in both; what is synced makes durable what came before.
        self._synced.sync = True

    def update(self, ids: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
        batch = self._batch(raw_mode=True)
        for key, row in zip(keys(ids), rows, strict=True):
            batch.put(key, row.tobytes())
        self._database.write(batch, self._lazy)

    def flush(self) -> None:
        batch = self._batch(raw_mode=True)
        batch.put(b"flush", b"")
        self._database.write(batch, self._synced)

    def read(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found: Any = self._database.get([*keys(ids)])
        return np.frombuffer(b"".join(found), np.int64).reshape(len(ids), -1)

    def close(self) -> None:
        self._database.close()
