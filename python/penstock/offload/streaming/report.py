"""`StreamReport`: what a streamed model holds and has done, against what storage could give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.offload.streaming.expert_cache import ExpertsReport
    from penstock.offload.streaming.streamer import Streamer
    from penstock.reports import Fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """What a streamed model holds and has done.

    Of passes it tells the medians of those behind the first, which also reads what stays. A pass is
    over when the next one begins. Where the share of a `Budget` has changed, they are those since.

    Attributes:
        weight_bytes: Of all its weights, each once.
        resident_bytes: Memory of those that stay once they were read.
        passing_bytes: Memory that the others pass through.
        read_bytes: That were asked of storage so far.
        pass_bytes: That a pass through all blocks reads, once what stays is there, without experts.
        stalled_seconds: That calls have waited for weights so far.
        uses: Calls of blocks, and of what stands beside them.
        hits: Of them, those whose weights were there already.
        first_pass_seconds: What the first pass took; None before it is over.
        pass_seconds: What a pass takes: its calls, from the first to the last, one by one.
        computing_seconds: Of that, what calls do not wait for weights.
        gb_per_second: What storage gives: as the caller of `report` says, else what the reads had
            while there were any. None before the first has ended.
        engine: ``"uring"`` or ``"threads"``; None before the first read has ended.
        direct: Whether reads go past the page cache.
        in_flight_max: Requests that are under way at a time, at most.
        fallbacks: Ways that were left open and cannot be gone, each with its reason.
        experts: Of mixtures of experts; their bytes and seconds are in the others, too.
    """

    weight_bytes: int
    resident_bytes: int
    passing_bytes: int
    read_bytes: int
    pass_bytes: int
    stalled_seconds: float
    uses: int
    hits: int
    first_pass_seconds: float | None
    pass_seconds: float | None
    computing_seconds: float | None
    gb_per_second: float | None
    engine: str | None
    direct: bool
    in_flight_max: int
    fallbacks: tuple[Fallback, ...]
    experts: ExpertsReport | None = None

    @property
    def roofline_seconds(self) -> float | None:
        """What a pass takes at least: to read what passes through, or to compute."""
        if self.computing_seconds is None or self.gb_per_second is None:
            return None
        return max(self.pass_bytes / self.gb_per_second / 1e9, self.computing_seconds)

    @property
    def of_roofline(self) -> float | None:
        """How much of the speed that would be possible a pass has: 1 is all of it."""
        if self.roofline_seconds is None or not self.pass_seconds:
            return None
        return self.roofline_seconds / self.pass_seconds

    def __str__(self) -> str:
        """A few lines for people."""
        lines = [
            f"weights  {_gb(self.weight_bytes)}: {_gb(self.resident_bytes)} stay,"
            f" {_gb(self.passing_bytes)} for what passes through",
            f"reads    {_gb(self.read_bytes)}, {_gb(self.pass_bytes)} a pass, {self._way}",
            f"calls    {self.uses}, of {self.hits} the weights were there;"
            f" {self.stalled_seconds:.2f} s waited",
        ]
        if self.roofline_seconds is not None and self.of_roofline is not None:
            reading = self.pass_bytes / 1e9 / (self.gb_per_second or math.inf)
            lines += [
                f"a pass   {self.pass_seconds:.3f} s: {reading:.3f} s to read at"
                f" {self.gb_per_second:.2f} GB/s, {self.computing_seconds:.3f} s to compute",
                f"         {self.of_roofline:.0%} of the roofline, {self.roofline_seconds:.3f} s",
            ]
        return "\n".join([*lines, *map(str, self.fallbacks)])

    @property
    def _way(self) -> str:
        if self.engine is None:
            return "none has ended yet"
        way = "past the page cache" if self.direct else "through the page cache"
        return f"{way}, {self.engine}, {self.in_flight_max} in flight"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def report_of(streamer: Streamer, gb_per_second: float | None) -> StreamReport:
    """What is told of a streamer.

    Args:
        streamer: Which one.
        gb_per_second: What storage gives; what it gave without.
    """
    counts, shares, reads = streamer.counts, streamer.shares, streamer.settled_reads()
    passing = [unit for index, unit in enumerate(streamer.units) if index not in shares.resident]
    experts = streamer.experts
    first, usual = streamer.passes.first, streamer.passes.usual
    return StreamReport(
        weight_bytes=sum(unit.weight_bytes for unit in streamer.units)
        + shares.held_bytes
        + (0 if experts is None else experts.weight_bytes),
        resident_bytes=shares.resident_bytes + shares.held_bytes,
        passing_bytes=shares.ring_bytes,
        read_bytes=streamer.read_bytes,
        pass_bytes=sum(span.nbytes for unit in passing for span in unit.spans),
        stalled_seconds=counts.stalled_seconds
        + (0.0 if experts is None else experts.counts.stalled_seconds),
        uses=counts.uses,
        hits=counts.hits,
        first_pass_seconds=first and first.seconds,
        pass_seconds=usual and usual.seconds,
        computing_seconds=usual and usual.computing_seconds,
        gb_per_second=gb_per_second or reads.gb_per_second,
        engine=reads.last.engine if reads.last else None,
        direct=reads.last is not None and reads.last.direct,
        in_flight_max=streamer.in_flight_max,
        fallbacks=reads.last.fallbacks if reads.last else (),
        experts=None if experts is None else replace(experts.counts),
    )
