"""`Features`: a table of rows, read by id."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.common.option_kinds import Number
from penstock.errors import PenstockError
from penstock.features.cache import check_cache, native_cache
from penstock.features.device import STAGING, STAGING_BYTES, DeviceFeatures, ordinal_of
from penstock.features.gathering.batches import Batches, on_host
from penstock.features.gathering.ids import RowIds, ids_of
from penstock.features.gathering.lookahead import HintedRows, Lookahead
from penstock.features.gathering.requests import GAP, GAP_BYTES, RUN_BYTES_MAX, check_length
from penstock.features.gathering.results import Results
from penstock.features.gathering.small_batches import SmallBatches
from penstock.features.sources.file_watch import FileWatch
from penstock.io.data_file import reach
from penstock.io.own_io import claim_of, for_rows
from penstock.reports import Fallback
from penstock.tensors.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    import torch

    from penstock.features.cache import Cache
    from penstock.features.gathering.pending import PendingRows
    from penstock.features.sources.source import Source
    from penstock.io.tensor_io import TensorIO

WINDOW = Number(0, 1 << 20, "batches", is_open=False)
_PIN_BYTES = 16 << 20
_AHEAD_ROWS = 4096
"""A stream starts gathers this many rows ahead of the batch it waits for, which keeps the device's
queue full from one batch to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesStats:
    """Counters of a table since it was opened.

    Attributes:
        rows: Rows requested.
        hits: Rows of these found in the cache.
        shared: Rows of these that were already being read for another batch.
        read_rows: Rows read from storage; a batch reads a row once.
        requests: Read requests.
        read_bytes: Bytes read from storage, with the gaps between rows.
        useful_bytes: Bytes of the rows read.
        read_again: Rows read a second time, because the first read returned damaged bytes or
            another batch's request for the row failed.
        device_bytes: Bytes of rows that GPUs copied from pinned memory by themselves; 0 where
            PyTorch copied them.
        is_checked: Whether rows read are compared with checksums or, if sealed, with tags.
        engine: ``"uring"`` or ``"threads"``.
        direct: Whether reads bypass the page cache.
        fallbacks: Faster ways that could not be used, each with its reason.
    """

    rows: int
    hits: int
    shared: int
    read_rows: int
    requests: int
    read_bytes: int
    useful_bytes: int
    read_again: int
    device_bytes: int
    is_checked: bool
    engine: str
    direct: bool
    fallbacks: tuple[Fallback, ...]

    @property
    def hit_rate(self) -> float:
        """The share of requested rows that were in memory or already being read."""
        return (self.hits + self.shared) / self.rows if self.rows else 0.0

    @property
    def amplification(self) -> float:
        """Bytes read for each useful byte."""
        return self.read_bytes / self.useful_bytes if self.useful_bytes else 0.0


class Features:
    """Rows of a table that need not fit into memory; made by `penstock.features.open`.

    Any thread may gather. A batch reads each row once, past the page cache where the file system
    allows it; one request covers neighbouring rows where reading the gap between them takes less
    time than another request.

    A pickled table, as for a spawned process, is opened again where it is unpickled: same files,
    same settings, an empty cache of the same budget. In a fork of the process every call raises:
    open the table there.

    Args:
        source: The table's files.
        cache: Keeps rows in memory; None for no cache.
        gap_bytes: Bytes that the device reads in the time of one request: gaps between rows are
            read where that saves an eighth of the batch's time.
        run_bytes_max: Most bytes of a request; 256 KiB. A longer row is one request all the same.
        io: Settings of the I/O workers; see `penstock.offload.TensorIO`.

    Attributes:
        source: The table's files.
        shape: Number of rows, followed by the shape of a row.
        dtype: Name of the element type.

    Raises:
        StorageError: A file cannot be opened, or the requested engine cannot run.
        CorruptCheckpointError: A file has changed since the table was found.
        UnsupportedStateError: A row is longer than a request.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        source: Source,
        *,
        cache: Cache | None = None,
        gap_bytes: int | None = None,
        run_bytes_max: int = RUN_BYTES_MAX,
        io: TensorIO | None = None,
    ) -> None:
        gap_bytes = GAP_BYTES if gap_bytes is None else gap_bytes
        GAP.check("gap_bytes", gap_bytes)
        check_cache(cache)
        self.source = source
        self._cache = cache
        self._gap_bytes = gap_bytes
        self.shape = (source.rows, *source.row_shape)
        self.dtype = source.dtype
        self._value_bytes = source.row_bytes - source.padding_bytes
        item_bytes = self._value_bytes
        for size in source.row_shape:
            item_bytes //= size
        self._process = os.getpid()
        self._pinned: list[RowIds] = []
        self._served: weakref.WeakSet[DeviceFeatures] = weakref.WeakSet()
        self._io: TensorIO | None = for_rows(io)
        self._files = FileWatch(source)
        paths = dict.fromkeys(segment.path for segment in source.segments)
        claim = claim_of(self._io)
        opened = {path: reach(path, "r", claim.direct) for path in paths}
        files = list(opened.values())
        self._fallbacks = tuple(
            Fallback(reason, "buffered")
            for reason in sorted({file.fallback for file in files if file.fallback})
        )
        self._is_direct = all(file.direct for file in files)
        name = source.key or os.path.basename(source.path)
        with claim.workers(files[0] if files else None) as (executor, _):
            self._engine = executor.engine
            other = ", or read them with TensorIO.read"
            check_length(name, source.row_bytes, claim.block_bytes, other)
            self._reader = _native.RowReader(
                executor,
                claim.weight,
                [
                    (opened[segment.path], segment.offset, segment.rows)
                    for segment in source.segments
                ],
                row_bytes=source.row_bytes,
                value_bytes=self._value_bytes,
                checks=None if source.checks is None else _words(source.checks),
                openers=None if source.opener is None else [source.opener],
                cache=native_cache(cache, self._value_bytes, name),
                gap_bytes=gap_bytes,
                run_bytes_max=max(run_bytes_max, source.row_bytes),
            )
        results = Results(source.dtype, item_bytes)
        self._batches = Batches(self._reader, results, self._files.check)
        self._small = SmallBatches(self._reader, results, source.row_shape, self._files)
        self._files.check()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Any) -> Any:
        return self.gather(ids)

    def __reduce__(self) -> tuple[Any, ...]:
        # Files and workers belong to a process: another one opens its own.
        self._check_open()
        return _opened_again, (self.source, self._cache, self._gap_bytes, self._io)

    def __repr__(self) -> str:
        state = " closed" if self._io is None else ""
        return f"<Features {self.source.path!r} {self.dtype}{list(self.shape)}{state}>"

    def gather(self, ids: Any, out: Any = None, *, device: Any = None) -> Any:
        """Returns the rows of some ids, in the order of the ids; an id may occur repeatedly.

        Rows for a GPU are packed in pinned host memory, and the GPU copies them from there after
        the work that was queued on the current stream at the call. The current stream waits for the
        copy, this thread does not.

        Args:
            ids: Integers of any type and shape: a tensor, an array or a sequence. Ids on a device
                are copied to the host first, for which this waits.
            out: Memory for the rows: an array, or a contiguous tensor of any device; the shape of
                ``ids`` followed by that of a row, of the table's type.
            device: Where to put a tensor of the rows, as PyTorch names devices. Default: the device
                of ``out`` if given, else that of ``ids``.

        Returns:
            ``out`` if given; else a tensor if ``ids`` is one or ``device`` is given, else an array.

        Raises:
            IndexError: An id has no row; names the id and its position.
            TransferError: Bytes cannot be read.
            CorruptCheckpointError: A file has changed, or bytes are not those that were written.
            DeviceError: The stream of the device is being captured, its driver fails, or this is a
                fork of a process that has used it.
            TypeError: The ids are no integers.
            ValueError: ``out`` does not fit, there is no such device, or the table is closed.
        """
        if device is None and (rows := self._small.gather(ids, out)) is not None:
            return rows
        return self.gather_async(ids, out, device=device).result()

    def gather_async(self, ids: Any, out: Any = None, *, device: Any = None) -> PendingRows:
        """Starts to gather rows; see `gather`. The result must not be used before it is done.

        Raises:
            IndexError: An id has no row; names the id and its position.
            DeviceError: The stream of the device is being captured, its driver fails, or this is a
                fork of a process that has used it.
            TypeError: The ids are no integers.
            ValueError: ``out`` does not fit, there is no such device, or the table is closed.
        """
        ids, where = on_host(ids)
        return self._begun(ids_of(ids), out, _device_of_rows(device, out, where))

    def _begun(
        self,
        numbers: RowIds,
        out: Any = None,
        device: torch.device | None = None,
        hinted: int | None = None,
    ) -> PendingRows:
        self._check_open()
        shape = (*numbers.shape, *self.source.row_shape)
        # Not `_naming`: entering a generator takes as long as announcing a small batch.
        try:
            return self._batches.begin(numbers, shape, out, device, hinted)
        except IndexError as error:
            raise self._named(error, numbers) from None

    def pin(self, ids: Any) -> int:
        """Reads rows into the cache and keeps them there until the table is closed.

        Args:
            ids: Integers, as `gather` takes them, the most important first, as `rank` returns them:
                rows that do not fit are left out.

        Returns:
            The number of pinned rows in the cache, of all its tables.

        Raises:
            IndexError: An id has no row.
            TypeError: The ids are no integers.
            ValueError: There is no cache, or the table is closed.
            StorageError: The rows cannot be read.
        """
        self._check_open()
        numbers = ids_of(on_host(ids)[0])
        with self._naming(numbers):
            count = self._reader.pin(numbers.array, numbers.is_signed)
        if count is None:
            raise ValueError("pin: there is no cache to keep rows in: open the table with one")
        self._pinned.append(numbers)
        flat = numbers.values.reshape(-1)[:count]
        step = max(1, _PIN_BYTES // self._value_bytes)
        for first in range(0, len(flat), step):
            self.gather(flat[first : first + step])
        return count

    @contextlib.contextmanager
    def _naming(self, numbers: RowIds) -> Iterator[None]:
        try:
            yield
        except IndexError as error:
            raise self._named(error, numbers) from None

    def _named(self, error: IndexError, numbers: RowIds) -> IndexError:
        return IndexError(f"{error} ({self._name}; ids are {numbers.dtype})")

    def _check_open(self) -> None:
        if self._io is None:
            raise ValueError(f"{self!r} is closed: open it again")
        if self._process != os.getpid():
            raise PenstockError(
                f"{self.source.path} was opened by process {self._process}, of which this one is a"
                " fork: open it here"
            )

    def stream(
        self, batches: Iterable[Any], *, window: int = 8, device: Any = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yields the rows of batch after batch, starting to read later ones in advance.

        Args:
            batches: An iterable of the ids of each batch.
            window: Batches taken from ``batches`` beyond those being read, so that the cache knows
                which rows they need. Their ids take memory: some 45 bytes each.
            device: Where the rows go; see `gather`.

        Yields:
            The ids of a batch (of arrays, tensors and lists a copy) and its rows. At least one
            batch, and some thousands of rows, are read ahead. An error raised by ``batches`` or by
            a gather is raised after all batches before it, with a note that names the batch.

        Raises:
            ValueError: ``window`` is negative, or there is no such device.
        """
        WINDOW.check("window", window)
        device = device_of(device)
        known: deque[tuple[Any, tuple[HintedRows, int]]] = deque()
        begun: deque[tuple[Any, PendingRows, int]] = deque()
        coming, rows = Lookahead(batches), 0
        try:
            while True:
                while len(known) <= window and (batch := coming.next(self._hinted)) is not None:
                    known.append(batch)
                if not known:
                    break
                ids, (hinted, count) = known.popleft()
                begun.append((ids, hinted.gather_async(device=device), count))
                rows += count
                while len(begun) > 1 and (
                    rows - begun[0][2] >= _AHEAD_ROWS
                    # Starting more would keep no queue full, and would push finished results out of
                    # the processor's caches before the caller has read them.
                    or (begun[-1][1].done() and begun[0][1].done())
                ):
                    ids, pending, count = begun.popleft()
                    rows -= count
                    yield ids, pending.result()
            while begun:
                ids, pending, _ = begun.popleft()
                yield ids, pending.result()
            coming.end()
        finally:
            # Started gathers finish by themselves, and hold their memory until then.
            for _, (hinted, _) in known:
                hinted.forget()

    def hint(self, ids: Any) -> HintedRows:
        """Announces rows to the cache that will be gathered, after all those announced before.

        The cache keeps announced rows while there is room; among them it evicts the row needed last
        first (Belady). `stream` does this by itself.

        Args:
            ids: As `gather` takes them; they must not change before the gather.

        Returns:
            An object that gathers the rows; dropping it withdraws the announcement.

        Raises:
            IndexError: An id has no row; names the id and its position.
            TypeError: The ids are no integers.
            ValueError: The table is closed.

        Example:
            >>> import numpy as np, penstock.features as features, tempfile
            >>> path = tempfile.mkdtemp() + "/table"
            >>> report = features.write(path, np.arange(8.0).reshape(4, 2))
            >>> with features.open(path, cache=features.Cache(1 << 16)) as table:
            ...     first, second = (table.hint(ids) for ids in ([0, 3], [3, 1]))
            ...     first.gather_async().result().tolist()
            ...     second.gather_async().result().tolist()
            [[0.0, 1.0], [6.0, 7.0]]
            [[6.0, 7.0], [2.0, 3.0]]
        """
        hinted, _ = self._hinted(ids)
        return hinted

    def _hinted(self, ids: Any) -> tuple[HintedRows, int]:
        """Announces rows; also returns their number, at least 1."""
        ids, where = on_host(ids)
        numbers = ids_of(ids)
        self._check_open()
        reader = self._reader
        with self._naming(numbers):
            number = reader.hint(numbers.array, numbers.is_signed)
        hinted = HintedRows(
            lambda out, device: self._begun(
                numbers, out, _device_of_rows(device, out, where), number
            ),
            lambda: None if number is None else reader.forget(number),
        )
        return hinted, max(1, numbers.values.size)

    def on_device(
        self, device: Any = "cuda", *, staging_bytes: int = STAGING_BYTES
    ) -> DeviceFeatures:
        """Lets kernels of a GPU gather rows, for ids that are on the GPU.

        Args:
            device: A CUDA device, as PyTorch names it.
            staging_bytes: Approximate size of the pinned memory into which rows are read; it bounds
                the rows in flight.

        Returns:
            An object that gathers on the device, until it or this table is closed.

        Raises:
            DeviceError: There is no driver, it is too old for the kernels, or it cannot pin memory.
            ValueError: It is no CUDA device, a value is out of range, or the table is closed.
        """
        self._check_open()
        STAGING.check("staging_bytes", staging_bytes)
        ordinal = ordinal_of(device)
        native = _native.RowProxy(self._reader, ordinal, staging_bytes)
        served = DeviceFeatures(native, self.source, ordinal, self._files.check, self._check_open)
        self._served.add(served)
        return served

    def stats(self) -> FeaturesStats:
        """Counters of the table since it was opened."""
        counts = self._reader.counts()
        device_bytes, unpinned = self._reader.device_copies()
        fallbacks = self._fallbacks
        if unpinned is not None:
            fallbacks = (*fallbacks, Fallback(unpinned, "unpinned"))
        return FeaturesStats(
            rows=counts.rows,
            hits=counts.hits,
            shared=counts.shared,
            read_rows=counts.read_rows,
            requests=counts.requests,
            read_bytes=counts.read_bytes,
            useful_bytes=counts.read_rows * self._value_bytes,
            read_again=counts.read_again,
            device_bytes=device_bytes,
            is_checked=self.source.is_checked,
            engine=self._engine,
            direct=self._is_direct,
            fallbacks=fallbacks,
        )

    def close(self) -> None:
        """Waits for gathers in flight, then closes the files and releases the workers."""
        io, self._io = self._io, None
        self._small.close()
        if io is None:
            return
        try:
            for served in list(self._served):
                served.close()
        finally:
            if self._process == os.getpid():
                self._reader.finish_devices()
                for numbers in self._pinned:
                    self._reader.unpin(numbers.array, numbers.is_signed)
            io.close()
            self.source.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _name(self) -> str:
        key = f"{self.source.key!r} of " if self.source.key else ""
        return f"{key}{self.source.path}"


def _device_of_rows(device: Any, out: Any, where: torch.device | None) -> torch.device | None:
    """The device of a batch's rows: ``device``, else that of ``out``, else that of the ids."""
    if device is None and out is None:
        return where
    return device_of(device)


def _words(checks: Any) -> Any:
    return checks.ctypes.data, (checks.size,), None, checks.itemsize, checks


def _opened_again(source: Source, cache: Cache | None, gap_bytes: int, io: TensorIO) -> Features:
    try:
        return Features(source, cache=cache, gap_bytes=gap_bytes, io=io)
    except BaseException:
        source.release()
        raise
