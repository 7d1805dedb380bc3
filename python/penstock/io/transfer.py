"""`Transfer`: what becomes of reads and writes that were handed over together."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.io.notifier import bell_of_loop
from penstock.reports import Fallback
from penstock.tensors.copying import copy_elements

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from penstock import _native


_COPYING = threading.Lock()
"""Held by who has PyTorch copy what was read: a transfer may be waited for by several threads."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What was moved, and by which way.

    Attributes:
        nbytes: Bytes of the tensors.
        seconds: From the call to the end.
        engine: ``"uring"`` or ``"threads"``.
        staged_bytes: Of the bytes, those that were copied on the way: of strided tensors, and what
            lies across the alignment that direct I/O needs.
        cached_bytes: Of the bytes, those that went through the page cache.
        device_bytes: Of the bytes, those that GPUs copied to pinned memory or from there; 0 where
            PyTorch copied them.
        fallbacks: Ways that were left open and cannot be gone, each with its reason.
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
        """Whether all bytes went past the page cache."""
        return self.cached_bytes == 0

    @property
    def gb_per_second(self) -> float:
        """GB (10**9 bytes) a second, waiting for others included."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Transfer:
    """Reads or writes under way. It may be dropped: they go on, and hold on to their memory.

    Where PyTorch has to copy to a device what was read, as without a driver of NVIDIA's, `result`
    does it, and whatever else raises the errors of a transfer.

    It can be awaited too, which is `result`; a task that is cancelled while it awaits cancels the
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
        """Whether it has ended, well or not; never so in a fork of the process that moves it."""
        return self._native.done()

    def cancel(self) -> None:
        """Gives up what has not begun.

        `result` raises `TransferCancelledError` then, unless all was done before.

        Raises:
            PenstockError: This process is a fork of the one that moves the bytes.
        """
        if self.done():
            return
        self._native.cancel()
        # Who gives it up need not be told of its end.
        self.is_seen = True

    def result(self, timeout: float | None = None) -> TransferReport:
        """Waits for the end.

        Args:
            timeout: For how many seconds at most; for ever without.

        Raises:
            TransferError: Not every byte was moved. Of several failures it is the first.
            TransferCancelledError: It was given up.
            TimeoutError: It has not ended in time; it goes on.
            ValueError: The time is no number (NaN).
            PenstockError: This process is a fork of the one that moves the bytes.
        """
        report = self._wait(timeout)
        if report is None:
            raise TimeoutError(f"the transfer has not ended in {timeout} s")
        return report

    def __await__(self) -> Generator[None, None, TransferReport]:
        if not self.done():
            yield from bell_of_loop().wait(self._native, self.cancel).__await__()
        return self.result()

    async def ended(self) -> None:
        """Waits for the end, well or not."""
        if not self.done():
            await bell_of_loop().wait(self._native, lambda: None)

    @property
    def is_settled(self) -> bool:
        """Whether nobody has to hear of it any more: it went well, or its error was raised."""
        if not self.done():
            return False
        try:
            return self.is_seen or self._native.wait(0) is not None
        except PenstockError:
            return False

    def __repr__(self) -> str:
        return f"<Transfer {'done' if self.done() else 'under way'}>"

    def ends_within(self, timeout: float | None) -> bool:
        """Waits for the end, well or not; whoever asks has not heard which."""
        try:
            return self._native.wait(timeout) is not None
        except PenstockError:
            return True

    def _wait(self, timeout: float | None) -> TransferReport | None:
        try:
            moved = self._native.wait(timeout)
        except PenstockError:
            # Nothing else, as of a signal handler, is the transfer's own end.
            self.is_seen = True
            raise
        if moved is None:
            return None
        self.is_seen = True
        if self._copies:
            # Whoever asks meanwhile must not go on before they are made.
            with _COPYING:
                while self._copies:
                    copy_elements(*self._copies[-1])
                    self._copies.pop()
        nbytes, staged, cached, on_device, seconds = moved
        fallbacks = self._fallbacks
        if on_device and (unpinned := self._executor.unpinned) is not None:
            fallbacks = (*fallbacks, Fallback(unpinned, "unpinned"))
        engine = self._executor.engine
        return TransferReport(nbytes, seconds, engine, staged, cached, on_device, fallbacks)


def wait_all(transfers: Iterable[Transfer], timeout: float | None = None) -> list[TransferReport]:
    """Waits for transfers, whatever becomes of each.

    Args:
        transfers: Any number of them.
        timeout: For how many seconds at most, for all together; for ever without.

    Returns:
        Their reports, in the same order.

    Raises:
        TransferError: Of the transfers that failed it is the first in the order given; its notes
            tell of the others.
        TransferCancelledError: The first that did not end well was given up; likewise.
        TimeoutError: Not all have ended in time; they go on.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    transfers = list(transfers)
    # No failure counts as heard of before all have ended: a time-out or a signal would swallow it.
    for transfer in transfers:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if not transfer.ends_within(left):
            raise TimeoutError(f"not all transfers have ended in {timeout} s")
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
