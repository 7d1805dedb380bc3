"""Measurements, in the one form that all tables, plots and comparisons are made from."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import PenstockError
from penstock_bench.results.documents import checked
from penstock_bench.results.spread import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

FORMAT = "penstock-bench"
FORMAT_VERSION = 1

_SECONDS_MIN = 1e-9
"""The least time of a measurement."""


class ResultsError(PenstockError, ValueError):
    """A file holds no results of a benchmark."""


class UnlikeError(ResultsError):
    """Runs that measured different things are taken for the same."""


_DECISIVE = {
    "io": ("size_bytes", "verify"),
    "checkpoint": ("model", "ranks", "syncs", "fill", "fill_bytes"),
    "gather": ("law", "recurring", "limit_bytes"),
}
"""Settings that a label does not tell and rates depend on."""

_MACHINE = ("processor", "cores_usable", "memory_bytes", "kernel", "environment")
_DISK = ("device", "file_system", "mount_options")


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One case, once.

    Attributes:
        case: What was done, in words.
        by: Who did it: ``"penstock"``, ``"fio"``, a library.
        round_index: The round, from 0.
        nbytes: Bytes moved.
        requests: Requests completed.
        seconds: From the first request to the last completion of the slowest process.
        sync_seconds: Until everything was synced, after that.
        open_seconds: To make, allocate or open the files, before that.
        cpu_seconds: Processor time of all processes.
        latency_us: Microseconds of a request, by percentile.
        timeline_bytes: Bytes completed in each tenth of a second.
        metadata: How often files were made, opened, allocated, cut, synced.
        is_direct: Whether the page cache was passed by.
        setup: How requests reached the kernel.
        path: Of cases with a GPU, the way that each byte took, by its name (`gpu_paths`).
        notes: What is not as it was asked for.
        rate_spread: GB/s of each process by itself.
        checked: Requests, or of checkpoints tensors, whose content was checked.
        stall_seconds: Of a save in the background, what training waited for.
        synced_by: Who made what was written durable.
        resident_fraction: Of checkpoints, the part of the files in the page cache: after the write,
            or before the read.
        token_seconds: Of generated text, the median pass behind the first, for each of its tokens.
        first_token_seconds: From the call to the first token.
        pass_tokens: Tokens of each pass behind the first, on average; of the first if it is the
            only one.
        pass_bytes: What each pass through the model reads, where that is known.
        routed_bytes: Of what was read, or was in memory, the experts that routers chose.
        written_bytes: What the process wrote to storage, from its beginning.
        memory_peak_bytes: The most memory that was resident.
        memory_over_bytes: Of it, what is not the interpreter and its libraries.
        budget_bytes: What of it was given for weights.
        rows: Of tables, rows that were asked for.
        hits: Of them, those that were in memory or on their way.
        read_bytes: What storage gave, as the kernel counts it.
        error: Why there is nothing, if so.
    """

    case: str
    by: str
    round_index: int
    nbytes: int = 0
    requests: int = 0
    seconds: float = 0.0
    sync_seconds: float = 0.0
    open_seconds: float = 0.0
    cpu_seconds: float = 0.0
    latency_us: dict[str, float] = field(default_factory=dict)
    timeline_bytes: list[int] = field(default_factory=list)
    metadata: dict[str, int] = field(default_factory=dict)
    is_direct: bool = False
    setup: str = ""
    path: str = ""
    notes: list[str] = field(default_factory=list)
    rate_spread: list[float] = field(default_factory=list)
    checked: int = 0
    stall_seconds: float | None = None
    synced_by: str = ""
    resident_fraction: float | None = None
    token_seconds: float | None = None
    first_token_seconds: float | None = None
    pass_tokens: float | None = None
    pass_bytes: int | None = None
    routed_bytes: int | None = None
    written_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_over_bytes: int | None = None
    budget_bytes: int | None = None
    rows: int | None = None
    hits: int | None = None
    read_bytes: int | None = None
    error: str | None = None

    @property
    def gb_per_second(self) -> float:
        """The rate without the sync."""
        return self.nbytes / self.seconds / 1e9

    @property
    def durable_gb_per_second(self) -> float:
        """The rate with the sync."""
        return self.nbytes / (self.seconds + self.sync_seconds) / 1e9

    @property
    def waited_seconds(self) -> float:
        """Seconds that training waits for a save: the stall, or all of a synchronous save."""
        if self.stall_seconds is not None:
            return self.stall_seconds
        return self.seconds + self.sync_seconds

    @property
    def requests_per_second(self) -> float:
        """IOPS, of what was written with the sync."""
        return self.requests / (self.seconds + self.sync_seconds)

    @property
    def cpu_seconds_per_gib(self) -> float:
        """Processor time."""
        return self.cpu_seconds / self.nbytes * (1 << 30)


class Rates(NamedTuple):
    """Rates of several measurements, GB/s with the sync.

    MLPerf Storage publishes the mean, which flatters whoever is fast now and then.
    """

    median: float
    mean_of_rates: float
    least: float
    most: float


@dataclass(slots=True, kw_only=True)
class Results:
    """A run.

    Attributes:
        kind: ``"io"``, ``"tune"``, ``"checkpoint"``, ``"stream"`` or ``"gather"``.
        machine: What the figures belong to.
        disk: And where the files were.
        settings: What was asked for.
        cases: Settings of each case, by its label.
        measurements: Everything that was measured, in order.
        created: When, RFC 3339.
    """

    kind: str
    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def of(self, case: str, by: str) -> list[Measurement]:
        """The measurements of a case that have a result."""
        return [
            one for one in self.measurements if (one.case, one.by) == (case, by) and not one.error
        ]

    def spread(self, case: str, by: str, value: Callable[[Measurement], float]) -> Spread | None:
        """The statistics of a case; None where there is no result."""
        return spread(value(one) for one in self.of(case, by))

    def rates(self, case: str, by: str) -> Rates | None:
        """The rates of a case; None if there is no measurement."""
        found = self.of(case, by)
        if not found:
            return None
        rates = [one.durable_gb_per_second for one in found]
        return Rates(float(np.median(rates)), float(np.mean(rates)), min(rates), max(rates))

    def summary(self) -> list[dict[str, Any]]:
        """The rates of each case and of each who was measured with it."""
        pairs = dict.fromkeys((one.case, one.by) for one in self.measurements)
        return [
            {
                "case": case,
                "by": by,
                "measurements": len(self.of(case, by)),
                "gb_per_second": rates.median,
                "mlperf_mean_gb_per_second": rates.mean_of_rates,
                "least_gb_per_second": rates.least,
                "most_gb_per_second": rates.most,
            }
            for case, by in pairs
            if (rates := self.rates(case, by)) is not None
        ]

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON, with the summary that follows from it."""
        document = {"format": FORMAT, "version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return {**document, "summary": self.summary()}

    def write(self, path: Path) -> None:
        """Writes it down."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads the results that `write` has written.

        Args:
            path: A file, or a directory of such files with the extension ``.json``: their
                measurements together, round after round in the order of their names, under the
                machine and settings of the first, with the names as ``settings["files"]``.

        Raises:
            ResultsError: The file holds something else, or the directory has no such file.
            UnlikeError: The files of the directory measured different things, or elsewhere.
            OSError: It cannot be read.
        """
        if path.is_dir():
            return cls._pooled(path)
        text = path.read_bytes()
        try:
            return cls._of(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{path} holds no results of penstock bench: {error}") from error

    @classmethod
    def _of(cls, document: Any) -> Results:
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        version = document.pop("version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"its version is {version!r}, and {FORMAT_VERSION} is known")
        found = checked(cls, document)
        measured = found.pop("measurements", ())
        measurements = [Measurement(**checked(Measurement, one)) for one in measured]
        for one in measurements:
            if not one.error and one.seconds < _SECONDS_MIN:
                raise ValueError(f"{one.case}, {one.by}: neither seconds nor an error")
        return cls(**found, measurements=measurements)

    @classmethod
    def _pooled(cls, directory: Path) -> Results:
        paths = sorted(directory.glob("*.json"))
        if not paths:
            raise ResultsError(f"{directory} holds no file of results, *.json")
        pooled, *others = (cls.read(path) for path in paths)
        for path, one in zip(paths[1:], others, strict=True):
            if unlike := [
                *differences(pooled, one),
                *circumstances(pooled, one),
            ]:
                raise UnlikeError(
                    f"{paths[0]} and {path} are no rounds of the same: {'; '.join(unlike)}"
                )
            rounds = 1 + max((each.round_index for each in pooled.measurements), default=-1)
            for each in one.measurements:
                each.round_index += rounds
            pooled.cases |= one.cases
            pooled.measurements += one.measurements
        pooled.settings["files"] = [path.name for path in paths]
        return pooled


def differences(one: Results, other: Results) -> list[str]:
    """Lists differences that make the rates of two runs incomparable; empty if there are none.

    A setting that only one of them knows is one of another release, which had no such choice.
    """
    if one.kind != other.kind:
        return [f"kind: {one.kind} and {other.kind}"]
    found = list(_unequal(one.settings, other.settings, _DECISIVE.get(one.kind, ())))
    for label in one.cases:
        if label in other.cases:
            settings = one.cases[label], other.cases[label]
            common = [name for name in settings[0] if name in settings[1]]
            found += _unequal(*settings, common, f"{label}: ")
    return found


def circumstances(one: Results, other: Results) -> list[str]:
    """Lists differences of machine, disk and path, which may explain different rates."""
    paths = _is_direct(one), _is_direct(other)
    common = [pair for pair in paths[0] if pair in paths[1]]
    return [
        *_unequal(one.machine, other.machine, _MACHINE),
        *_unequal(one.disk, other.disk, _DISK),
        *(
            f"{case}, {by}: {_path(paths[0][case, by])} and {_path(paths[1][case, by])}"
            for case, by in common
            if paths[0][case, by] != paths[1][case, by]
        ),
    ]


def _is_direct(results: Results) -> dict[tuple[str, str], bool]:
    """Whether all measurements of each case went past the page cache."""
    found: dict[tuple[str, str], bool] = {}
    for one in results.measurements:
        if not one.error:
            pair = one.case, one.by
            found[pair] = found.get(pair, True) and one.is_direct
    return found


def _path(is_direct: bool) -> str:
    return "past the page cache" if is_direct else "through the page cache"


def _unequal(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str], place: str = ""
) -> Iterator[str]:
    for name in names:
        first, second = one.get(name), other.get(name)
        if isinstance(first, dict) and isinstance(second, dict):
            every = dict.fromkeys((*first, *second))
            yield from _unequal(first, second, every, f"{place}{name}.")
        elif first != second:
            yield f"{place}{name}: {first} and {second}"


BEYOND_MIN = 10
"""Requests that have to lie beyond a percentile: of fewer the next round has another one."""

_ALWAYS = ("mean", "p50", "max")
"""Percentiles that any number of requests supports."""


def percent(name: str) -> float:
    """The number of a percentile by its name; ``"max"`` is 100."""
    try:
        return float(name.removeprefix("p"))
    except ValueError:
        return 100.0


def supported(one: Measurement) -> dict[str, float]:
    """Microseconds of a request, by those percentiles that the number of requests supports."""
    return {
        name: value
        for name, value in one.latency_us.items()
        if name in _ALWAYS or round(one.requests * (100 - percent(name)), 6) >= 100 * BEYOND_MIN
    }


def latencies(results: Results, case: str, by: str) -> dict[str, float]:
    """The median of each percentile over the rounds; those that all rounds have and support."""
    measured = [supported(one) for one in results.of(case, by)]
    names = [name for name in (measured[0] if measured else {}) if all(name in m for m in measured)]
    return {name: float(np.median([one[name] for one in measured])) for name in names}
