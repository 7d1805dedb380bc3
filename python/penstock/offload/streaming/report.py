"""`StreamReport`: memory use and speed of a streamed model, compared with its storage."""

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
    """Memory use, counters and speed of a streamed model.

    Times of a pass are medians of all passes but the first, which also reads resident weights. A
    pass ends when the next one begins. If the share of a `Budget` has changed, only later passes
    count.

    Attributes:
        weight_bytes: Bytes of all weights, shared ones counted once.
        resident_bytes: Memory of weights that stay in memory after their first read.
        passing_bytes: Memory through which the other weights are streamed.
        read_bytes: Bytes read from storage so far.
        pass_bytes: Bytes that one pass reads once resident weights are loaded, without experts.
        stalled_seconds: Seconds that calls have waited for weights so far.
        uses: Calls of blocks, and of the modules beside them.
        hits: Calls of these whose weights were in memory.
        passes: Passes begun. `generate` of transformers makes one for each token, fewer if it
            checks guessed tokens.
        first_pass_seconds: Seconds of the first pass; None before it is over.
        pass_seconds: Seconds of a pass: the sum of its calls.
        computing_seconds: Seconds of a pass that its calls do not wait for weights.
        gb_per_second: Speed of the storage in GB (10**9 bytes) per second: as given to `report`,
            else that of the model's own reads. None before the first read has ended.
        engine: ``"uring"`` or ``"threads"``; None before the first read has ended.
        direct: Whether reads bypass the page cache.
        in_flight_max: Most requests in flight at a time.
        fallbacks: Faster ways that could not be used, each with its reason.
        experts: Counters of experts, whose bytes and seconds are included above; None without.
    """

    weight_bytes: int
    resident_bytes: int
    passing_bytes: int
    read_bytes: int
    pass_bytes: int
    stalled_seconds: float
    uses: int
    hits: int
    passes: int
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
        """Least seconds of a pass: the longer of reading its bytes and computing."""
        if self.computing_seconds is None or self.gb_per_second is None:
            return None
        return max(self.pass_bytes / self.gb_per_second / 1e9, self.computing_seconds)

    @property
    def of_roofline(self) -> float | None:
        """The speed of a pass as a share of the roofline's: 1 is all of it."""
        if self.roofline_seconds is None or not self.pass_seconds:
            return None
        return self.roofline_seconds / self.pass_seconds

    def __str__(self) -> str:
        """A summary of a few lines."""
        lines = [
            f"weights  {_gb(self.weight_bytes)}: {_gb(self.resident_bytes)} stay,"
            f" {_gb(self.passing_bytes)} for what passes through",
            f"reads    {_gb(self.read_bytes)}, {_gb(self.pass_bytes)} a pass, {self._way}",
            f"calls    {self.uses} in {self.passes} passes, of {self.hits} the weights were there;"
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
    """The report of a streamer.

    Args:
        streamer: The streamer.
        gb_per_second: Speed of the storage; None for that of its reads.
    """
    counts, shares, reads = streamer.counts, streamer.shares, streamer.read_speed()
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
        passes=counts.passes,
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
