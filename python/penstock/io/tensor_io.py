"""`TensorIO`: asynchronous reads and writes of tensors at offsets of files."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal

from penstock.common.option_kinds import Number
from penstock.errors import PenstockError, PenstockWarning, UnsupportedStateError
from penstock.io.data_file import AnyFile, CallFiles, DataFile, reach
from penstock.io.executors import Choice, ExecutorSettings, hold, release
from penstock.io.requests import TransferRequests
from penstock.io.transfer import Transfer, UnreportedTransfers, wait_all
from penstock.options import Options
from penstock.reports import Fallback
from penstock.tensors.copying import bump_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from typing import Self

    from penstock import _native

_CLOSED = "this TensorIO is closed: make another one"
_OFFSET = Number(0, (1 << 63) - 1, "bytes", is_open=False)


class TensorIO:
    """Reads and writes tensors at offsets of files, without blocking Python.

    Any thread may submit any number of transfers; each succeeds completely or raises an error.
    Bytes bypass the page cache where the file system allows it, directly from and to the tensors'
    memory. Bytes that are not aligned for the device, and strided tensors, are copied on the way.
    Tensors of a GPU pass through pinned memory and are copied by the GPU itself, after the work in
    its current stream at the time of the call; a transfer is done when these copies are done.
    Transfers may run in any order, so wait for a write before reading its bytes.

    Instances with equal settings share one set of threads, which start with the first transfer. The
    device is shared fairly: many transfers of one instance do not keep others from it.

    Args:
        extent_bytes: Largest size of one request, in bytes; a multiple of 4096.
        queue_depth: Requests in flight per worker, 1 to 4096.
        io_threads: Number of threads, 1 to 1024.
        staging_bytes: Memory for bytes that are copied on the way, 4 MiB to 1 PiB; 64 MiB by
            default. Transfers of GPU tensors pin as much again.
        engine: ``"uring"``, ``"threads"`` or ``"auto"``.
        direct: Whether the page cache is bypassed: ``"on"``, ``"off"`` or ``"auto"``.
        weight: Share of the device relative to other instances, 1 to 1000: twice the weight moves
            twice the bytes while both have transfers.

    Values that are not given come from the environment, as for `penstock.Options`
    (``PENSTOCK_ENGINE``, ``PENSTOCK_DIRECT``, ``PENSTOCK_QUEUE_DEPTH``, ``PENSTOCK_IO_THREADS``,
    ``PENSTOCK_STAGING_BYTES``, ``PENSTOCK_EXTENT_BYTES`` for the block). Otherwise they are chosen
    for the device of the first file that is read or written: blocks of 1 MiB, or whole stripes of
    an array, with 32 blocks or 128 smaller requests in flight per worker, and up to four workers
    but no more than there are cores; on a rotating disk blocks of 4 MiB, 8 of them or 32 smaller
    requests, and one worker. Use one `TensorIO` for each kind of device.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type.

    Example:
        >>> import numpy as np, penstock.offload, tempfile
        >>> path = tempfile.mkdtemp() + "/state"
        >>> rows = np.arange(12.0).reshape(4, 3)
        >>> with penstock.offload.TensorIO() as io:
        ...     report = io.write(rows, path, sync=True).result()
        ...     column = np.empty((4, 1))
        ...     transfers = [io.read(column[row], path, row * 24) for row in range(4)]
        ...     reports = penstock.offload.wait_all(transfers)
        >>> column.ravel()
        array([0., 3., 6., 9.])
    """

    def __init__(
        self,
        *,
        extent_bytes: int | None = None,
        queue_depth: int | None = None,
        io_threads: int | None = None,
        staging_bytes: int | None = None,
        engine: str | None = None,
        direct: str | None = None,
        weight: int = 1,
    ) -> None:
        Number(1, 1000, "shares", is_open=False).check("weight", weight)
        self._choice = Choice.of(
            engine,
            extent_bytes=extent_bytes,
            queue_depth=queue_depth,
            io_threads=io_threads,
            staging_bytes=staging_bytes,
        )
        self._direct = (Options() if direct is None else Options(direct=direct)).direct
        self._weight = weight
        self._claim: Claim | None = Claim(self._choice, self._direct, weight)
        _live.add(self)

    def open(self, file: AnyFile, mode: Literal["r", "w"] = "r") -> DataFile:
        """Opens a file for repeated transfers.

        Args:
            file: A path, a descriptor, or an object with a ``fileno``. The file of a descriptor is
                opened again; the descriptor itself is not kept.
            mode: ``"r"`` to read; ``"w"`` to write and read: a missing file is created, and an
                existing file is not truncated.

        Raises:
            StorageError: The file cannot be opened, or is not a regular file.
            UnsupportedPathError: ``file`` is a URL.
        """
        if mode not in ("r", "w"):
            raise ValueError(f"mode={mode!r}: must be 'r' or 'w'")
        return DataFile(reach(file, mode, self._direct))

    def read(self, tensor: Any, file: AnyFile, offset: int = 0) -> Transfer:
        """Fills a tensor with bytes of a file, in row-major order.

        The tensor must not be used before the transfer is done.

        Args:
            tensor: A tensor on the host or on a device, an array (either with any strides), or a
                writable buffer.
            file: A path, a descriptor, an object with a ``fileno``, or an open `DataFile`.
            offset: Offset of the bytes in the file.

        Raises:
            StorageError: The file cannot be opened, or the requested engine cannot run.
            UnsupportedStateError: The tensor has no plain writable memory.
            DeviceError: The current stream of the tensor's device is being captured, the driver
                fails, or this process is a fork of one that has used the driver.
            ValueError: The offset is negative, or this `TensorIO` is closed.
        """
        return self.read_all([(tensor, file, offset)])

    def write(self, tensor: Any, file: AnyFile, offset: int = 0, *, sync: bool = False) -> Transfer:
        """Writes the bytes of a tensor, in row-major order.

        The tensor must not be changed before the transfer is done. A missing file is created, and a
        file that is too short is extended, with its space reserved. No file is truncated.

        Args:
            tensor: A tensor on the host or on a device, an array (either with any strides), or a
                buffer.
            file: A path, a descriptor, an object with a ``fileno``, or a `DataFile` open to write.
            offset: Offset of the bytes in the file.
            sync: Whether the transfer is done only once its bytes survive a power cut.

        Raises:
            StorageError: The file cannot be opened or extended, or the requested engine cannot run.
            UnsupportedStateError: The tensor has no plain memory.
            DeviceError: The current stream of the tensor's device is being captured, the driver
                fails, or this process is a fork of one that has used the driver.
            ValueError: The offset is negative, the file is read-only, or this `TensorIO` is closed.
        """
        return self.write_all([(tensor, file, offset)], sync=sync)

    def read_all(self, requests: Iterable[tuple[Any, AnyFile, int]]) -> Transfer:
        """Reads many tensors as one transfer; see `read`.

        Args:
            requests: ``(tensor, file, offset)`` of each. Tensors must not share memory: which bytes
                it would hold is undefined.
        """
        wanted, files, tensors = TransferRequests(), CallFiles(self._direct, "r"), []
        for tensor, file, offset in requests:
            offset = _OFFSET.whole("offset", offset)
            wanted.read(tensor, files.of(file), offset)
            tensors.append(tensor)
        claim = self._claim_here()
        # The contents change from now on, as autograd has to know.
        bump_versions(tensors)
        return self._started(
            claim, files, wanted, lambda share: share.read(wanted.of_host, wanted.on_devices)
        )

    def write_all(
        self, requests: Iterable[tuple[Any, AnyFile, int]], *, sync: bool = False
    ) -> Transfer:
        """Writes many tensors as one transfer; see `write`.

        Args:
            requests: ``(tensor, file, offset)`` of each. Two writes must not overlap in a file: the
                contents of the pages around the overlap are undefined, and the system may report an
                I/O error.
            sync: Whether the transfer is done only once all its bytes survive a power cut.
        """
        given, files = TransferRequests(), CallFiles(self._direct, "w")
        for tensor, file, offset in requests:
            offset = _OFFSET.whole("offset", offset)
            given.write(tensor, files.of(file), offset)
        claim = self._claim_here()
        return self._started(
            claim,
            files,
            given,
            lambda share: share.write(given.of_host, given.on_devices, bool(sync)),
        )

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits for all transfers submitted to this `TensorIO`.

        Args:
            timeout_seconds: Longest wait, in seconds; None for no limit.

        Raises:
            TransferError: A transfer failed and its error has not been raised yet.
            TimeoutError: Some transfers have not ended in time.
        """
        self._claim_here().wait(timeout_seconds)

    @property
    def in_flight_max(self) -> int:
        """Largest number of requests in flight on all workers; 0 before the first transfer."""
        claim = self._claim
        return claim.in_flight_max if claim is not None else 0

    def close(self) -> None:
        """Waits for all submitted transfers, and releases the workers.

        Raises:
            TransferError: A transfer failed and its error has not been raised yet.
        """
        if (claim := self._claim) is None:
            return
        try:
            if claim.is_here:
                claim.wait(None)
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except PenstockError:
            # The error that ended the block takes precedence.
            if kind is None:
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        claim = self._claim
        if claim is not None and claim.is_here:
            try:
                for transfer in claim.pending:
                    await transfer.ended()
            except BaseException:
                # The task was cancelled meanwhile, so it must not wait for running transfers.
                self._let_go()
                raise
        self.__exit__(kind)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end all transfers have already been finished. This module may be
        # emptied by then, so the function is an argument.
        if hasattr(self, "_claim") and not is_finalizing():
            self._let_go()

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers belong to one process: another process starts its own, with the same settings.
        return with_settings, (self._choice, self._direct, self._weight)

    def _another(self, *, direct: str | None = None) -> TensorIO:
        """Returns a `TensorIO` with the same settings and its own share of the device."""
        return with_settings(self._choice, direct or self._direct, self._weight)

    def _claim_here(self) -> Claim:
        """Returns the claim of this process, which may be a fork of the one that made it."""
        claim = self._claim
        if claim is not None and not claim.is_here:
            with _lock:
                claim = self._claim
                if claim is not None and not claim.is_here:
                    claim = self._claim = Claim(self._choice, self._direct, self._weight)
        if claim is None:
            raise ValueError(_CLOSED)
        return claim

    def _let_go(self) -> None:
        """Gives up the claim; only one of several threads does."""
        with _lock:
            claim, self._claim = self._claim, None
        if claim is not None and claim.is_here:
            claim.let_go()

    def _started(
        self,
        claim: Claim,
        files: CallFiles,
        requests: TransferRequests,
        start: Callable[[_native.Share], _native.Transfer],
    ) -> Transfer:
        with claim.workers(files.first) as (executor, share):
            try:
                native = start(share)
            except ValueError as error:
                raise UnsupportedStateError(
                    f"the tensor: {error}: use a contiguous one", key="the tensor"
                ) from error
            fallbacks = files.fallbacks
            if executor.fallback is not None:
                fallbacks = (Fallback(executor.fallback, "engine"), *fallbacks)
            transfer = Transfer(native, executor, fallbacks, requests.copies)
            claim.pending.add(transfer)
            if self._claim is not claim:
                # Another thread has closed this `TensorIO`, and may not have waited for the
                # transfer.
                _left.add(transfer)
            return transfer

    def _wait_ended(self) -> None:
        """Waits until all transfers have ended; their errors are raised elsewhere."""
        for transfer in self._take_pending():
            transfer.ends_within(None)

    def _take_pending(self) -> list[Transfer]:
        """Returns this process's transfers, at the end of the program."""
        claim = self._claim
        return list(claim.pending) if claim is not None and claim.is_here else []


def with_settings(choice: Choice, direct: str, weight: int) -> TensorIO:
    """Creates a `TensorIO` from complete settings."""
    made = object.__new__(TensorIO)
    made._choice = choice
    made._direct = direct
    made._weight = weight
    made._claim = Claim(choice, direct, weight)
    _live.add(made)
    return made


class Claim:
    """The executor and transfers of a `TensorIO` in one process.

    Attributes:
        pending: Transfers whose outcome has not been reported yet.
        direct: Whether files are opened past the page cache, as `penstock.Options` says it.
        weight: Shares of the device.
    """

    def __init__(self, choice: Choice, direct: str, weight: int) -> None:
        self._choice = choice
        self.direct = direct
        self.weight = weight
        self._process = os.getpid()
        self._settings: ExecutorSettings | None = None
        self._workers: tuple[_native.Executor, _native.Share] | None = None
        self._callers = 0
        self._is_gone = False
        self.pending = UnreportedTransfers()

    @contextlib.contextmanager
    def workers(
        self, file: _native.DataFile | None
    ) -> Generator[tuple[_native.Executor, _native.Share]]:
        """Yields the executor and the share of it, held until the block ends.

        The settings suit the device of the first file.
        """
        with _lock:
            if self._is_gone:
                raise ValueError(_CLOSED)
            if self._workers is None:
                _finish_with_multiprocessing()
                settings = self._choice.settings(file)
                executor = hold(settings)
                self._settings = settings
                self._workers = executor, executor.share(self.weight)
            workers = self._workers
            self._callers += 1
        try:
            yield workers
        finally:
            self._leave()

    def _leave(self) -> None:
        with _lock:
            self._callers -= 1
            if self._is_gone and self._callers == 0:
                self._release(is_idle=False)

    @property
    def block_bytes(self) -> int:
        """Largest size of one request, in bytes; 0 before the first transfer."""
        settings = self._settings
        return settings.extent_bytes if settings is not None else 0

    @property
    def in_flight_max(self) -> int:
        """Largest number of requests in flight on all workers."""
        settings = self._settings
        return settings.io_threads * settings.queue_depth if settings is not None else 0

    @property
    def is_here(self) -> bool:
        """Whether the claim belongs to this process."""
        return self._process == os.getpid()

    def wait(self, timeout_seconds: float | None) -> None:
        """Waits for all submitted transfers."""
        try:
            wait_all([one for one in self.pending if not one.is_seen], timeout_seconds)
        finally:
            self.pending.sweep()

    def let_go(self) -> None:
        """Releases the workers, which stop if they have no other holder."""
        is_idle = True
        for transfer in self.pending:
            is_idle = is_idle and transfer.done()
            if not transfer.is_reported:
                _left.add(transfer)
        with _lock:
            self._is_gone = True
            if self._callers == 0:
                self._release(is_idle=is_idle)

    def _release(self, *, is_idle: bool) -> None:
        settings, self._settings = self._settings, None
        if settings is not None:
            release(settings, is_idle=is_idle)


_live: weakref.WeakSet[TensorIO] = weakref.WeakSet()
_left = UnreportedTransfers()
"""Transfers that were running when their `TensorIO` was dropped or closed."""
_lock = threading.RLock()  # A re-entrant lock: the garbage collector may run while it is held.


_FINISH_PRIORITY = -50
"""Lower than the priorities of other exit work, and higher than that of a trace's end."""

_finisher: int | None = None
"""The multiprocessing child that finishes its transfers when it ends."""


@atexit.register
def _finish_at_exit() -> None:
    """Finishes running transfers, and warns of failures that were not raised yet."""
    pending = [transfer for one in list(_live) for transfer in one._take_pending()]
    for transfer in [*_left, *pending]:
        if transfer.is_reported:
            continue
        try:
            transfer.result()
        except PenstockError as error:
            told = f"a transfer that nobody waited for failed: {error}"
            warnings.warn(PenstockWarning(told), stacklevel=1)


def _finish_with_multiprocessing() -> None:
    """Registers the finish in multiprocessing children, most of which skip `atexit`."""
    global _finisher
    module = sys.modules.get("multiprocessing.process")
    if module is None or module.parent_process() is None or _finisher == os.getpid():
        return
    from multiprocessing.util import Finalize

    Finalize(None, _finish_at_exit, exitpriority=_FINISH_PRIORITY)
    _finisher = os.getpid()


def _forget_in_child() -> None:
    global _lock
    _left.clear()
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_in_child)
