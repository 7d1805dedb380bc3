"""Summarizes where a traced process spent its time."""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.common.tracing.recorded import RecordedSpan, Request, Trace

_KIB, _MIB = 1 << 10, 1 << 20

SIZES = (
    (4 * _KIB, "<4K"),
    (64 * _KIB, "4K-64K"),
    (_MIB, "64K-1M"),
    (4 * _MIB, "1M-4M"),
    (None, ">=4M"),
)
"""Size classes of requests, each below its number of bytes."""

READS, WRITES = "process reads GiB/s", "process writes GiB/s"
"""Counters of the bytes that a process exchanges with storage."""

START, COMPUTE, CHECKPOINT, LOAD = "start-up", "compute", "checkpoint", "load"


class CallTotals(NamedTuple):
    """All calls of one kind in rows of one kind.

    Attributes:
        name: The name of the call.
        role: ``"stall"`` if the caller waited for it, else ``"background"``.
        times: Number of calls.
        seconds: Total time.
        seconds_max: Time of the longest call.
        phases: Seconds by phase, in the order of their begin.
        accounted: The fraction of the time that the phases cover, 0 to 1.
    """

    name: str
    role: str
    times: int
    seconds: float
    seconds_max: float
    phases: dict[str, float]
    accounted: float


class Work(NamedTuple):
    """The work of all threads of one kind.

    Attributes:
        role: The kind of thread.
        seconds: Working time, summed over all threads.
        parts: Seconds by activity, excluding nested activities.
    """

    role: str
    seconds: float
    parts: dict[str, float]


class RequestTotals(NamedTuple):
    """Requests of one operation and size class.

    Attributes:
        operation: ``"read"``, ``"write"`` or ``"sync"``.
        size: The size class, in words.
        requests: Number of requests.
        nbytes: Total size.
        aligned: The fraction whose offset, length and memory are multiples of 4096, 0 to 1.
        direct: The fraction that bypassed the page cache, 0 to 1.
        p50_ms: Median time in flight.
        p99_ms: 99th percentile of the time in flight.
        max_ms: Longest time in flight.
    """

    operation: str
    size: str
    requests: int
    nbytes: int
    aligned: float
    direct: float
    p50_ms: float
    p99_ms: float
    max_ms: float


class Phase(NamedTuple):
    """A phase of a training run.

    Attributes:
        name: ``"start-up"``, ``"compute"``, ``"checkpoint"`` or ``"load"``.
        seconds: Total duration of all its parts.
        read_bytes: Bytes that the process read from storage.
        written_bytes: Bytes that the process wrote.
    """

    name: str
    seconds: float
    read_bytes: float
    written_bytes: float


class Moment(NamedTuple):
    """An interval of a run.

    Attributes:
        begin: Seconds since the trace began.
        end: Seconds since the trace began.
        phase: The phase that takes most of the interval.
        read_bytes: Bytes that the process read from storage.
        written_bytes: Bytes that the process wrote.
    """

    begin: float
    end: float
    phase: str
    read_bytes: float
    written_bytes: float


def calls(trace: Trace) -> list[CallTotals]:
    """Returns the calls of a trace with their phases."""
    found = []
    for role in ("stall", "background"):
        kinds: dict[str, list[RecordedSpan]] = defaultdict(list)
        for span in trace.spans:
            if role_of(span) == role:
                kinds[span.name].append(span)
        found += [_call(name, role, spans, trace.spans) for name, spans in kinds.items()]
    return found


def _call(name: str, role: str, shown: list[RecordedSpan], spans: list[RecordedSpan]) -> CallTotals:
    phases: dict[str, float] = defaultdict(float)
    accounted = 0.0
    begins = [span.begin for span in spans]
    for outer in shown:
        first = bisect.bisect_left(begins, outer.begin)
        last = bisect.bisect_right(begins, outer.end)
        inner = [one for one in spans[first:last] if one.end <= outer.end]
        own = next((one for one in inner if _is_same(one, outer)), None)
        if own is None:
            continue
        children = [one for one in inner if one.row == own.row and one is not own]
        for child in _outermost(children):
            phases[child.name] += child.seconds
            accounted += child.seconds
    seconds = sum(span.seconds for span in shown)
    longest = max(span.seconds for span in shown)
    share = accounted / seconds if seconds else 0.0
    return CallTotals(name, role, len(shown), seconds, longest, dict(phases), share)


def _is_same(own: RecordedSpan, shown: RecordedSpan) -> bool:
    """Whether a span is the calling thread's counterpart of a span in a common row."""
    is_call = own.name == shown.name and own.detail == shown.detail
    return is_call and role_of(own) == "caller"


def _outermost(spans: Iterable[RecordedSpan]) -> list[RecordedSpan]:
    """Returns the spans that are inside no other; they must be ordered by their begin."""
    found: list[RecordedSpan] = []
    for span in spans:
        if not found or span.begin >= found[-1].end:
            found.append(span)
    return found


def work(trace: Trace) -> list[Work]:
    """Returns the work of the threads that move bytes."""
    found = []
    for role in ("stager", "writer", "reader"):
        rows: dict[str, list[RecordedSpan]] = defaultdict(list)
        for span in trace.spans:
            if role_of(span) == role:
                rows[span.row].append(span)
        parts: dict[str, float] = defaultdict(float)
        for spans in rows.values():
            for name, own in _own_seconds(spans):
                parts["other" if name == "work" else name] += own
        if rows:
            found.append(Work(role, sum(parts.values()), dict(parts)))
    return found


def _own_seconds(spans: list[RecordedSpan]) -> list[tuple[str, float]]:
    """Returns the time of each span, excluding spans nested in it."""
    own: list[float] = []
    open_now: list[int] = []
    for index, span in enumerate(spans):
        while open_now and spans[open_now[-1]].end <= span.begin:
            open_now.pop()
        if open_now:
            own[open_now[-1]] -= span.seconds
        own.append(span.seconds)
        open_now.append(index)
    return [(span.name, seconds) for span, seconds in zip(spans, own, strict=True)]


def requests(some: Iterable[Request]) -> list[RequestTotals]:
    """Returns the totals of requests by operation and size class."""
    kinds: dict[tuple[str, int], list[Request]] = defaultdict(list)
    for one in some:
        kinds[one.operation, _size(one.nbytes)].append(one)
    found = []
    for (operation, size), alike in sorted(kinds.items()):
        times = np.array([one.seconds for one in alike]) * 1e3
        p50, p99 = np.percentile(times, (50, 99))
        made = RequestTotals(
            operation=operation,
            size=SIZES[size][1],
            requests=len(alike),
            nbytes=sum(one.nbytes for one in alike),
            aligned=sum(one.is_aligned for one in alike) / len(alike),
            direct=sum(one.is_direct for one in alike) / len(alike),
            p50_ms=float(p50),
            p99_ms=float(p99),
            max_ms=float(times.max()),
        )
        found.append(made)
    return found


def slowest(trace: Trace, count: int) -> list[Request]:
    """Returns the requests with the longest time in flight, longest first."""
    return sorted(trace.requests, key=lambda one: one.seconds, reverse=True)[:count]


def _size(nbytes: int) -> int:
    return next(index for index, (limit, _) in enumerate(SIZES) if limit is None or nbytes < limit)


def phases(trace: Trace) -> list[Phase]:
    """Returns the phases start-up, compute, checkpoint and load, with their storage traffic.

    Start-up ends with the last load before the first save. Checkpoint is the time in which the
    process waits for a save, load that in which it waits for another call of Penstock. The rest is
    compute.
    """
    parts = timeline(trace)
    reads, writes = Rate(trace, READS), Rate(trace, WRITES)
    found = []
    for name in (START, COMPUTE, CHECKPOINT, LOAD):
        own = [(begin, end) for begin, end, phase in parts if phase == name]
        read = sum(reads.moved(begin, end) for begin, end in own)
        written = sum(writes.moved(begin, end) for begin, end in own)
        found.append(Phase(name, sum(end - begin for begin, end in own), read, written))
    return found


def moments(trace: Trace, count: int) -> list[Moment]:
    """Divides the run into equal intervals, with the storage traffic of each."""
    length = trace.seconds / count
    if not length:
        return []
    parts = timeline(trace)
    reads, writes = Rate(trace, READS), Rate(trace, WRITES)
    found = []
    for index in range(count):
        begin, end = index * length, (index + 1) * length
        shares: dict[str, float] = defaultdict(float)
        for first, last, phase in parts:
            shares[phase] += max(0.0, min(end, last) - max(begin, first))
        read, written = reads.moved(begin, end), writes.moved(begin, end)
        phase = max(shares, key=lambda name: shares[name], default=COMPUTE)
        found.append(Moment(begin, end, phase, read, written))
    return found


def timeline(trace: Trace) -> list[tuple[float, float, str]]:
    """Returns the phases of a process in order: begin, end, name; see `phases`."""
    stalls = [span for span in trace.spans if role_of(span) == "stall"]
    first_save = next((one.begin for one in stalls if _is_saving(one)), trace.seconds)
    loads = [one.end for one in stalls if one.name == "load" and one.end <= first_save]
    at = max(loads, default=0.0)
    parts = [(0.0, at, START)]
    for stall in stalls:
        # Several threads may wait at once.
        if stall.end > at:
            begin = max(stall.begin, at)
            parts.append((at, begin, COMPUTE))
            parts.append((begin, stall.end, CHECKPOINT if _is_saving(stall) else LOAD))
            at = stall.end
    parts.append((at, trace.seconds, COMPUTE))
    return [part for part in parts if part[1] > part[0]]


def _is_saving(stall: RecordedSpan) -> bool:
    return stall.name in ("save", "save_async", "stage", "wait")


class Rate:
    """A counter of a trace in GiB/s; each value holds until the next."""

    def __init__(self, trace: Trace, counter: str) -> None:
        levels = trace.levels.get(counter, [])
        self._at = np.array([at for at, _ in levels] + [trace.seconds])
        rates = np.array([rate for _, rate in levels])
        moved = np.cumsum(rates * np.diff(self._at)) * (1 << 30)
        self._moved = np.concatenate([[0.0], moved])

    def moved(self, begin: float, end: float) -> float:
        """Returns the bytes moved between two times."""
        before, after = np.interp([begin, end], self._at, self._moved)
        return float(after - before)


def role_of(span: RecordedSpan) -> str:
    """Returns the kind of row that a span is in."""
    return span.row.split(" ", 1)[0]
