"""`Epoch`: the batches of an epoch, sampled and gathered ahead of their use."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import DeviceError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.integrations.pyg.feature_store import FeatureStore
    from penstock.integrations.pyg.landing import Landing


class EpochSteps(Protocol):
    """The interface of a loader to its epoch; a loader must not keep a reference to the epoch.

    Attributes:
        ahead: Batches gathered beyond the requested one.
        window: Batches sampled beyond those.
    """

    ahead: int
    window: int

    def prepared(self, sampled: Any) -> Any:
        """Prepares a sampled neighbourhood for its batch."""

    def nodes_of(self, sampled: Any) -> Mapping[str | None, Any]:
        """The nodes of a neighbourhood, by type."""

    def made(self, sampled: Any, landing: Landing | None) -> Any:
        """Makes the batch, once its features are gathered, on the device of ``landing``."""

    def stop(self, sampling: Any) -> None:
        """Ends an iterator that is not used any more."""

    @property
    def store(self) -> FeatureStore:
        """The features to gather from."""


@dataclass
class EpochPosition:
    """The position of training.

    Attributes:
        epoch: The current epoch; between epochs the next one.
        batches: Batches of it that were handed out.
    """

    epoch: int
    batches: int

    def passed(self) -> None:
        """Counts a batch."""
        self.batches += 1

    def over(self) -> None:
        """Moves to the next epoch."""
        self.epoch, self.batches = self.epoch + 1, 0


class Epoch:
    """The batches of an epoch, in their order.

    It ends when it is dropped, when something fails, and with the process: then its thread ends,
    batches gathered ahead are dropped, and the caches forget its announced rows.

    Args:
        steps: The loader.
        sampling: Yields sampled neighbourhoods.
        place: The position of training, advanced with each batch.
        landing: The device of the batches; None for the host.
    """

    def __init__(
        self,
        steps: EpochSteps,
        sampling: Iterator[Any],
        place: EpochPosition,
        landing: Landing | None,
    ) -> None:
        self._steps = steps
        self._position = place
        self._landing = landing
        self._ahead = _Ahead(steps, sampling, landing)
        self._end = weakref.finalize(self, self._ahead.end)
        # Another exit handler ends it, before those of worker processes run.
        self._end.atexit = False

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        if not self._end.alive:
            raise StopIteration
        # Raises before anything changes, so the epoch can go on.
        self._ahead.check()
        try:
            sampled, error = self._ahead.get()
            batch = None if error is not None else self._made(sampled)
        except BaseException:
            # Also an interrupt, which may have come anywhere.
            self._end()
            raise
        if error is not None:
            self._end()
            if isinstance(error, StopIteration):
                self._position.over()
            raise error
        self._position.passed()
        return batch

    def _made(self, sampled: Any) -> Any:
        try:
            batch = self._steps.made(sampled, self._landing)
        except StopIteration as error:
            raise RuntimeError("a transform raised StopIteration") from error
        self._ahead.done(sampled)
        return batch

    def end(self) -> None:
        """Ends the epoch early."""
        self._end()


class _Ahead:
    """The thread that samples and gathers ahead; it keeps no reference to the `Epoch`."""

    def __init__(self, steps: EpochSteps, sampling: Iterator[Any], landing: Landing | None) -> None:
        self._steps = steps
        self._sampling: Iterator[Any] | None = sampling
        self._landing = landing
        self._window = steps.window
        self._open: dict[int, Any] = {}
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(steps.ahead)
        self._is_over = threading.Event()
        self._process = os.getpid()
        # In this thread, as an order may be drawn from the random numbers that training uses.
        try:
            first = self._sampled()
        except BaseException:
            self._forget()
            raise
        self._thread = threading.Thread(
            target=self._run, args=(first,), name="penstock-sample", daemon=True
        )
        atexit.register(self.end)
        try:
            self._thread.start()
        except BaseException:
            # An interrupt during the start: nobody else can end the thread yet.
            self.end()
            raise

    def check(self) -> None:
        """Raises unless a batch can be requested here."""
        if self._process != os.getpid():
            raise PenstockError(
                f"this epoch was begun by process {self._process}, of which this one is a fork:"
                " begin one here"
            )
        if self._landing is not None:
            self._landing.check()

    def get(self) -> tuple[Any, BaseException | None]:
        """The next neighbourhood, whose rows are being gathered, or the error that ended it."""
        found = self._ready.get()
        self._room.release()
        return found

    def done(self, sampled: Any) -> None:
        """Records that a batch was made of a neighbourhood."""
        self._open.pop(id(sampled), None)

    def end(self) -> None:
        """Ends the thread, and forgets announced rows."""
        atexit.unregister(self.end)
        if self._process != os.getpid():
            return
        self._is_over.set()
        self._room.release()
        if threading.current_thread() is not self._thread:
            if self._thread.ident is not None:
                self._thread.join()
            self._forget()

    def _forget(self) -> None:
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            self._steps.stop(sampling)
        while self._open:
            _, sampled = self._open.popitem()
            self._steps.store.forget(self._steps.nodes_of(sampled))

    def _sampled(self) -> tuple[Any, BaseException | None]:
        """Samples a neighbourhood and announces its rows to the caches."""
        assert self._sampling is not None
        try:
            sampled = self._steps.prepared(next(self._sampling))
            # The store identifies its gathers by the object itself, so keep it.
            self._open[id(sampled)] = sampled
            self._steps.store.hint(self._steps.nodes_of(sampled))
        except BaseException as error:
            return None, error
        return sampled, None

    def _run(self, one: tuple[Any, BaseException | None]) -> None:
        landing = self._landing
        try:
            with contextlib.nullcontext() if landing is None else landing.working():
                self._work(deque([one]))
        except BaseException as error:
            # An error of the device's stream; the caller that waits for a batch raises it.
            self._ready.put((None, error))
        finally:
            if self._is_over.is_set():
                self._forget()

    def _work(self, known: deque[tuple[Any, BaseException | None]]) -> None:
        while not self._is_over.is_set():
            # Does not wait while there is something to sample.
            is_full = bool(known) and (known[-1][1] is not None or len(known) > self._window)
            if not known or not self._room.acquire(blocking=is_full):
                known.append(self._sampled())
                continue
            if self._is_over.is_set():
                return
            sampled, error = known.popleft()
            if error is None:
                error = self._begin(sampled)
            self._ready.put((sampled, error))
            if error is not None:
                return

    def _begin(self, sampled: Any) -> BaseException | None:
        landing = self._landing
        rows = None if landing is None else landing.rows
        try:
            self._steps.store.begin(self._steps.nodes_of(sampled), rows)
        except DeviceError as error:
            # While the stream is captured the gather starts later, when the batch is requested.
            return None if error.code is None else error
        except BaseException as error:
            return error
        return None
