"""The calls of units that a thread is in: how long they compute, and their spans in a trace."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from penstock.common import tracing


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a unit.

    Attributes:
        index: Of the unit.
        span: In a trace.
        begun: When it began.
    """

    index: int
    span: Any
    begun: float


class Calls(threading.local):
    """Those of one thread, the outer before the inner."""

    def __init__(self) -> None:
        self._open: list[Call] = []
        self._stalled_seconds = 0.0

    @property
    def indices(self) -> set[int]:
        """The units that are called."""
        return {call.index for call in self._open}

    @property
    def depth(self) -> int:
        """How many there are."""
        return len(self._open)

    @property
    def innermost(self) -> Call:
        """The one that has come last."""
        return self._open[-1]

    def depth_of(self, index: int) -> int:
        """How many calls the last one of a unit is in."""
        return max(place for place, call in enumerate(self._open) if call.index == index)

    def begin(self, index: int, name: str) -> Call:
        """A call has come."""
        if not self._open:
            self._stalled_seconds = 0.0
        span = tracing.span(name)
        span.__enter__()
        call = Call(index, span, time.perf_counter())
        self._open.append(call)
        return call

    def stalled(self, seconds: float) -> None:
        """It has waited for its weights."""
        self._stalled_seconds += seconds

    def end(self, ended: float) -> float:
        """The innermost is over; returns how long it computed, if it is in no other one."""
        call = self._open.pop()
        call.span.__exit__(None, None, None)
        if self._open:
            return 0.0
        return max(0.0, ended - call.begun - self._stalled_seconds)
