"""What was measured of checkpoints in buckets, the ratios that come of it, and the bars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.objects.contenders import (
    CONNECTOR,
    FSSPEC,
    LOAD,
    PENSTOCK,
    SAVE,
    STREAMER,
)
from penstock_bench.suites.save_load.results import Spread, plain, spread, write

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20

MEMORY, DISK, LARGE = "memory", "disk", "large"
PROXIED, PACED, SMALL = "proxied", "paced", "small"
PLACES = {
    MEMORY: "a server whose objects are in memory (tmpfs)",
    DISK: "a server whose objects are on the disk",
    PROXIED: "the server in memory, through the proxy without limits: the most that it carries",
    PACED: "the server in memory, through the proxy with its limits",
    SMALL: "the same with a megabyte: what round trips cost",
    LARGE: "the server in memory, a larger state, once",
}
LOCAL, MIRRORED, COPYING = "local", "mirrored", "copying"
STORES = {
    LOCAL: "in a store on the disk",
    MIRRORED: "in one with a mirror at the server in memory",
    COPYING: "in that one while it copies the step before",
}

PARTIAL = "partial"
"""A load of some tensors."""

STAGING_BYTES = 256 * MIB
"""What a save stages in where nothing else is asked for (`penstock.Options`)."""

_EXTRA_MIB_MAX = STAGING_BYTES // MIB + 64
_OFFICIAL_BYTES = 1 << 30


@dataclass
class Sample:
    """One operation of one contender in one round.

    Attributes:
        place: A name of `PLACES` or `STORES`.
        row: The contender.
        operation: `SAVE`, `LOAD` or `PARTIAL`.
        round_index: The round, from 0.
        nbytes: Bytes of tensors that were asked for.
        seconds: Of a save until the checkpoint is complete at the server; of a load until all
            tensors are in memory. In `STORES` until the call returns, the median of some.
        cpu_seconds: Of the process, its threads and children.
        server_cpu_seconds: Of the server, for that and for the warm-up.
        extra_bytes: Peak of the resident set beyond the state itself.
        requests: How many of which kind the server answered.
        completing_seconds: For how long it put parts together to objects, which copies them where
            the file system has no blocks that are shared; of several at a time, all of it.
        traffic: Bytes up and down and connections, where a proxy counts them; those of a warm-up
            with a megabyte are among them, but not with `PARTIAL`.
        runs: Of a partial load, how many stretches of the files have what is wanted.
        error: Why there is no measurement.
    """

    place: str
    row: str
    operation: str
    round_index: int
    nbytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    extra_bytes: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    completing_seconds: float = 0.0
    traffic: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    error: str | None = None

    @property
    def gb_per_second(self) -> float:
        """The rate."""
        return self.nbytes / self.seconds / 1e9

    @property
    def milliseconds(self) -> float:
        """The time."""
        return self.seconds * 1e3

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Processor time."""
        return self.cpu_seconds / self.nbytes * 1e9

    @property
    def server_cpu_seconds_per_gb(self) -> float:
        """Processor time of the server: where it is the limit, that decides."""
        return self.server_cpu_seconds / self.nbytes * 1e9

    @property
    def extra_mib(self) -> float:
        """Memory beyond the state."""
        return self.extra_bytes / MIB

    @property
    def requests_in_all(self) -> int:
        """Requests of every kind."""
        return sum(self.requests.values())

    @property
    def fetched_ratio(self) -> float:
        """Bytes fetched, over what a partial load may fetch: 5 % more, and 1 MiB a run."""
        return self.traffic["down"] / (1.05 * self.nbytes + self.runs * MIB)


@dataclass(frozen=True)
class Bar:
    """What has to be reached, and what was."""

    title: str
    found: Spread | None
    bar: float
    is_ceiling: bool = False

    @property
    def is_met(self) -> bool | None:
        """Whether it was; None if it was not measured."""
        if self.found is None:
            return None
        median = self.found.median
        return median <= self.bar if self.is_ceiling else median >= self.bar


@dataclass
class Results:
    """A whole run.

    Attributes:
        best: The setting of each contender and operation that was fastest in the sweep.
        sweep: All that was tried: contender, operation, setting, seconds, why not.
    """

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    best: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    sweep: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_official(self) -> bool:
        """Whether the run is large enough to be judged."""
        size_bytes: int = self.settings["size_bytes"]
        return size_bytes >= _OFFICIAL_BYTES

    def spread(self, place: str, row: str, operation: str, what: str) -> Spread | None:
        """A cell of the table."""
        return spread(list(self._values(place, row, operation, what).values()))

    def ratio(
        self, operation: str, upper: str, lower: str, what: str = "gb_per_second"
    ) -> Spread | None:
        """How many times one is the other in memory, within a round."""
        above, below = (self._values(MEMORY, row, operation, what) for row in (upper, lower))
        return spread([above[index] / below[index] for index in above if index in below])

    def bars(self) -> list[Bar]:
        """The project's bars."""
        cpu = "cpu_seconds_per_gb"
        return [
            Bar("save / s3torchconnector", self.ratio(SAVE, PENSTOCK, CONNECTOR), 1.5),
            Bar("save / DCP over s3fs", self.ratio(SAVE, PENSTOCK, FSSPEC), 3),
            Bar("verified load / Run:ai's streamer", self.ratio(LOAD, PENSTOCK, STREAMER), 1.3),
            Bar("verified load / s3torchconnector", self.ratio(LOAD, PENSTOCK, CONNECTOR), 1.3),
            *(
                Bar(
                    f"CPU seconds per GB, {operation} / s3torchconnector",
                    self.ratio(operation, PENSTOCK, CONNECTOR, cpu),
                    0.6,
                    is_ceiling=True,
                )
                for operation in (SAVE, LOAD)
            ),
            *(
                Bar(f"paced {operation}, share of the limit", self._share(operation), 0.9)
                for operation in (SAVE, LOAD)
            ),
            *(
                Bar(
                    f"MiB beyond the state, {operation} of any size",
                    self._extra_mib(operation),
                    _EXTRA_MIB_MAX,
                    is_ceiling=True,
                )
                for operation in (SAVE, LOAD)
            ),
            Bar(
                "bytes of a partial load / 1.05 of what is wanted and 1 MiB a run",
                self.spread(PROXIED, PENSTOCK, PARTIAL, "fetched_ratio"),
                1,
                is_ceiling=True,
            ),
            Bar(
                "time of a mirrored save / of one without a mirror",
                self.store_ratio(MIRRORED),
                1.05,
                is_ceiling=True,
            ),
        ]

    def store_ratio(self, place: str) -> Spread | None:
        """How many times as long a save into a store takes as into one without a mirror."""
        with_it, without = (self._values(one, PENSTOCK, SAVE, "seconds") for one in (place, LOCAL))
        return spread([with_it[index] / without[index] for index in with_it if index in without])

    def errors(self) -> list[str]:
        """Why measurements are missing, each reason once."""
        found = [
            f"{one.place}, {one.row}, {one.operation}: {one.error}"
            for one in self.samples
            if one.error
        ]
        return list(dict.fromkeys(found))

    def write(self, path: Path) -> None:
        """Everything as JSON, with the statistics beside the samples they come from."""
        cells = list(dict.fromkeys((one.place, one.row, one.operation) for one in self.samples))
        summary = [
            {
                "place": place,
                "row": row,
                "operation": operation,
                **{
                    what: plain(self.spread(place, row, operation, what))
                    for what in (
                        "gb_per_second",
                        "cpu_seconds_per_gb",
                        "server_cpu_seconds_per_gb",
                        "extra_mib",
                    )
                },
            }
            for place, row, operation in cells
        ]
        bars = [
            {
                "title": one.title,
                "found": plain(one.found),
                "bar": one.bar,
                "is_met": one.is_met if self.is_official else None,
            }
            for one in self.bars()
        ]
        write(path, self, summary=summary, bars=bars)

    def _share(self, operation: str) -> Spread | None:
        limit = self.settings["limits"]["up_in_all" if operation == SAVE else "down_in_all"]
        rates = self._values(PACED, PENSTOCK, operation, "gb_per_second").values()
        return spread([rate * 1e3 / limit for rate in rates])

    def _extra_mib(self, operation: str) -> Spread | None:
        """Of the state of the comparison and of the large one: whichever needs more."""
        found = [self.spread(place, PENSTOCK, operation, "extra_mib") for place in (MEMORY, LARGE)]
        return max((one for one in found if one), default=None)

    def _values(self, place: str, row: str, operation: str, what: str) -> dict[int, float]:
        return {
            one.round_index: getattr(one, what)
            for one in self.samples
            if one.error is None and (one.place, one.row, one.operation) == (place, row, operation)
        }
