"""`Stopping`: how ranks come to stop after the same step when a signal has come to some of them.

The signal may reach one of them, or all at different times. They agree through the key-value store
with which `torch.distributed` brought them together, by a chain of *marks* of which each is written
once, by whoever comes first:

1. Who has the signal marks the step after the one it has ended.
2. Who comes to the marked step waits there. Who is past it already marks the step where it is.
3. Who comes last to the marked step marks that all are there: it is the one.
4. Who has waited in vain marks a later step, further away each time, and goes on: a rank may be
   steps ahead where it only hands work to a device, and wait there for one that waits here.

A rank that never comes ends the wait of the others when the time of grace is over.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.ranks.mailbox import Mailbox

_WAIT_SECONDS_MIN = 0.5
"""For the others at a marked step, at first; twice as long each time."""

_STEPS_WAITED = 2
"""The same, in steps of training."""


class Grace(Protocol):
    """The time that is left since the signal came, to whichever rank."""

    signal: int | None

    @property
    def remaining_seconds(self) -> float:
        """How much is left of it; all as long as no signal has come."""

    @property
    def elapsed_seconds(self) -> float:
        """How long ago the signal came."""

    def begin_grace(self, elapsed_seconds: float) -> None:
        """Counts the time from a signal that came to another rank."""


class Stopping:
    """How ranks come to stop after the same step; see the module.

    Args:
        ranks: Who stops.

    Attributes:
        are_all_here: Whether it is all of them that do, and not those who are left.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._mailbox: Mailbox = ranks.mailbox
        self._size = ranks.size
        count = _counts.get(ranks, 0)
        # Every rank watches as often.
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
        """Whether all ranks stop after this step."""
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
        """Reads on; whether the last mark ends all of it."""
        self._read(grace)
        if self._mark is None and grace.signal is not None:
            self._post({"step": step + 1}, grace)
            self._read(grace)
        mark = self._mark or {}
        self.are_all_here = not mark.get("is_over")
        return bool(mark.get("are_all_here") or mark.get("is_over"))

    def _read(self, grace: Grace) -> None:
        while (mark := self._mailbox.look(f"{self._prefix}/{self._next}")) is not None:
            self._mark = mark
            self._next += 1
            self._has_come = False
            grace.begin_grace(mark["elapsed_seconds"])

    def _post(self, mark: dict[str, Any], grace: Grace) -> None:
        """Leaves the next mark, unless somebody else has."""
        mark = {**mark, "elapsed_seconds": grace.elapsed_seconds}
        self._mailbox.post_first(f"{self._prefix}/{self._next}", mark)

    def _wait(self, step: int, step_seconds: float, grace: Grace) -> None:
        """Waits at a marked step until all are there, or somebody marks another one."""
        if not self._has_come:
            self._has_come = True
            if self._mailbox.count(f"{self._prefix}/at/{self._next}") == self._size:
                self._post({"step": step, "are_all_here": True}, grace)
                return
        seconds = max(self._wait_seconds, _STEPS_WAITED * step_seconds)
        self._wait_seconds *= 2
        seconds = min(seconds, grace.remaining_seconds)
        name = f"{self._prefix}/{self._next}"
        if self._mailbox.wait([name], seconds, _go_on) is None:
            if grace.remaining_seconds > 0:
                self._post({"step": step + self._lead_steps}, grace)
            self._lead_steps *= 2


_counts: weakref.WeakKeyDictionary[Ranks, int] = weakref.WeakKeyDictionary()
"""How often each job was watched."""


def _go_on() -> None:
    pass
