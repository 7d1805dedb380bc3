"""`Stopping`: makes all ranks stop after the same step when a signal reaches some of them.

The signal may reach one rank, or several at different times. They agree through the key-value store
of `torch.distributed`, by a chain of *marks*, each of which is written once, by the first rank:

1. A rank with the signal marks the step after the one that it has ended. 2. A rank that reaches the
marked step waits there. A rank already past it marks its own step. 3. The last rank to reach the
marked step marks that all are there: they stop after this step. 4. A rank whose wait timed out
marks a later step, further ahead each time, and continues: a rank may be steps ahead if it only
submits work to a device, and wait there for one that waits here.

A missing rank ends the others' wait when the grace period is over.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.ranks.mailbox import Mailbox

_WAIT_SECONDS_MIN = 0.5
"""First wait for the others at a marked step; each later wait is twice as long."""

_STEPS_WAITED = 2
"""The same, as a number of training steps."""


class Grace(Protocol):
    """The time left since the first rank received the signal."""

    signal: int | None

    @property
    def remaining_seconds(self) -> float:
        """Returns the time left; the whole grace period before a signal."""

    @property
    def elapsed_seconds(self) -> float:
        """Returns the time since the signal."""

    def begin_grace(self, elapsed_seconds: float) -> None:
        """Starts the grace period at another rank's signal."""


class Stopping:
    """Makes all ranks stop after the same step; see the module.

    Attributes:
        are_all_here: Whether all ranks stop, rather than only those that are left.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._mailbox: Mailbox = ranks.mailbox
        self._size = ranks.size
        count = _counts.get(ranks, 0)
        # The count is equal on all ranks, as every rank creates watches equally often.
        _counts[ranks] = count + 1
        self._prefix = f"stop/{count}"
        self._next = 0
        self._mark: dict[str, Any] | None = None
        self._has_come = False
        self._lead_steps = 1
        self._wait_seconds = _WAIT_SECONDS_MIN
        self._last_call: float | None = None
        self.are_all_here = True

    def is_here(self, step: int, grace: Grace) -> bool:
        """Returns whether all ranks stop after this step."""
        began = time.monotonic()
        step_seconds = 0.0 if self._last_call is None else began - self._last_call
        try:
            while not self._is_decided(step, grace):
                mark = self._mark
                if mark is None or step < mark["step"]:
                    return False
                if step > mark["step"]:
                    self._post({"step": step}, grace)
                elif grace.remaining_seconds <= 0:
                    self._post({"step": step, "is_over": True}, grace)
                else:
                    self._wait(step, step_seconds, grace)
            return True
        finally:
            self._last_call = time.monotonic()

    def _is_decided(self, step: int, grace: Grace) -> bool:
        """Reads further marks; returns whether the last one is final."""
        self._read(grace)
        if self._mark is None and grace.signal is not None:
            self._post({"step": step + 1}, grace)
            self._read(grace)
        mark = self._mark or {}
        self.are_all_here = not mark.get("is_over")
        return bool(mark.get("are_all_here") or mark.get("is_over"))

    def _read(self, grace: Grace) -> None:
        while (mark := self._mailbox.read_message(f"{self._prefix}/{self._next}")) is not None:
            self._mark = mark
            self._next += 1
            self._has_come = False
            grace.begin_grace(mark["elapsed_seconds"])

    def _post(self, mark: dict[str, Any], grace: Grace) -> None:
        """Posts the next mark, unless another rank has."""
        mark = {**mark, "elapsed_seconds": grace.elapsed_seconds}
        self._mailbox.post_first(f"{self._prefix}/{self._next}", mark)

    def _wait(self, step: int, step_seconds: float, grace: Grace) -> None:
        """Waits at a marked step until all ranks are there, or another step is marked."""
        if not self._has_come:
            self._has_come = True
            if self._mailbox.count(f"{self._prefix}/at/{self._next}") == self._size:
                self._post({"step": step, "are_all_here": True}, grace)
                return
        seconds = max(self._wait_seconds, _STEPS_WAITED * step_seconds)
        self._wait_seconds *= 2
        seconds = min(seconds, grace.remaining_seconds)
        name = f"{self._prefix}/{self._next}"
        if self._mailbox.wait([name], seconds, _keep_waiting) is None:
            if grace.remaining_seconds > 0:
                self._post({"step": step + self._lead_steps}, grace)
            self._lead_steps *= 2


_counts: weakref.WeakKeyDictionary[Ranks, int] = weakref.WeakKeyDictionary()
"""Number of watches of each job so far."""


def _keep_waiting() -> None:
    pass
