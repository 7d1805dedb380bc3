"""`TensorIO`: reads and writes tensors at offsets of files, many at a time."""

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
from penstock.io.call_files import CallFiles
from penstock.io.data_file import AnyFile, DataFile, reach
from penstock.io.executors import Choice, Settings, hold, release
from penstock.io.pending import Pending
from penstock.io.requests import Requests
from penstock.io.transfer import Transfer, wait_all
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

    Any thread may hand over any number of transfers; each is whole or an error. Bytes go past the
    page cache where the file system allows it, straight from and to the tensors' memory; what lies
    across the device's alignment, and strided tensors, are copied on the way. Tensors of a GPU go
    through pinned memory, and are copied by the GPU itself, once the work is done that its current
    stream has at the call; a transfer is done when the copies are. Nothing is promised
    of the order of transfers, so wait for a write before its bytes are read.

    All with the same settings share one set of threads, which start with the first transfer; who
    has much to move does not keep others from the device.

    Args:
        block_bytes: What one request to the device moves at most, a multiple of 4096.
        queue_depth: Requests in flight of each worker, 1 to 4096.
        workers: Threads, 1 to 1024.
        staging_bytes: Memory for what is copied on the way, 4 MiB to 1 PiB; 64 MiB. As much again
            is pinned where tensors of a GPU are moved.
        engine: ``"uring"``, ``"threads"`` or ``"auto"``.
        direct: Whether the page cache is bypassed: ``"on"``, ``"off"`` or ``"auto"``.
        weight: The share of the device, beside those of others: twice the weight moves twice the
            bytes while both have something to move, 1 to 1000.

    What is not given comes from the environment, as `penstock.Options` says (``PENSTOCK_ENGINE``,
    ``PENSTOCK_DIRECT``, ``PENSTOCK_QUEUE_DEPTH``, ``PENSTOCK_IO_THREADS``,
    ``PENSTOCK_STAGING_BYTES``, ``PENSTOCK_EXTENT_BYTES`` for the block). Else it is chosen for the
    device of the first file that something is read from or written to: blocks of 1 MiB, or whole
    stripes of an array, 32 of them or 128 smaller requests in flight of each of up to four workers,
    no more than there are cores; 4 MiB, 8, 32 and one on a rotating disk. Who uses devices of both
    kinds makes one of these for each.

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
        block_bytes: int | None = None,
        queue_depth: int | None = None,
        workers: int | None = None,
        staging_bytes: int | None = None,
        engine: str | None = None,
        direct: str | None = None,
        weight: int = 1,
    ) -> None:
        Number(1, 1000, "shares", is_open=False).check("weight", weight)
        self._choice = Choice.of(
            engine,
            block_bytes=block_bytes,
            queue_depth=queue_depth,
            workers=workers,
            staging_bytes=staging_bytes,
        )
        self._direct = (Options() if direct is None else Options(direct=direct)).direct
        self._weight = weight
        self._claim: Claim | None = Claim(self._choice, self._direct, weight)
        _live.add(self)

    def open(self, file: AnyFile, mode: Literal["r", "w"] = "r") -> DataFile:
        """Opens a file for more than one transfer.

        Args:
            file: A path, a descriptor, or an object with a ``fileno``. Of a descriptor the file is
                opened again; the descriptor itself is not kept.
            mode: ``"r"`` to read; ``"w"`` to write and read: a path that is not there is made, and
                nothing that is there is shortened.

        Raises:
            StorageError: The system does not open it, or it is no regular file.
            UnsupportedPathError: It is a URL.
        """
        if mode not in ("r", "w"):
            raise ValueError(f"mode={mode!r}: must be 'r' or 'w'")
        return DataFile(reach(file, mode, self._direct))

    def read(self, tensor: Any, file: AnyFile, offset: int = 0) -> Transfer:
        """Reads as many bytes as a tensor has, in row-major order, into it.

        The tensor must not be used before the transfer is done.

        Args:
            tensor: A tensor of the host or of a device, or an array, strided as it may be, or a
                writable buffer.
            file: A path, a descriptor, an object with a ``fileno``, or an open `DataFile`.
            offset: Where in the file its bytes begin.

        Raises:
            StorageError: The file cannot be opened, or the engine that was asked for cannot run.
            UnsupportedStateError: The tensor has no plain memory to be read into.
            DeviceError: The current stream of the tensor's device is being captured, the driver
                fails, or this is a fork of a process that has used it.
            ValueError: The offset is negative, or this is closed.
        """
        return self.read_all([(tensor, file, offset)])

    def write(self, tensor: Any, file: AnyFile, offset: int = 0, *, sync: bool = False) -> Transfer:
        """Writes the bytes of a tensor, in row-major order.

        The tensor must not be changed before the transfer is done. A file that is not there is
        made, one that is too short is extended, with its space reserved; none is shortened.

        Args:
            tensor: A tensor of the host or of a device, or an array, strided as it may be, or a
                buffer.
            file: A path, a descriptor, an object with a ``fileno``, or a `DataFile` open to write.
            offset: Where in the file its bytes begin.
            sync: Whether the transfer is done only when its bytes survive a power cut.

        Raises:
            StorageError: The file cannot be opened or extended, or the engine that was asked for
                cannot run.
            UnsupportedStateError: The tensor has no plain memory.
            DeviceError: The current stream of the tensor's device is being captured, the driver
                fails, or this is a fork of a process that has used it.
            ValueError: The offset is negative, the file is open to be read only, or this is closed.
        """
        return self.write_all([(tensor, file, offset)], sync=sync)

    def read_all(self, requests: Iterable[tuple[Any, AnyFile, int]]) -> Transfer:
        """Reads many tensors as one transfer; see `read`.

        Args:
            requests: ``(tensor, file, offset)`` of each. Tensors that share memory are an error of
                the caller: it is not said whose bytes they hold.
        """
        wanted, files, tensors = Requests(), CallFiles(self._direct, "r"), []
        for tensor, file, offset in requests:
            _OFFSET.check("offset", offset)
            wanted.read(tensor, files.of(file), offset)
            tensors.append(tensor)
        claim = self._claim_here()
        # They change from now on, as autograd has to know.
        bump_versions(tensors)
        return self._started(
            claim, files, wanted, lambda share: share.read(wanted.of_host, wanted.on_devices)
        )

    def write_all(
        self, requests: Iterable[tuple[Any, AnyFile, int]], *, sync: bool = False
    ) -> Transfer:
        """Writes many tensors as one transfer; see `write`.

        Args:
            requests: ``(tensor, file, offset)`` of each. Two that have a byte of a file in common
                are an error of the caller: it is not said what the pages around it hold then, and
                the system may call it an I/O error.
            sync: Whether the transfer is done only when all its bytes survive a power cut.
        """
        given, files = Requests(), CallFiles(self._direct, "w")
        for tensor, file, offset in requests:
            _OFFSET.check("offset", offset)
            given.write(tensor, files.of(file), offset)
        claim = self._claim_here()
        return self._started(
            claim,
            files,
            given,
            lambda share: share.write(given.of_host, given.on_devices, bool(sync)),
        )

    def wait(self, timeout: float | None = None) -> None:
        """Waits for all that was handed over here.

        Args:
            timeout: For how many seconds at most; for ever without.

        Raises:
            TransferError: One failed whose error nobody has seen.
            TimeoutError: Not all have ended in time.
        """
        self._claim_here().wait(timeout)

    @property
    def in_flight_max(self) -> int:
        """Requests that the workers have under way at a time, at most; 0 before the first."""
        claim = self._claim
        return claim.in_flight_max if claim is not None else 0

    def close(self) -> None:
        """Waits for all that was handed over, and lets the workers go.

        Raises:
            TransferError: One failed whose error nobody has seen.
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
            # What went wrong before is what the caller has to hear.
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
                # The task was cancelled meanwhile, which may not wait for what is under way.
                self._let_go()
                raise
        self.__exit__(kind)

    def __del__(self) -> None:
        # When the interpreter is taken apart, all has been finished.
        if hasattr(self, "_claim") and not sys.is_finalizing():
            self._let_go()

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers are of a process: in another one it has others, with the same settings.
        return with_settings, (self._choice, self._direct, self._weight)

    def _another(self, *, direct: str | None = None) -> TensorIO:
        """One with the same settings and a share of the device of its own."""
        return with_settings(self._choice, direct or self._direct, self._weight)

    def _claim_here(self) -> Claim:
        """The claim on the workers of this process, which may be a fork of another."""
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
        """Gives the claim up, which one of several threads does."""
        with _lock:
            claim, self._claim = self._claim, None
        if claim is not None and claim.is_here:
            claim.let_go()

    def _started(
        self,
        claim: Claim,
        files: CallFiles,
        requests: Requests,
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
                # Another thread has closed this one meanwhile, and perhaps not waited for it.
                _left.add(transfer)
            return transfer

    def _settle(self) -> None:
        """Waits until nothing is under way, well or not; of failures others have to hear."""
        for transfer in self._take_pending():
            transfer.ends_within(None)

    def _take_pending(self) -> list[Transfer]:
        """What was handed over in this process, at the end of the program."""
        claim = self._claim
        return list(claim.pending) if claim is not None and claim.is_here else []


def with_settings(choice: Choice, direct: str, weight: int) -> TensorIO:
    """One of settings that are complete already."""
    made = object.__new__(TensorIO)
    made._choice = choice
    made._direct = direct
    made._weight = weight
    made._claim = Claim(choice, direct, weight)
    _live.add(made)
    return made


class Claim:
    """What one process has of a `TensorIO`.

    Attributes:
        pending: What was handed over.
        direct: Whether files are opened past the page cache, as `penstock.Options` says it.
        weight: Shares of the device.
    """

    def __init__(self, choice: Choice, direct: str, weight: int) -> None:
        self._choice = choice
        self.direct = direct
        self.weight = weight
        self._process = os.getpid()
        self._settings: Settings | None = None
        self._workers: tuple[_native.Executor, _native.Share] | None = None
        self._callers = 0
        self._is_gone = False
        self.pending = Pending()

    @contextlib.contextmanager
    def workers(
        self, file: _native.DataFile | None
    ) -> Generator[tuple[_native.Executor, _native.Share]]:
        """The workers and the claim on them, which stay while something is handed over.

        Args:
            file: It decides, if it is the first, what suits its device.

        Raises:
            StorageError: The engine that was asked for cannot run here.
            ValueError: They were let go.
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
        """What one request moves at most; 0 before the first."""
        settings = self._settings
        return settings.block_bytes if settings is not None else 0

    @property
    def in_flight_max(self) -> int:
        """Requests of all workers."""
        settings = self._settings
        return settings.workers * settings.queue_depth if settings is not None else 0

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""
        return self._process == os.getpid()

    def wait(self, timeout: float | None) -> None:
        """Waits for all that was handed over."""
        try:
            wait_all([one for one in self.pending if not one.is_seen], timeout)
        finally:
            self.pending.sweep()

    def let_go(self) -> None:
        """Has the workers go, if nobody else holds them."""
        is_idle = True
        for transfer in self.pending:
            is_idle = is_idle and transfer.done()
            if not transfer.is_settled:
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
_left = Pending()
"""What was under way when its `TensorIO` was dropped or closed."""
_lock = threading.RLock()  # Garbage may be collected while it is held.


_FINISH_PRIORITY = -50
"""Lower than what others want done at the exit, and higher than that of the end of a trace."""

_finisher: int | None = None
"""The child of multiprocessing that finishes what is under way when it ends."""


@atexit.register
def _finish_at_exit() -> None:
    """Finishes what is under way, and tells of what failed and nobody heard of."""
    pending = [transfer for one in list(_live) for transfer in one._take_pending()]
    for transfer in [*_left, *pending]:
        if transfer.is_settled:
            continue
        try:
            transfer.result()
        except PenstockError as error:
            told = f"a transfer that nobody waited for failed: {error}"
            warnings.warn(PenstockWarning(told), stacklevel=1)


def _finish_with_multiprocessing() -> None:
    """Has a child of multiprocessing finish too: but for ``spawn``, they end without `atexit`."""
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
