"""The open calls of units in a thread: their computing time, and their spans in a trace."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from penstock.common import tracing


@dataclass(frozen=True, slots=True, eq=False)
class UnitCall:
    """One call of a unit.

    Attributes:
        index: Index of the unit.
        span: Its span in a trace.
        begun: When it began, by `time.perf_counter`.
    """

    index: int
    span: Any
    begun: float


class UnitCalls(threading.local):
    """The open calls of one thread, from the outermost to the innermost."""

    def __init__(self) -> None:
        self._open: list[UnitCall] = []
        self._stalled_seconds = 0.0

    @property
    def indices(self) -> set[int]:
        """The units being called."""
        return {call.index for call in self._open}

    @property
    def depth(self) -> int:
        """The number of open calls."""
        return len(self._open)

    @property
    def innermost(self) -> UnitCall:
        """The innermost open call."""
        return self._open[-1]

    def depth_of(self, index: int) -> int:
        """The number of calls around the innermost call of a unit."""
        return max(place for place, call in enumerate(self._open) if call.index == index)

    def begin(self, index: int, name: str) -> UnitCall:
        """Opens a call."""
        if not self._open:
            self._stalled_seconds = 0.0
        span = tracing.span(name)
        span.__enter__()
        call = UnitCall(index, span, time.perf_counter())
        self._open.append(call)
        return call

    def stalled(self, seconds: float) -> None:
        """Adds seconds that the open calls have waited for weights."""
        self._stalled_seconds += seconds

    def end(self, ended: float) -> float:
        """Closes the innermost call; returns its computing time, or 0 inside another call."""
        call = self._open.pop()
        call.span.__exit__(None, None, None)
        if self._open:
            return 0.0
        return max(0.0, ended - call.begun - self._stalled_seconds)
