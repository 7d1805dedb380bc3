"""`Epoch`: batches of an epoch, sampled and gathered ahead of whoever asks for them."""

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


class Steps(Protocol):
    """What an epoch needs of its loader, which must not keep the epoch.

    Attributes:
        ahead: How many batches are gathered beside the one that is asked for.
        window: How many are known beyond those.
    """

    ahead: int
    window: int

    def prepared(self, sampled: Any) -> Any:
        """What was sampled, as a batch is made of it."""

    def nodes_of(self, sampled: Any) -> Mapping[str | None, Any]:
        """The nodes that it has, by type."""

    def made(self, sampled: Any, landing: Landing | None) -> Any:
        """The batch, once its features are there, on the device that it goes to."""

    def stop(self, sampling: Any) -> None:
        """It will not be asked for another one."""

    @property
    def store(self) -> FeatureStore:
        """What is gathered from."""


@dataclass
class Place:
    """How far training has come.

    Attributes:
        epoch: Which one it is in, or begins next.
        batches: How many of it are behind.
    """

    epoch: int
    batches: int

    def passed(self) -> None:
        """One more batch is behind."""
        self.batches += 1

    def over(self) -> None:
        """The epoch is."""
        self.epoch, self.batches = self.epoch + 1, 0


class Epoch:
    """Batches, in their order.

    It ends when nobody has it any more, when something fails, and with the process: then no thread
    is left, nothing that was begun is kept, and the caches know of none of its batches.

    Args:
        steps: What is done for each.
        sampling: Samples them.
        place: Goes on with each.
        landing: The device that they go to; None for the host.
    """

    def __init__(
        self, steps: Steps, sampling: Iterator[Any], place: Place, landing: Landing | None
    ) -> None:
        self._steps = steps
        self._place = place
        self._landing = landing
        self._ahead = _Ahead(steps, sampling, landing)
        self._end = weakref.finalize(self, self._ahead.end)
        # That of the process is another one, which comes before that of worker processes.
        self._end.atexit = False

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        if not self._end.alive:
            raise StopIteration
        # What is refused here leaves the epoch as it is.
        self._ahead.check()
        try:
            sampled, error = self._ahead.get()
            batch = None if error is not None else self._made(sampled)
        except BaseException:
            # Of Ctrl-C, too, which may have come anywhere.
            self._end()
            raise
        if error is not None:
            self._end()
            if isinstance(error, StopIteration):
                self._place.over()
            raise error
        self._place.passed()
        return batch

    def _made(self, sampled: Any) -> Any:
        try:
            batch = self._steps.made(sampled, self._landing)
        except StopIteration as error:
            raise RuntimeError("a transform raised StopIteration") from error
        self._ahead.done(sampled)
        return batch

    def end(self) -> None:
        """Ends it before its time."""
        self._end()


class _Ahead:
    """What a thread has sampled, and begun to gather; it knows nothing of whoever asks for it."""

    def __init__(self, steps: Steps, sampling: Iterator[Any], landing: Landing | None) -> None:
        self._steps = steps
        self._sampling: Iterator[Any] | None = sampling
        self._landing = landing
        self._window = steps.window
        self._open: dict[int, Any] = {}
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(steps.ahead)
        self._is_over = threading.Event()
        self._process = os.getpid()
        # Here, as an order may be drawn from the random numbers that training draws from.
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
            # Ctrl-C, while it waits for the thread: nobody else knows of this one yet.
            self.end()
            raise

    def check(self) -> None:
        """Whether a batch can be asked for here.

        Raises:
            PenstockError: This process is a fork of the one whose thread samples.
            DeviceError: The stream that is current here is being captured, or the driver fails.
        """
        if self._process != os.getpid():
            raise PenstockError(
                f"this epoch was begun by process {self._process}, of which this one is a fork:"
                " begin one here"
            )
        if self._landing is not None:
            self._landing.check()

    def get(self) -> tuple[Any, BaseException | None]:
        """The next neighbourhood, whose rows are on their way, or why there is none."""
        found = self._ready.get()
        self._room.release()
        return found

    def done(self, sampled: Any) -> None:
        """It was made a batch of."""
        self._open.pop(id(sampled), None)

    def end(self) -> None:
        """Has the thread end, and forgets what nobody will ask for."""
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
        """The next one, which the caches are told of."""
        assert self._sampling is not None
        try:
            sampled = self._steps.prepared(next(self._sampling))
            # What was begun of it is known by the object itself.
            self._open[id(sampled)] = sampled
            self._steps.store.foresee(self._steps.nodes_of(sampled))
        except BaseException as error:
            return None, error
        return sampled, None

    def _run(self, one: tuple[Any, BaseException | None]) -> None:
        landing = self._landing
        try:
            with contextlib.nullcontext() if landing is None else landing.working():
                self._work(deque([one]))
        except BaseException as error:
            # Of the device's stream: who waits for a batch is told.
            self._ready.put((None, error))
        finally:
            if self._is_over.is_set():
                self._forget()

    def _work(self, known: deque[tuple[Any, BaseException | None]]) -> None:
        while not self._is_over.is_set():
            # Nothing is waited for as long as there is something to sample.
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
            # While the stream is captured nothing is begun on it: by whoever takes the batch then.
            return None if error.code is None else error
        except BaseException as error:
            return error
        return None
