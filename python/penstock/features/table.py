"""`Table`: rows that are written anew, with the state of their optimizer."""

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
from penstock.features.batches import on_host
from penstock.features.cache import check_cache, native_cache
from penstock.features.columns import Columns
from penstock.features.delivery import Delivery
from penstock.features.ids import ids_of
from penstock.features.padding import row_bytes_for
from penstock.features.pending import PendingRows
from penstock.features.requests import GAP, GAP_BYTES, RUN_BYTES_MAX, check_length
from penstock.features.results import Results, target_of
from penstock.features.rows import Rows, packed
from penstock.features.snapshot import write_snapshot
from penstock.features.table_reports import FoldReport, TableStats
from penstock.io.arguments import decode_local_path
from penstock.io.own_io import for_rows
from penstock.tensors import dtypes
from penstock.tensors.devices import device_of
from penstock.tensors.memory import check_strided

if TYPE_CHECKING:
    from typing import Self

    import torch

    from penstock.common.progress import Progress
    from penstock.features.cache import Cache
    from penstock.features.ids import Ids
    from penstock.features.snapshot import SnapshotReport
    from penstock.io.tensor_io import TensorIO
    from penstock.options import Options

_ROWS = Number(1, (1 << 48) - 1, "rows", is_open=False)
_LOG = Number(64 << 10, 1 << 42, "bytes", is_open=False)
_FOLD = Number(0, (1 << 63) - 1, "bytes", is_open=False)
_LOG_BYTES = 256 << 20
_FRAME_BYTES = 4 << 20
"""What is written at once: requests of more are not faster."""
_FOLD_BYTES_MIN = 1 << 30
_PIECE_BYTES_MIN = 64 << 20
_PIECES_MAX = 256
_BYTES_MAX = 1 << 60
_STEP_BYTES = 8
_PREFETCHES = 4
"""So many are under way at a time, at most."""


class Table:
    """A table of embeddings on storage, whose rows are read by id and written anew.

    A row has columns, such as a weight and what its optimizer knows of it. What is written goes to
    the end of a log, many rows to a request, and is found there; from time to time it is put back
    among the other rows. `Table.create` makes a table, and this opens it: one process has it at a
    time, once. Any thread may use it.

    Args:
        path: Its directory.
        cache: Has rows stay in memory; also those that are written. Its policy says which.
        fold_bytes: When logs have so many bytes at a `flush`, a thread folds them. ``"auto"`` for
            half of what the rows take, and a GiB at least; None for never.
        log_bytes: Of a log. Its space is reserved when it is begun.
        gap_bytes: Between rows, what is rather read than left out.
        io: Settings of the workers; see `penstock.offload.TensorIO`.

    Attributes:
        path: The same.
        columns: The sizes and the type of each column, by its name.

    Raises:
        CheckpointNotFoundError: There is no table.
        StorageError: A file cannot be read; or the table is open, here or in another process.
        CorruptCheckpointError: A file is not what was written.
        FormatVersionError: The table takes a newer Penstock.
        UnsupportedStateError: A row is longer than a request.
        ValueError: A value is out of range, or the cache has rows of another size.

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
        fold_bytes: int | Literal["auto"] | None = "auto",
        log_bytes: int = _LOG_BYTES,
        gap_bytes: int = GAP_BYTES,
        io: TensorIO | None = None,
    ) -> None:
        # Whatever the working directory is later on.
        self.path = os.path.abspath(decode_local_path(path))
        _check_settings(fold_bytes, log_bytes, gap_bytes)
        check_cache(cache)
        (rows, row_bytes, value_bytes, self._piece_rows), note = _native.row_table_form(self.path)
        self._columns = _noted(self.path, note, value_bytes)
        self.columns = {column.name: (column.shape, column.dtype) for column in self._columns}
        self._rows, self._row_bytes, self._value_bytes = rows, row_bytes, value_bytes
        if fold_bytes == "auto":
            fold_bytes = max(_FOLD_BYTES_MIN, rows * row_bytes // 2)
        self._fold_bytes = fold_bytes
        self._fold_at = fold_bytes or 0
        self._results = Results("uint8", 1)
        self._prefetches: deque[PendingRows] = deque()
        self._has_cache = cache is not None
        self._lock = threading.Lock()
        self._folding: threading.Thread | None = None
        self._io: TensorIO | None = for_rows(io)
        name = os.path.basename(self.path)
        head = self._io.open(os.path.join(self.path, _native.TABLE_HEAD))
        claim = self._io._claim_here()
        with claim.workers(head._opened) as (executor, _):
            check_length(name, row_bytes, claim.block_bytes)
            self._native = _native.RowTable(
                executor,
                self._io._weight,
                self.path,
                direct=self._io._direct,
                cache=native_cache(cache, value_bytes, name),
                gap_bytes=gap_bytes,
                run_bytes_max=max(RUN_BYTES_MAX, row_bytes),
                log_bytes=log_bytes,
                frame_bytes=_FRAME_BYTES,
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
        fold_bytes: int | Literal["auto"] | None = "auto",
        log_bytes: int = _LOG_BYTES,
        gap_bytes: int = GAP_BYTES,
        io: TensorIO | None = None,
    ) -> Table:
        """Makes a table, durably, and opens it.

        Args:
            path: Its directory, which is made, its parents too.
            rows: How many there are.
            columns: Names, each with the sizes and the type of its elements in a row, as
                ``{"weight": (128, "float32"), "momentum": ((), "float32")}``.
            init: What the rows are at first: mappings with some rows of each column, one behind the
                other. What is not given is zero, and takes no space before it is written.
            cache: As for `Table`, and so are the others.
            fold_bytes: Likewise.
            log_bytes: Likewise.
            gap_bytes: Likewise.
            io: Likewise.

        Raises:
            CheckpointExistsError: A table is there.
            StorageError: The system refuses it, or somebody is at work there.
            UnsupportedStateError: A row is longer than a request.
            ValueError: A value is out of range, or ``init`` has too many rows, or other columns.
            TypeError: A column is not given as sizes and a type, or is of another one.
        """
        where = os.path.abspath(decode_local_path(path))
        count = _ROWS.whole("rows", rows)
        made = Columns(columns)
        # All that may be refused is, before anything is made.
        _check_settings(fold_bytes, log_bytes, gap_bytes)
        native_cache(cache, made.nbytes, os.path.basename(where))
        row_bytes = row_bytes_for(made.nbytes, _STEP_BYTES, "auto")
        row_bytes = -(-row_bytes // _STEP_BYTES) * _STEP_BYTES
        if count * row_bytes > _BYTES_MAX:
            raise ValueError(f"rows={count}: rows of {row_bytes} bytes are more than a table has")
        # A descriptor each, and a piece twice in memory at a fold.
        piece_bytes = max(_PIECE_BYTES_MIN, -(-count * row_bytes // _PIECES_MAX))
        form = (count, row_bytes, made.nbytes, max(1, min(count, piece_bytes // row_bytes)))
        os.makedirs(os.path.dirname(where), exist_ok=True)
        with for_rows(io) as maker:
            claim = maker._claim_here()
            with claim.workers(None) as (executor, _):
                check_length(os.path.basename(where), row_bytes, claim.block_bytes)
                note = json.dumps({"columns": made.to_json()})
                new = _native.NewRowTable(executor, maker._weight, where, form, note, maker._direct)
            try:
                _fill(new, made, count, init)
                new.finish()
            finally:
                new.close()
        return cls(
            where,
            cache=cache,
            fold_bytes=fold_bytes,
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
        """The rows of some ids as they are now, in their order, each as often as it is asked for.

        Rows for a GPU are read into pinned memory of the host, and copied by the stream that is
        current when they are there. The current stream has them, this thread does not wait for the
        copy.

        Args:
            ids: Integers of any type: a tensor, an array or a sequence, of any shape. Those of a
                tensor of a device are copied to the host first, for which this waits.
            device: Where the rows are to be, as PyTorch names it; without it, where ``ids`` are.

        Returns:
            A mapping of each column to a view: tensors where ``ids`` is one or ``device`` is given,
            else arrays. They are the caller's: what is written into them is in the table after an
            `update`.

        Raises:
            IndexError: There is no such row; says which and where.
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
        """Begins to look rows up; see `lookup`. They are as they were at the call, or later.

        Raises:
            IndexError: There is no such row.
            DeviceError: The stream of the device is being captured, its driver fails, or this is a
                fork of a process that has used it.
            TypeError: The ids are no integers.
            ValueError: There is no such device, or the table is closed.
            PenstockError: This process is a fork of the one that opened the table.
        """
        ids, where = on_host(ids)
        return self._begun(ids_of(ids), where if device is None else device_of(device))

    def _begun(self, numbers: Ids, device: torch.device | None) -> PendingRows:
        shape = (*numbers.shape, self._value_bytes)
        finish = None
        if device is not None and device.type != "cpu":
            delivery = Delivery(self._columns, self._results, shape, device)
            rows, finish = delivery.rows, delivery.finish
        else:
            is_torch = numbers.is_torch or device is not None
            rows = Rows(self._columns, self._results.empty(shape, is_torch=is_torch))
        try:
            batch = self._native.look_up(numbers.array, numbers.is_signed, target_of(rows.buffer))
        except IndexError as error:
            raise self._named(error, numbers) from None
        return PendingRows(batch, rows, _nothing, finish)

    def prefetch(self, ids: Any) -> None:
        """Begins to read rows into the cache, for a `lookup` that comes later.

        What goes wrong with it the lookup will tell. Wherever ids are, rows stay on the host.

        Raises:
            IndexError: There is no such row.
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
        """Writes rows anew; who looks them up from now on finds them. `flush` makes them durable.

        Of an id that comes twice the last row counts.

        Args:
            ids: Integers, as `lookup` takes them.
            rows: What `lookup` has given, or a mapping of every column to a tensor or an array, of
                the shape of the ids and of its own. What is on a device is copied to the host, for
                which this waits.

        Raises:
            IndexError: There is no such row; nothing was written.
            ValueError: A column is missing, or has another shape or type; or the table is closed.
            TypeError: The ids are no integers, or a column is neither a tensor nor an array.
            DeviceError: What is on a device cannot be copied from there, as its stream is being
                captured.
            StorageError: The log cannot be written. The table has to be opened again; what was
                flushed is there.
            PenstockError: This process is a fork of the one that opened the table.
        """
        numbers = ids_of(on_host(ids)[0])
        if not isinstance(rows, Rows) or rows.columns != self._columns:
            rows = packed(self._columns, numbers.shape, rows)
        buffer = rows.buffer
        wanted = (*numbers.shape, self._value_bytes)
        if tuple(buffer.shape) != wanted:
            raise ValueError(f"rows: of shape {tuple(buffer.shape[:-1])}: ids have {wanted[:-1]}")
        address, nbytes, owner = target_of(on_host(buffer, "rows")[0])
        try:
            self._native.update(
                numbers.array, numbers.is_signed, (address, (nbytes,), None, 1, owner)
            )
        except IndexError as error:
            raise self._named(error, numbers) from None

    def flush(self) -> None:
        """Makes durable what was written: when this returns, a power cut cannot take it.

        Raises:
            StorageError: It cannot be written. The table has to be opened again; what was flushed
                before is there.
            ValueError: The table is closed.
            PenstockError: This process is a fork of the one that opened the table.
        """
        self._native.flush()
        if self._fold_bytes is not None:
            _, log_bytes = self._native.logged()
            if log_bytes > self._fold_at:
                self._fold_soon()

    def fold(self) -> FoldReport:
        """Puts rows of logs back among the others, and removes the logs.

        Files of 64 MiB that have such rows are written anew, one by one. Rows may be looked up and
        written meanwhile.

        Raises:
            StorageError: A file cannot be written; the logs stay.
            KeyboardInterrupt: What was put back by then is.
            PenstockError: This thread folds the table, or reads all of it, already.
            CorruptCheckpointError: Bytes are not those that were written.
            ValueError: The table is closed.
        """
        rows, pieces, nbytes = self._native.freeze().fold()
        return FoldReport(rows=rows, pieces=pieces, bytes=nbytes)

    def snapshot(
        self,
        path: str | os.PathLike[str] | bytes,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        options: Options | None = None,
        progress: bool | Progress = False,
    ) -> SnapshotReport:
        """Writes all rows as they are now into a checkpoint, with a tensor for each column.

        It is one as any other: `penstock.load`, `penstock.verify` and `penstock.features.open` read
        it. It flushes first. Rows may be looked up and written meanwhile; a fold waits.

        Args:
            path: The checkpoint's directory.
            metadata: A note of plain JSON, readable with `penstock.inspect`.
            overwrite: Replace a complete checkpoint at the path.
            options: How bytes move; None for ``Options()``.
            progress: True for a bar on standard error, or a function called with the bytes done and
                the bytes in all.

        Raises:
            CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False; or a
                table.
            StorageError: The operating system failed an operation: disk full, read-only, …
            CorruptCheckpointError: Bytes are not those that were written.
            PenstockError: This thread folds the table, or reads all of it, already.
            ValueError: The table is closed.
        """
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
        """What was done since it was opened, and what its logs have."""
        rows, hits, shared, read_rows, requests, read_bytes, _ = self._native.counts()
        logged_rows, log_bytes = self._native.logged()
        return TableStats(
            rows=rows,
            hits=hits,
            shared=shared,
            read_rows=read_rows,
            requests=requests,
            read_bytes=read_bytes,
            logged_rows=logged_rows,
            log_bytes=log_bytes,
        )

    def close(self) -> None:
        """Flushes, waits for a fold or a snapshot under way, and lets the table go.

        Raises:
            StorageError: What was written cannot be made durable; the table is closed all the same.
            KeyboardInterrupt: It is closed as well; who opens it next waits for the fold to end.
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

    def _named(self, error: IndexError, numbers: Ids) -> IndexError:
        return IndexError(f"{error} ({self.path}; ids are {numbers.dtype})")

    def _fold_soon(self) -> None:
        with self._lock:
            if self._folding is not None and self._folding.is_alive():
                return
            self._folding = threading.Thread(target=self._fold, name="penstock-fold")
            self._folding.start()

    def _fold(self) -> None:
        _, log_bytes = self._native.logged()
        try:
            self.fold()
            self._fold_at = self._fold_bytes or 0
        except (PenstockError, ValueError) as error:
            if self._io is None:
                # The table was closed meanwhile: its logs are folded when it is opened next.
                return
            # Not again before there is more to gain: what failed may do so each time.
            self._fold_at = 2 * log_bytes
            problem = f"{self.path}: rows of logs stay there: {error}"
            warnings.warn(problem, PenstockWarning, stacklevel=2)


def _check_settings(
    fold_bytes: int | Literal["auto"] | None, log_bytes: int, gap_bytes: int
) -> None:
    GAP.check("gap_bytes", gap_bytes)
    _LOG.check("log_bytes", log_bytes)
    if fold_bytes not in ("auto", None):
        _FOLD.check("fold_bytes", fold_bytes)


def _nothing() -> None:
    """What is to be looked at behind reads of files that nobody else may change."""


def _noted(path: str, note: str, value_bytes: int) -> Columns:
    try:
        columns = Columns.from_json(json.loads(note)["columns"])
        is_sound = columns.nbytes == value_bytes
    except (KeyError, TypeError, ValueError, RecursionError, PenstockError):
        is_sound = False
    if not is_sound:
        raise CorruptCheckpointError(
            f"{path}: what the table says of its columns makes no sense: restore it from a copy",
            path=path,
            file=_native.TABLE_HEAD,
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
        address, nbytes, owner = target_of(buffer)
        new.append((address, (nbytes,), None, 1, owner))
