"""`Transfer`: a running group of reads or writes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.io.notifier import notifier_of_loop
from penstock.reports import Fallback
from penstock.tensors.copying import copy_elements

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from penstock import _native


_COPYING = threading.Lock()
"""Held while PyTorch copies what was read: several threads may wait for one transfer."""

_SWEPT_MIN = 1024


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The bytes of a finished transfer and how they moved.

    Attributes:
        nbytes: Bytes of the tensors.
        seconds: Time from the call to the end.
        engine: ``"uring"`` or ``"threads"``.
        staged_bytes: Bytes that were copied on the way: those of strided tensors, and those that
            direct I/O cannot move for lack of alignment.
        cached_bytes: Bytes that went through the page cache.
        device_bytes: Bytes that GPUs copied to or from pinned memory; 0 if PyTorch copied them.
        fallbacks: Preferred methods that could not be used, each with its reason.
    """

    nbytes: int
    seconds: float
    engine: str
    staged_bytes: int
    cached_bytes: int
    device_bytes: int
    fallbacks: tuple[Fallback, ...]

    @property
    def direct(self) -> bool:
        """Whether all bytes bypassed the page cache."""
        return self.cached_bytes == 0

    @property
    def gb_per_second(self) -> float:
        """Throughput in GB (10**9 bytes) per second, including time spent in queues."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Transfer:
    """Running reads or writes; dropping this object does not stop them.

    They keep the tensors' memory alive until they end.

    Where PyTorch has to copy the bytes read to a device (devices without an NVIDIA driver),
    `result` and the other methods that raise a transfer's errors make the copy.

    A transfer can be awaited, with the result of `result`; cancelling the awaiting task cancels the
    transfer.
    """

    __slots__ = ("__weakref__", "_copies", "_executor", "_fallbacks", "_native", "is_seen")

    def __init__(
        self,
        native: _native.Transfer,
        executor: _native.Executor,
        fallbacks: tuple[Fallback, ...],
        copies: list[tuple[Any, Any]],
    ) -> None:
        self._native = native
        self._executor = executor
        self._fallbacks = fallbacks
        self._copies = copies
        self.is_seen = False

    def done(self) -> bool:
        """Whether the transfer has ended or failed; always False in a fork of its process."""
        return self._native.done()

    def cancel(self) -> None:
        """Cancels the requests that have not started.

        `result` then raises `TransferCancelledError`, unless the transfer had already completed.

        Raises:
            PenstockError: This process is a fork of the one that runs the transfer.
        """
        if self.done():
            return
        self._native.cancel()
        # The caller that cancels needs no report of the end.
        self.is_seen = True

    def result(self, timeout_seconds: float | None = None) -> TransferReport:
        """Waits until the transfer has ended and returns its report.

        Args:
            timeout_seconds: Longest wait, in seconds; None for no limit.

        Raises:
            TransferError: Not all bytes were moved; of several failures, the first.
            TransferCancelledError: The transfer was cancelled.
            TimeoutError: The transfer has not ended in time; it continues.
            ValueError: ``timeout_seconds`` is NaN.
            PenstockError: This process is a fork of the one that runs the transfer.
        """
        report = self._wait(timeout_seconds)
        if report is None:
            raise TimeoutError(f"the transfer has not ended in {timeout_seconds} s")
        return report

    def __await__(self) -> Generator[None, None, TransferReport]:
        if not self.done():
            yield from notifier_of_loop().wait(self._native, self.cancel).__await__()
        return self.result()

    async def ended(self) -> None:
        """Waits until the transfer has ended or failed, without raising its error."""
        if not self.done():
            await notifier_of_loop().wait(self._native, lambda: None)

    @property
    def is_reported(self) -> bool:
        """Whether the outcome needs no report: success, or an error that was already raised."""
        if not self.done():
            return False
        try:
            return self.is_seen or self._native.wait(0) is not None
        except PenstockError:
            return False

    def __repr__(self) -> str:
        return f"<Transfer {'done' if self.done() else 'under way'}>"

    def ends_within(self, timeout_seconds: float | None) -> bool:
        """Waits until the transfer has ended or failed; its error remains to be raised."""
        try:
            return self._native.wait(timeout_seconds) is not None
        except PenstockError:
            return True

    def _wait(self, timeout_seconds: float | None) -> TransferReport | None:
        try:
            moved = self._native.wait(timeout_seconds)
        except PenstockError:
            # Other exceptions, such as a signal handler's, are not the outcome of the transfer.
            self.is_seen = True
            raise
        if moved is None:
            return None
        self.is_seen = True
        if self._copies:
            # Another waiting thread must not continue before the copies are made.
            with _COPYING:
                while self._copies:
                    copy_elements(*self._copies[-1])
                    self._copies.pop()
        fallbacks = self._fallbacks
        if moved.device_bytes and (unpinned := self._executor.unpinned) is not None:
            fallbacks = (*fallbacks, Fallback(unpinned, "unpinned"))
        return TransferReport(
            nbytes=moved.bytes,
            seconds=moved.seconds,
            engine=self._executor.engine,
            staged_bytes=moved.staged_bytes,
            cached_bytes=moved.cached_bytes,
            device_bytes=moved.device_bytes,
            fallbacks=fallbacks,
        )


def wait_all(
    transfers: Iterable[Transfer], timeout_seconds: float | None = None
) -> list[TransferReport]:
    """Waits for several transfers, even if some fail.

    Args:
        transfers: The transfers.
        timeout_seconds: Longest wait for all of them together, in seconds; None for no limit.

    Returns:
        The reports, in the same order.

    Raises:
        TransferError: The error of the first failed transfer in the given order; its notes list the
            others.
        TransferCancelledError: The first transfer without success was cancelled; with the same
            notes.
        TimeoutError: Some transfers have not ended in time; they continue.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    transfers = list(transfers)
    # No error counts as raised before all transfers have ended: a time-out or a signal would
    # swallow it.
    for transfer in transfers:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if not transfer.ends_within(left):
            raise TimeoutError(f"not all transfers have ended in {timeout_seconds} s")
    reports: list[TransferReport] = []
    failures: list[PenstockError] = []
    for transfer in transfers:
        try:
            reports.append(transfer.result())
        except PenstockError as error:
            failures.append(error)
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(f"another one: {other}")
        raise first
    return reports


class UnreportedTransfers:
    """Transfers whose outcome has not been reported yet, in submission order.

    Any thread may add and sweep at any time: each step is a single operation on a `dict`, which is
    atomic. A lock could be held during a fork, so there is none.
    """

    def __init__(self) -> None:
        self._transfers: dict[Transfer, None] = {}
        self._sweep_at = _SWEPT_MIN

    def add(self, transfer: Transfer) -> None:
        """Adds a transfer, and now and then sweeps the others."""
        self._transfers[transfer] = None
        if len(self._transfers) > self._sweep_at:
            self.sweep()

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._transfers))

    def sweep(self) -> None:
        """Removes transfers whose outcome needs no report."""
        for transfer in self:
            if transfer.is_reported:
                self._transfers.pop(transfer, None)
        self._sweep_at = max(_SWEPT_MIN, 2 * len(self._transfers))

    def clear(self) -> None:
        """Removes all transfers."""
        self._transfers.clear()
