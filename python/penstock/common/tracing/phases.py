"""The phases of a training run of several ranks, and what each asks of storage.

A rank is at any time in one of the phases of `summary.phases`. Writes of a save that runs in the
background are a phase of their own, which lies beside compute.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from penstock.common.tracing import summary
from penstock.common.tracing.summary import CHECKPOINT, COMPUTE, LOAD, READS, START, WRITES, Rate

if TYPE_CHECKING:
    from penstock.common.tracing.recorded import Request, Trace
    from penstock.common.tracing.summary import RequestTotals

BACKGROUND = "background"
"""The phase of saves that run while training goes on."""

_ACTIVE_SHARE = 0.1
"""A rank that moves less than this share of the busiest rank's bytes only writes its trace, say."""


class PhaseOfRun(NamedTuple):
    """A phase of all ranks.

    Attributes:
        name: ``"start-up"``, ``"compute"``, ``"checkpoint"``, ``"load"`` or ``"background"``.
        times: Number of its intervals, on the rank with most of them.
        seconds: Its duration in all, the mean of the ranks.
        share: Its share of the run, 0 to 1; the background lies beside the other phases.
        read_bytes: Bytes that all ranks read: of Penstock's requests or by the kernel's count of
            storage traffic, whichever is more on a rank.
        written_bytes: Bytes that all ranks wrote, in the same way.
        readers: Number of ranks that read at least a tenth as much as the rank with most.
        writers: Number of ranks that wrote at least a tenth as much as the rank with most.
        requests: Penstock's requests by operation and size class.
    """

    name: str
    times: int
    seconds: float
    share: float
    read_bytes: float
    written_bytes: float
    readers: int
    writers: int
    requests: list[RequestTotals]

    @property
    def read_rate(self) -> float:
        """Bytes that all ranks together read in a second of the phase."""
        return self.read_bytes / self.seconds if self.seconds else 0.0

    @property
    def write_rate(self) -> float:
        """Bytes that all ranks together wrote in a second of the phase."""
        return self.written_bytes / self.seconds if self.seconds else 0.0


class _OfRank(NamedTuple):
    """A phase of one rank."""

    parts: list[tuple[float, float]]
    requests: list[Request]
    read_bytes: float
    written_bytes: float

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self.parts)


def phases(traces: list[Trace]) -> list[PhaseOfRun]:
    """Returns the phases of a run that at least one rank was in.

    Args:
        traces: One trace of each rank.
    """
    ranks = [_of_rank(trace) for trace in traces]
    run_seconds = sum(trace.seconds for trace in traces) / len(traces)
    found = []
    for name in (START, COMPUTE, CHECKPOINT, BACKGROUND, LOAD):
        own = [rank[name] for rank in ranks]
        if not any(one.parts for one in own):
            continue
        seconds = sum(one.seconds for one in own) / len(own)
        read = [one.read_bytes for one in own]
        written = [one.written_bytes for one in own]
        found.append(
            PhaseOfRun(
                name=name,
                times=max(len(one.parts) for one in own),
                seconds=seconds,
                share=seconds / run_seconds if run_seconds else 0.0,
                read_bytes=sum(read),
                written_bytes=sum(written),
                readers=_active(read),
                writers=_active(written),
                requests=summary.requests(each for one in own for each in one.requests),
            )
        )
    return found


def _active(moved: list[float]) -> int:
    most = max(moved)
    return sum(one >= most * _ACTIVE_SHARE for one in moved) if most else 0


def _of_rank(trace: Trace) -> dict[str, _OfRank]:
    timeline = summary.timeline(trace)
    parts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for begin, end, name in timeline:
        parts[name].append((begin, end))
    parts[BACKGROUND] = _outside(_background(trace), parts[CHECKPOINT] + parts[LOAD])
    requests: dict[str, list[Request]] = defaultdict(list)
    begins = [begin for begin, _, _ in timeline]
    for one in trace.requests:
        name = timeline[max(0, bisect.bisect_right(begins, one.begin) - 1)][2]
        if name == COMPUTE and one.operation != "read" and _is_within(one, parts[BACKGROUND]):
            name = BACKGROUND
        requests[name].append(one)
    reads, writes = Rate(trace, READS), Rate(trace, WRITES)
    return {
        name: _OfRank(
            parts[name],
            requests[name],
            max(_moved(reads, parts[name], name), _requested(requests[name], "read")),
            max(_moved(writes, parts[name], name), _requested(requests[name], "write")),
        )
        for name in (START, COMPUTE, CHECKPOINT, BACKGROUND, LOAD)
    }


def _background(trace: Trace) -> list[tuple[float, float]]:
    """Returns the intervals in which a save runs in the background."""
    found: list[tuple[float, float]] = []
    for span in trace.spans:
        if summary.role_of(span) != "background" or span.name != "save":
            continue
        if found and span.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.begin, span.end))
    return found


def _outside(
    parts: list[tuple[float, float]], others: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Returns the intervals without the time in which the caller waits."""
    found = parts
    for first, last in others:
        found = [
            (begin, end)
            for before, after in found
            for begin, end in ((before, min(after, first)), (max(before, last), after))
            if begin < end
        ]
    return found


def _is_within(request: Request, parts: list[tuple[float, float]]) -> bool:
    return any(begin <= request.begin <= end for begin, end in parts)


def _moved(rate: Rate, parts: list[tuple[float, float]], name: str) -> float:
    """Returns the kernel's count of a phase; that of the background is part of compute's."""
    return 0.0 if name == BACKGROUND else sum(rate.moved(begin, end) for begin, end in parts)


def _requested(requests: list[Request], operation: str) -> float:
    return float(sum(one.nbytes for one in requests if one.operation == operation))
