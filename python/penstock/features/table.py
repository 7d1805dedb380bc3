"""`Table`: rows that can be updated, together with their optimizer's state."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from penstock import _native
from penstock.common.found import naming_pointers
from penstock.common.option_kinds import Number
from penstock.errors import CorruptCheckpointError, PenstockError, PenstockWarning
from penstock.features.cache import check_cache, native_cache
from penstock.features.columns import Columns
from penstock.features.delivery import DeviceCopy
from penstock.features.gathering.batches import on_host
from penstock.features.gathering.ids import ids_of
from penstock.features.gathering.pending import PendingRows
from penstock.features.gathering.requests import GAP, GAP_BYTES, RUN_BYTES_MAX, check_length
from penstock.features.gathering.results import Results, target_of
from penstock.features.rows import Rows, packed
from penstock.features.snapshot import write_snapshot
from penstock.features.sources.table_metadata import row_bytes_for
from penstock.io.data_file import reach
from penstock.io.own_io import claim_of, for_rows
from penstock.reports.tables import CompactionReport, TableStats
from penstock.sealing.sealing import Sealing, refuse_sealing
from penstock.tensors import dtypes
from penstock.tensors.arguments import decode_local_path
from penstock.tensors.devices import device_of
from penstock.tensors.memory import check_strided
from penstock.tensors.native_rows import NativeArray

if TYPE_CHECKING:
    from typing import Self

    import torch

    from penstock.common.progress import Progress
    from penstock.features.cache import Cache
    from penstock.features.gathering.ids import RowIds
    from penstock.features.snapshot import SnapshotReport
    from penstock.io.tensor_io import TensorIO
    from penstock.options import Options

_ROWS = Number(1, (1 << 48) - 1, "rows", is_open=False)
_LOG = Number(64 << 10, 1 << 42, "bytes", is_open=False)
_COMPACTION = Number(0, (1 << 63) - 1, "bytes", is_open=False)
_LOG_BYTES = 256 << 20
_RECORD_BYTES = 4 << 20
"""Bytes written at a time: larger requests are not faster."""
_COMPACTION_BYTES_MIN = 1 << 30
_PIECE_BYTES_MIN = 64 << 20
_PIECES_MAX = 256
_BYTES_MAX = 1 << 60
_STEP_BYTES = 8
_PREFETCHES = 4
"""Most prefetches in flight."""


class Table:
    """A table of embeddings on storage, whose rows are read by id and updated.

    A row has columns, such as a weight and its optimizer's state. Updates are appended to a log,
    many rows to a request, and read from there; from time to time a compaction moves them from the
    log to the table's files. `Table.create` makes a table, this class opens it: one process can
    have it open at a time, and only once. Any thread may use it.

    Args:
        path: The table's directory.
        cache: Keeps rows in memory, also updated ones; its policy chooses which.
        compaction_bytes: A `flush` that finds more bytes than this in the logs starts a thread that
            compacts them. ``"auto"``: half the bytes of all rows, but at least 1 GiB; None: never.
        log_bytes: Bytes of a log file; its space is reserved when it is begun.
        gap_bytes: Largest gap between two rows that is read rather than skipped.
        io: Settings of the I/O workers; see `penstock.offload.TensorIO`.

    Attributes:
        path: The table's directory, as an absolute path.
        columns: The shape and the type of each column, by its name.

    Raises:
        CheckpointNotFoundError: There is no table.
        StorageError: A file cannot be read; or the table is open, here or in another process.
        CorruptCheckpointError: A file is not what was written.
        FormatVersionError: The table needs a newer Penstock.
        UnsupportedStateError: A row is longer than a request.
        ValueError: An argument is out of range, or the cache has rows of another size.

    Example:
        >>> import numpy as np, penstock.features, tempfile
        >>> columns = {"weight": (4, "float32"), "momentum": (1, "float32")}
        >>> path = tempfile.mkdtemp() + "/table"
        >>> with penstock.features.Table.create(path, 1000, columns) as table:
        ...     rows = table.lookup(np.array([7, 900]))
        ...     rows["weight"][:] += 1
        ...     table.update(np.array([7, 900]), rows)
        ...     table.flush()
        ...     table.lookup([900])["weight"]
        array([[1., 1., 1., 1.]], dtype=float32)
    """

    @naming_pointers()
    def __init__(
        self,
        path: str | os.PathLike[str] | bytes,
        *,
        cache: Cache | None = None,
        compaction_bytes: int | Literal["auto"] | None = "auto",
        log_bytes: int = _LOG_BYTES,
        gap_bytes: int = GAP_BYTES,
        io: TensorIO | None = None,
    ) -> None:
        # Absolute, as the working directory may change later.
        self.path = os.path.abspath(decode_local_path(path))
        _check_settings(compaction_bytes, log_bytes, gap_bytes)
        check_cache(cache)
        form, note = _native.row_table_form(self.path)
        rows, row_bytes, value_bytes = form.rows, form.row_bytes, form.value_bytes
        self._piece_rows = form.piece_rows
        self._columns = _columns_of(self.path, note, value_bytes)
        self.columns = {column.name: (column.shape, column.dtype) for column in self._columns}
        self._rows, self._row_bytes, self._value_bytes = rows, row_bytes, value_bytes
        if compaction_bytes == "auto":
            compaction_bytes = max(_COMPACTION_BYTES_MIN, rows * row_bytes // 2)
        self._compaction_bytes = compaction_bytes
        self._compaction_at = compaction_bytes or 0
        self._results = Results("uint8", 1)
        self._prefetches: deque[PendingRows] = deque()
        self._has_cache = cache is not None
        self._lock = threading.Lock()
        self._compacting: threading.Thread | None = None
        self._io: TensorIO | None = for_rows(io)
        name = os.path.basename(self.path)
        claim = claim_of(self._io)
        head = reach(os.path.join(self.path, _native.TABLE_MANIFEST), "r", claim.direct)
        with claim.workers(head) as (executor, _):
            check_length(name, row_bytes, claim.block_bytes)
            self._native = _native.RowTable(
                executor,
                claim.weight,
                self.path,
                direct=claim.direct,
                cache=native_cache(cache, value_bytes, name),
                gap_bytes=gap_bytes,
                run_bytes_max=max(RUN_BYTES_MAX, row_bytes),
                log_bytes=log_bytes,
                record_bytes=_RECORD_BYTES,
            )

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str] | bytes,
        rows: int,
        columns: Mapping[str, tuple[Any, Any]],
        *,
        init: Iterable[Mapping[str, Any]] | None = None,
        cache: Cache | None = None,
        compaction_bytes: int | Literal["auto"] | None = "auto",
        log_bytes: int = _LOG_BYTES,
        gap_bytes: int = GAP_BYTES,
        io: TensorIO | None = None,
        sealing: Sealing | None = None,
    ) -> Table:
        """Creates a table, durably, and opens it.

        Args:
            path: Its directory, which is created, with its parents.
            rows: The number of rows.
            columns: The shape and the type of each column in a row, by name, as ``{"weight": (128,
                "float32"), "momentum": ((), "float32")}``.
            init: Initial rows: mappings from columns to some rows each, in order. Values that are
                not given are zero, and take no space until they are written.
            cache: As for `Table`.
            compaction_bytes: Likewise.
            log_bytes: Likewise.
            gap_bytes: Likewise.
            io: Likewise.
            sealing: Not supported yet: refused, as logs and pieces stay clear.

        Raises:
            CannotSealError: ``sealing`` is given; nothing was created.
            CheckpointExistsError: A table is there.
            StorageError: The system refuses it, or another process works there.
            UnsupportedStateError: A row is longer than a request.
            ValueError: An argument is out of range, or ``init`` has too many rows or other columns.
            TypeError: A column is not given as shape and type, or ``init`` has another type.
        """
        where = os.path.abspath(decode_local_path(path))
        refuse_sealing(
            sealing,
            where,
            "keep it on an encrypted disk, or write a table of fixed rows with"
            " penstock.features.write",
        )
        count = _ROWS.whole("rows", rows)
        made = Columns(columns)
        # Refuses all bad arguments before anything is created.
        _check_settings(compaction_bytes, log_bytes, gap_bytes)
        native_cache(cache, made.nbytes, os.path.basename(where))
        row_bytes = row_bytes_for(made.nbytes, _STEP_BYTES, "auto")
        row_bytes = -(-row_bytes // _STEP_BYTES) * _STEP_BYTES
        if count * row_bytes > _BYTES_MAX:
            raise ValueError(f"rows={count}: rows of {row_bytes} bytes are more than a table has")
        # At most 256 pieces, as each takes a descriptor; a compaction holds one twice in memory.
        piece_bytes = max(_PIECE_BYTES_MIN, -(-count * row_bytes // _PIECES_MAX))
        piece_rows = max(1, min(count, piece_bytes // row_bytes))
        form = _native.RowTableForm(count, row_bytes, made.nbytes, piece_rows)
        os.makedirs(os.path.dirname(where), exist_ok=True)
        with for_rows(io) as maker:
            claim = claim_of(maker)
            with claim.workers(None) as (executor, _):
                check_length(os.path.basename(where), row_bytes, claim.block_bytes)
                note = json.dumps({"columns": made.to_json()})
                new = _native.NewRowTable(executor, claim.weight, where, form, note, claim.direct)
            try:
                _fill(new, made, count, init)
                new.finish()
            finally:
                new.close()
        return cls(
            where,
            cache=cache,
            compaction_bytes=compaction_bytes,
            log_bytes=log_bytes,
            gap_bytes=gap_bytes,
            io=io,
        )

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        state = " closed" if self._io is None else ""
        return f"<Table {self.path!r} {self._rows} rows of {', '.join(self.columns)}{state}>"

    def lookup(self, ids: Any, *, device: Any = None) -> Rows:
        """Returns the current rows of some ids, in their order; an id may occur repeatedly.

        Rows for a GPU are read into pinned host memory, then copied on the current stream. The
        current stream waits for the copy, this thread does not.

        Args:
            ids: Integers of any type and shape: a tensor, an array or a sequence. Ids on a device
                are copied to the host first, for which this waits.
            device: Where to put the rows, as PyTorch names devices. Default: the device of ``ids``.

        Returns:
            A mapping from each column to a view: tensors if ``ids`` is one or ``device`` is given,
            else arrays. The memory belongs to the caller: pass the rows to `update` to store
            changes.

        Raises:
            IndexError: An id has no row; names the id and its position.
            TransferError: Bytes cannot be read.
            CorruptCheckpointError: Bytes are not those that were written.
            DeviceError: The stream of the device is being captured, its driver fails, or this is a
                fork of a process that has used it.
            TypeError: The ids are no integers.
            ValueError: There is no such device, or the table is closed.
            PenstockError: This process is a fork of the one that opened the table.
        """
        rows: Rows = self.lookup_async(ids, device=device).result()
        return rows

    def lookup_async(self, ids: Any, *, device: Any = None) -> PendingRows:
        """Starts to look rows up; see `lookup`. Returns rows as of the call, or newer.

        Raises:
            IndexError: An id has no row.
            DeviceError: The stream of the device is being captured, its driver fails, or this is a
                fork of a process that has used it.
            TypeError: The ids are no integers.
            ValueError: There is no such device, or the table is closed.
            PenstockError: This process is a fork of the one that opened the table.
        """
        ids, where = on_host(ids)
        return self._begun(ids_of(ids), where if device is None else device_of(device))

    def _begun(self, numbers: RowIds, device: torch.device | None) -> PendingRows:
        shape = (*numbers.shape, self._value_bytes)
        finish = None
        if device is not None and device.type != "cpu":
            device_copy = DeviceCopy(self._columns, self._results, shape, device)
            rows, finish = device_copy.rows, device_copy.finish
        else:
            is_torch = numbers.is_torch or device is not None
            rows = Rows(self._columns, self._results.empty(shape, is_torch=is_torch))
        try:
            batch = self._native.look_up(numbers.array, numbers.is_signed, target_of(rows.buffer))
        except IndexError as error:
            raise self._named(error, numbers) from None
        return PendingRows(batch, rows, _nothing, finish)

    def prefetch(self, ids: Any) -> None:
        """Starts to read rows into the cache, for a later `lookup`.

        A read error is raised by that lookup. The rows stay in host memory, wherever ``ids`` are.

        Raises:
            IndexError: An id has no row.
            DeviceError: The ids are on a device whose stream is being captured.
            TypeError: The ids are no integers.
            ValueError: The table has no cache, or is closed.
        """
        if not self._has_cache:
            raise ValueError(
                "prefetch: there is no memory to read into: open the table with a cache"
            )
        with self._lock:
            while self._prefetches and self._prefetches[0].done():
                self._prefetches.popleft()
            if len(self._prefetches) < _PREFETCHES:
                self._prefetches.append(self._begun(ids_of(on_host(ids)[0]), None))

    def update(self, ids: Any, rows: Mapping[str, Any]) -> None:
        """Replaces rows; later lookups return the new ones. `flush` makes them durable.

        If an id occurs twice, its last row is stored.

        Args:
            ids: Integers, as `lookup` takes them.
            rows: The result of a `lookup`, or a mapping from every column to a tensor or an array:
                the
                shape of the ids followed by that of the column. Values on a device are copied to
                the
                host, for which this waits.

        Raises:
            IndexError: An id has no row; nothing was written.
            ValueError: A column is missing, or has another shape or type; or the table is closed.
            TypeError: The ids are no integers, or a column is neither a tensor nor an array.
            DeviceError: Values cannot be copied from a device, as its stream is being captured.
            StorageError: The log cannot be written. Open the table again; flushed rows are in it.
            PenstockError: This process is a fork of the one that opened the table.
        """
        numbers = ids_of(on_host(ids)[0])
        if not isinstance(rows, Rows) or rows.columns != self._columns:
            rows = packed(self._columns, numbers.shape, rows)
        buffer = rows.buffer
        wanted = (*numbers.shape, self._value_bytes)
        if tuple(buffer.shape) != wanted:
            raise ValueError(f"rows: of shape {tuple(buffer.shape[:-1])}: ids have {wanted[:-1]}")
        array = NativeArray.of_bytes(*target_of(on_host(buffer, "rows")[0]))
        try:
            self._native.update(numbers.array, numbers.is_signed, array)
        except IndexError as error:
            raise self._named(error, numbers) from None

    def flush(self) -> None:
        """Makes all updates durable: after this returns, they survive a power cut.

        Raises:
            StorageError: The log cannot be written. Open the table again; rows flushed before are
                in it.
            ValueError: The table is closed.
            PenstockError: This process is a fork of the one that opened the table.
        """
        self._native.flush()
        if self._compaction_bytes is not None:
            _, log_bytes = self._native.logged()
            if log_bytes > self._compaction_at:
                self._compact_soon()

    def compact(self) -> CompactionReport:
        """Moves rows from the logs into the table's files, and removes the logs.

        Rewrites, one by one, the files (of 64 MiB or more) that have such rows. Lookups and updates
        may go on meanwhile.

        Raises:
            StorageError: A file cannot be written; the logs stay.
            KeyboardInterrupt: Files rewritten by then stay rewritten.
            PenstockError: This thread is already compacting the table or reading all of it.
            CorruptCheckpointError: Bytes are not those that were written.
            ValueError: The table is closed.
        """
        rows, pieces, nbytes = self._native.freeze().compact()
        return CompactionReport(rows=rows, pieces=pieces, bytes=nbytes)

    def snapshot(
        self,
        path: str | os.PathLike[str] | bytes,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        sealing: Sealing | None = None,
        options: Options | None = None,
        progress: bool | Progress = False,
    ) -> SnapshotReport:
        """Writes all current rows into a checkpoint, as one tensor for each column.

        `penstock.load`, `penstock.verify` and `penstock.features.open` read it like any checkpoint.
        It flushes first. Lookups and updates may go on meanwhile; a compaction waits.

        Args:
            path: The checkpoint's directory.
            metadata: Plain JSON to store with it, readable with `penstock.inspect`.
            overwrite: Replace a complete checkpoint at the path.
            sealing: Not supported yet: refused.
            options: Settings of the I/O; None for ``Options()``.
            progress: True for a bar on standard error, or a function called with the bytes done and
                the bytes in all.

        Raises:
            CannotSealError: ``sealing`` is given; nothing was written.
            CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False; or the
                directory is a table.
            StorageError: The operating system failed an operation: disk full, read-only, …
            CorruptCheckpointError: Bytes are not those that were written.
            PenstockError: This thread is already compacting the table or reading all of it.
            ValueError: The table is closed.
        """
        refuse_sealing(
            sealing,
            decode_local_path(path),
            "look up the rows, and write them with penstock.features.write",
        )
        frozen = self._native.freeze()
        try:
            return write_snapshot(
                decode_local_path(path),
                self._columns,
                (self._rows, self._row_bytes, self._piece_rows),
                frozen.read,
                metadata=metadata,
                overwrite=overwrite,
                options=options,
                progress=progress,
            )
        finally:
            frozen.close()

    def stats(self) -> TableStats:
        """Counters of the table since it was opened, and the size of its logs."""
        counts = self._native.counts()
        logged_rows, log_bytes = self._native.logged()
        return TableStats(
            rows=counts.rows,
            hits=counts.hits,
            shared=counts.shared,
            read_rows=counts.read_rows,
            requests=counts.requests,
            read_bytes=counts.read_bytes,
            logged_rows=logged_rows,
            log_bytes=log_bytes,
        )

    def close(self) -> None:
        """Flushes, waits for a compaction or a snapshot in progress, and closes the table.

        Raises:
            StorageError: Updates cannot be made durable; the table is closed all the same.
            KeyboardInterrupt: The table is closed, too; opening it again waits for the compaction.
        """
        io, self._io = self._io, None
        if io is None:
            return
        try:
            self._native.flush()
        finally:
            self._prefetches.clear()
            try:
                self._native.close()
            finally:
                io.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()

    def _named(self, error: IndexError, numbers: RowIds) -> IndexError:
        return IndexError(f"{error} ({self.path}; ids are {numbers.dtype})")

    def _compact_soon(self) -> None:
        with self._lock:
            if self._compacting is not None and self._compacting.is_alive():
                return
            self._compacting = threading.Thread(target=self._compact, name="penstock-compact")
            self._compacting.start()

    def _compact(self) -> None:
        _, log_bytes = self._native.logged()
        try:
            self.compact()
            self._compaction_at = self._compaction_bytes or 0
        except (PenstockError, ValueError) as error:
            if self._io is None:
                # The table was closed meanwhile: the next one to open it compacts its logs.
                return
            # Waits for twice the logs: a compaction that failed may fail each time.
            self._compaction_at = 2 * log_bytes
            problem = f"{self.path}: rows of logs stay there: {error}"
            warnings.warn(problem, PenstockWarning, stacklevel=2)


def _check_settings(
    compaction_bytes: int | Literal["auto"] | None, log_bytes: int, gap_bytes: int
) -> None:
    GAP.check("gap_bytes", gap_bytes)
    _LOG.check("log_bytes", log_bytes)
    if compaction_bytes not in ("auto", None):
        _COMPACTION.check("compaction_bytes", compaction_bytes)


def _nothing() -> None:
    """The check after a lookup: none, as no other program may change the table's files."""


def _columns_of(path: str, note: str, value_bytes: int) -> Columns:
    try:
        columns = Columns.from_json(json.loads(note)["columns"])
        is_sound = columns.nbytes == value_bytes
    except (KeyError, TypeError, ValueError, RecursionError, PenstockError):
        is_sound = False
    if not is_sound:
        raise CorruptCheckpointError(
            f"{path}: what the table says of its columns makes no sense: restore it from a copy",
            path=path,
            file=_native.TABLE_MANIFEST,
        )
    return columns


def _fill(
    new: _native.NewRowTable,
    columns: Columns,
    count: int,
    init: Iterable[Mapping[str, Any]] | None,
) -> None:
    begun = 0
    if isinstance(init, Mapping) or not isinstance(init, Iterable | None):
        raise TypeError("init: pass an iterable of mappings, as [{'weight': rows}]")
    for chunk in () if init is None else init:
        if not isinstance(chunk, Mapping):
            raise TypeError(f"init: {type(chunk).__name__}: must be mappings of columns to rows")
        first = next(iter(chunk.values()), None)
        if first is not None and dtypes.is_tensor(first):
            check_strided(first, f"init: {next(iter(chunk))!r}")
        if first is None or not getattr(first, "shape", ()):
            raise ValueError("init: a mapping has no rows of any column")
        rows = len(first)
        begun += rows
        if begun > count:
            raise ValueError(f"init: {begun} rows or more: the table has {count}")
        buffer = packed(columns, (rows,), chunk, is_whole=False).buffer
        new.append(NativeArray.of_bytes(*target_of(buffer)))
