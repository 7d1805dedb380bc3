"""The calls of units that a thread is in: how long they compute, and their spans in a trace."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from penstock import tracing


@dataclass(frozen=True, slots=True)
class _Call:
    index: int
    span: Any
    begun: float


class Calls(threading.local):
    """Those of one thread, the outer before the inner."""

    def __init__(self) -> None:
        self._open: list[_Call] = []
        self._stalled_seconds = 0.0

    @property
    def indices(self) -> set[int]:
        """The units that are called."""
        return {call.index for call in self._open}

    def begin(self, index: int, name: str) -> None:
        """A call has come."""
        if not self._open:
            self._stalled_seconds = 0.0
        span = tracing.span(name)
        span.__enter__()
        self._open.append(_Call(index, span, time.perf_counter()))

    def stalled(self, seconds: float) -> None:
        """It has waited for its weights."""
        self._stalled_seconds += seconds

    def end(self, index: int) -> float:
        """It is over, with those in it; returns how long it computed, if it is in no other one."""
        while self._open:
            call = self._open.pop()
            call.span.__exit__(None, None, None)
            if call.index == index:
                break
        if self._open:
            return 0.0
        return max(0.0, time.perf_counter() - call.begun - self._stalled_seconds)
