"""Others' patterns of requests: GraphBolt, Ginex and GIDS, whose code runs on GPUs or not at all.

Their reads and cache contents are planned before (`calls`), so their bookkeeping costs nothing.
The time covers their requests, in their order and with as many in flight, and their copies. Our
executor makes the requests, which takes less of the processor than their own threads.
"""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.features.features import Features
from penstock.features.sources.source import find
from penstock.offload import Buffers, TensorIO
from penstock_bench.peers.gather.base import KEY, Gatherer
from penstock_bench.peers.gather.calls import Rules, planned
from penstock_bench.peers.gather.policies import Belady, Policy, RandomAhead, Sieve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.features.sources.source import RowSegment
    from penstock_bench.peers.gather.base import Setting

    _Array = np.ndarray[Any, Any]

LINE_BYTES = 4096
"""The smallest read of all of them: a block of the file system, or of the cache."""


class Emulated(Gatherer):
    """One of them: it says what is read together, and how."""

    name: ClassVar[str]
    queue_depth: ClassVar[int | None] = None
    """Requests in flight of each core; None for as many as its groups have."""
    rereads_written: ClassVar[bool] = False

    def rules(self, setting: Setting) -> Rules:
        """How it asks: for rows, a block of the file at a time."""
        return Rules(
            slots=setting.cache_bytes // setting.row_bytes,
            line_rows=max(1, LINE_BYTES // setting.row_bytes),
            rereads_written=self.rereads_written,
        )

    @abstractmethod
    def policy(self, rules: Rules, batches: Sequence[_Array]) -> Policy:
        """Rows that it keeps."""

    def read(self, lines: _Array, into: _Array) -> None:
        """Reads what a call needs, one request a line, as many at a time as its queue has."""
        if len(lines):
            self._table.gather(lines, into)

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Plans everything, and opens the table as lines."""
        line_bytes = max(LINE_BYTES, setting.row_bytes)
        if line_bytes % setting.row_bytes or line_bytes % LINE_BYTES:
            raise ValueError(
                f"{self.name} is emulated with rows of {LINE_BYTES} bytes, parts or multiples of it"
            )
        rules = self.rules(setting)
        self._calls = list(planned(batches, self.policy(rules, batches), rules))
        self._table = _lines(setting, line_bytes, self.queue_depth)
        lines_max = max(len(call.lines) for call in self._calls)
        memory_bytes = rules.read_at * setting.row_bytes + lines_max * line_bytes
        self._buffers = Buffers(1 << 40)
        memory = self._buffers.empty(memory_bytes // 8, np.int64)
        memory[:] = 0
        self._rows = memory.reshape(-1, setting.words)
        units = len(memory) // (setting.words * rules.unit_rows)
        self._units = memory[: units * setting.words * rules.unit_rows].reshape(units, -1)
        self._read_into = memory[rules.read_at * setting.words :].reshape(-1, line_bytes // 8)
        self._at = 0

    def gather(self, batches: Sequence[_Array]) -> Iterator[_Array]:
        """Call after call: what it needs is read, its batches get their rows, the cache changes."""
        for call in self._calls:
            self.read(call.lines, self._read_into[: len(call.lines)])
            found = [self._taken(where) for where in call.where]
            if len(call.kept_in):
                self._units[call.kept_in] = self._units[self._some(call.kept_from)]
            self._at += 1
            while found:
                yield found.pop(0)

    def _taken(self, where: _Array) -> _Array:
        """Rows in memory that is used again, as theirs is."""
        out: _Array = self._buffers.empty((len(where), self._rows.shape[1]), np.int64)
        # With another mode numpy would copy twice.
        return np.take(self._rows, where, axis=0, out=out, mode="clip")

    def _some(self, kept_from: _Array) -> slice | _Array:
        """A slice where rows are contiguous: indices would copy them twice."""
        first, last = int(kept_from[0]), int(kept_from[-1])
        return slice(first, last + 1) if last - first + 1 == len(kept_from) else kept_from

    def counts(self) -> dict[str, int]:
        """Counters of the calls that were made."""
        made = self._calls[: self._at]
        lines = sum(len(call.lines) for call in made)
        return {
            "requests": self._table.stats().requests,
            "hits": sum(call.hits for call in made),
            "read_rows": lines,
            "asked_bytes": self._table.stats().read_bytes,
        }

    def report(self) -> dict[str, Any]:
        """How it read."""
        stats = self._table.stats()
        self._table.close()
        return {"is_direct": stats.direct, "setup": f"emulated, {stats.engine}"}


class GraphBolt(Emulated):
    """GraphBolt of DGL: `cpu_cached_feature` over its `DiskBasedFeature`.

    Each thread takes ids, sends a request for each, and waits for all of them before it takes more.
    A batch is read when the one before has been. Rows that the batch before has read are still
    being written to the cache, which counts them as misses.
    """

    name = "graphbolt"
    rereads_written = True
    _GROUP = 512
    """Two of 256, sent one after the other and waited for together (`cnumpy.cc`)."""

    def policy(self, rules: Rules, batches: Sequence[_Array]) -> Policy:
        """Its best one."""
        return Sieve(rules.slots)

    def read(self, lines: _Array, into: _Array) -> None:
        """As many groups at a time as there are threads."""
        threads = len(os.sched_getaffinity(0))
        pending: deque[Any] = deque()
        for first in range(0, len(lines), self._GROUP):
            if len(pending) == threads:
                pending.popleft().result()
            some = slice(first, first + self._GROUP)
            pending.append(self._table.gather_async(lines[some], into[some]))
        for one in pending:
            one.result()


class Ginex(Emulated):
    """Ginex (VLDB 2022): batches are sampled ahead, and a cache that knows all of them.

    Rows are read by eight threads a core, each of which waits for its one request.
    """

    name = "ginex"
    queue_depth = 8
    _SUPERBATCH = 1000

    def policy(self, rules: Rules, batches: Sequence[_Array]) -> Policy:
        """Belady within a superbatch."""
        keys = rules.keys(batches)
        stretch = sum(map(len, batches[: self._SUPERBATCH]))
        return Belady(rules.slots, keys, max(1, stretch))


class Gids(Emulated):
    """GIDS (VLDB 2024): lines of 4 KiB, kept at random but for those of the next eight batches.

    A call takes batches until it has enough requests to keep the device busy while it begins and
    ends (the accumulator), sends all at once, and waits for all.
    """

    name = "gids"
    _WINDOW = 8
    _BUSY = 0.95
    _LINES_MIN = 1024
    """Measured in the paper; where nobody knows the device."""

    def rules(self, setting: Setting) -> Rules:
        """Lines; so many a call that the device is busy for most of it, by the paper's formula.

        Requests a second times latency are requests in flight.
        """
        line_bytes = max(LINE_BYTES, setting.row_bytes)
        busy = round(self._BUSY / (1 - self._BUSY) * setting.depth)
        return Rules(
            slots=setting.cache_bytes // line_bytes,
            line_rows=line_bytes // setting.row_bytes,
            keeps_lines=True,
            lines_min=busy or self._LINES_MIN,
        )

    def policy(self, rules: Rules, batches: Sequence[_Array]) -> Policy:
        """A ticket that goes at random, with a window."""
        keys = rules.keys(batches)
        return RandomAhead(rules.slots, keys, window=self._WINDOW * len(keys) // len(batches))


def _lines(setting: Setting, line_bytes: int, queue_depth: int | None) -> Features:
    """The table as lines, each of which is a request."""
    source = find(setting.table, KEY, check=False, stacklevel=1)
    rows = setting.row_bytes * setting.rows // line_bytes

    def segment(one: RowSegment) -> RowSegment:
        first = one.first_row * setting.row_bytes // line_bytes
        return dataclasses.replace(
            one, first_row=first, rows=one.rows * setting.row_bytes // line_bytes
        )

    lines = dataclasses.replace(
        source,
        row_shape=(line_bytes // 8,),
        row_bytes=line_bytes,
        rows=rows,
        segments=tuple(map(segment, source.segments)),
        checks=None,
    )
    workers = len(os.sched_getaffinity(0))
    io = TensorIO(io_threads=workers, queue_depth=queue_depth or 512)
    return Features(lines, gap_bytes=0, run_bytes_max=line_bytes, io=io)
