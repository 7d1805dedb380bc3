"""The figures of checkpoints in buckets, their ratios and bars, and the tables of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.harness import tables
from penstock_bench.harness.tables import Bar
from penstock_bench.results.samples import Sample, Samples, quotient
from penstock_bench.results.spread import Spread, plain, spread
from penstock_bench.suites.objects.contenders import (
    CONNECTOR,
    CONTENDERS,
    FSSPEC,
    LOAD,
    LOCAL,
    MIRRORED,
    PENSTOCK,
    SAVE,
    STORES,
    STREAMER,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

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

PARTIAL = "partial"
"""A load of some tensors."""

STAGING_BYTES = 256 * MIB
"""Memory that a save stages in by default (`penstock.Options`)."""

_EXTRA_MIB_MAX = STAGING_BYTES // MIB + 64
_OFFICIAL_BYTES = 1 << 30
_PROXY_HEADROOM = 1.1
"""How much more than its limits the proxy has to carry, or it would be a limit itself."""
_RATE, _CPU, _RATE_FORM = "gb_per_second", "cpu_seconds_per_gb", ".3f"


@dataclass
class Transfer(Sample):
    """A save or a load of one contender in one round.

    The time of a save ends when the checkpoint is complete at the server, that of a load when all
    tensors are in memory; in `STORES` it is the median time of the call.

    Attributes:
        place: A name of `PLACES` or `STORES`.
        server_cpu_seconds: Processor time of the server, for that and for the warm-up.
        extra_bytes: Peak of the resident set beyond the state itself.
        requests: How many requests of each kind the server answered.
        completing_seconds: Time in which the server put parts together to objects, which copies
            them where the file system has no shared blocks; the sum where it did several at once.
        traffic: Bytes up and down and connections, where a proxy counts them; those of a warm-up
            with a megabyte are among them, but not with `PARTIAL`.
        runs: Of a partial load, how many contiguous ranges of the files hold the wanted tensors.
    """

    place: str = ""
    server_cpu_seconds: float = 0.0
    extra_bytes: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    completing_seconds: float = 0.0
    traffic: dict[str, int] = field(default_factory=dict)
    runs: int = 0

    @property
    def milliseconds(self) -> float:
        """Wall time."""
        return self.seconds * 1e3

    @property
    def server_cpu_seconds_per_gb(self) -> float:
        """Processor time of the server for each GB: it decides where the server is the limit."""
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
        """Bytes fetched, over what a partial load may fetch: 5 % more, and 1 MiB a range."""
        return self.traffic["down"] / (1.05 * self.nbytes + self.runs * MIB)


def is_official(results: Samples[Transfer]) -> bool:
    """Whether the run is large enough to be judged."""
    size_bytes: int = results.settings["size_bytes"]
    return size_bytes >= _OFFICIAL_BYTES


def bars(results: Samples[Transfer]) -> list[Bar]:
    """The project's bars."""

    def over(operation: str, other: str, figure: str = _RATE) -> Spread | None:
        return results.ratio(PENSTOCK, other, figure=figure, place=MEMORY, operation=operation)

    found = [
        Bar("save / s3torchconnector", over(SAVE, CONNECTOR), 1.5),
        Bar("save / DCP over s3fs", over(SAVE, FSSPEC), 3),
        Bar("verified load / Run:ai's streamer", over(LOAD, STREAMER), 1.3),
        Bar("verified load / s3torchconnector", over(LOAD, CONNECTOR), 1.3),
    ]
    for operation in (SAVE, LOAD):
        title = f"CPU seconds per GB, {operation} / s3torchconnector"
        found.append(Bar(title, over(operation, CONNECTOR, _CPU), 0.6, is_ceiling=True))
    for operation in (SAVE, LOAD):
        limit = results.settings["limits"]["up_in_all" if operation == SAVE else "down_in_all"]
        rates = results.values(PENSTOCK, _RATE, place=PACED, operation=operation).values()
        share = spread(rate * 1e3 / limit for rate in rates)
        found.append(Bar(f"paced {operation}, share of the limit", share, 0.9))
    for operation in (SAVE, LOAD):
        title = f"MiB beyond the state, {operation} of any size"
        each = [
            results.spread(PENSTOCK, "extra_mib", place=place, operation=operation)
            for place in (MEMORY, LARGE)
        ]
        most = max((one for one in each if one), default=None)
        found.append(Bar(title, most, _EXTRA_MIB_MAX, is_ceiling=True))
    title = "bytes of a partial load / 1.05 of what is wanted and 1 MiB a run"
    part = results.spread(PENSTOCK, "fetched_ratio", place=PROXIED, operation=PARTIAL)
    found.append(Bar(title, part, 1, is_ceiling=True))
    title = "time of a mirrored save / of one without a mirror"
    return [*found, Bar(title, store_ratio(results, MIRRORED), 1.05, is_ceiling=True)]


def store_ratio(results: Samples[Transfer], place: str) -> Spread | None:
    """How many times as long a save into a store takes as into one without a mirror."""
    return quotient(
        *(results.values(PENSTOCK, place=one, operation=SAVE) for one in (place, LOCAL))
    )


def derived(results: Samples[Transfer]) -> dict[str, Any]:
    """Statistics for the file of results."""
    cells = dict.fromkeys((one.place, one.row, one.operation) for one in results.samples)
    figures = (_RATE, _CPU, "server_cpu_seconds_per_gb", "extra_mib")
    summary = [
        {
            "place": place,
            "row": row,
            "operation": operation,
            **{
                figure: plain(results.spread(row, figure, place=place, operation=operation))
                for figure in figures
            },
        }
        for place, row, operation in cells
    ]
    is_judged = is_official(results)
    return {"summary": summary, "bars": [one.as_json(is_judged=is_judged) for one in bars(results)]}


def page(results: Samples[Transfer]) -> Group:
    """Everything that a run shows."""
    parts: list[Any] = []
    for place in PLACES:
        if any(one.place == place for one in results.samples):
            parts += [_table(results, place), ""]
    parts += tables.notes(errors(results), _settings(results))
    parts += [f"  {line}" for line in (*_completing(results), *_stores(results))]
    parts += [f"  {line}" for line in _doubts(results)]
    unofficial = None if is_official(results) else "the bars are for a state of 1 GiB or more"
    return tables.page(
        results, *parts, "", tables.bars(bars(results), unofficial), lines=_heading(results)
    )


def errors(results: Samples[Transfer]) -> list[str]:
    """Why measurements are missing, each reason once."""
    failed = [one for one in results.samples if one.error]
    found = [f"{one.place}, {one.row}, {one.operation}: {one.error}" for one in failed]
    return list(dict.fromkeys(found))


def _heading(results: Samples[Transfer]) -> list[str]:
    settings = results.settings
    limits = settings["limits"]
    return [
        f"{settings['size_bytes'] / 1e9:.2f} GB in {settings['tensors']} tensors, "
        f"{settings['rounds']} interleaved rounds, median [least, most]; "
        f"server (and proxy) on processors {settings['server_cores']}, clients on "
        f"{settings['client_cores']}",
        f"server: {settings['server']}",
        f"limits of the proxy: {limits['up']:g} MB/s up and {limits['down']:g} MB/s down a "
        f"connection, {limits['up_in_all']:g} and {limits['down_in_all']:g} in all, "
        f"{limits['latency_seconds'] * 1e3:g} ms before an answer",
    ]


def _table(results: Samples[Transfer], place: str) -> Table:
    is_small = place == SMALL
    columns = [
        (operation, *column)
        for column in (
            ("ms", "milliseconds", ".0f") if is_small else ("GB/s", _RATE, _RATE_FORM),
            ("CPU s/GB", _CPU, ".2f"),
            ("server's", "server_cpu_seconds_per_gb", ".2f"),
            ("extra MiB", "extra_mib", ".0f"),
            ("requests", "requests_in_all", ".0f"),
        )
        for operation in (SAVE, LOAD)
    ]

    def shown(row: str, operation: str, figure: str, form: str) -> str:
        """Rates with their range; the file of results has that of the others."""
        found = results.spread(row, figure, place=place, operation=operation)
        if found is None:
            return "-"
        return found.with_range(form) if form == _RATE_FORM else f"{found.median:{form}}"

    return tables.figures(
        PLACES[place],
        [f"{operation}\n{unit}" for operation, unit, *_ in columns],
        {
            row: [shown(row, operation, *column) for operation, _, *column in columns]
            for row in CONTENDERS
            if results.good(row, place=place)
        },
        bold=PENSTOCK,
    )


def _settings(results: Samples[Transfer]) -> dict[str, str]:
    return {
        f"{row}, {operation}": ", ".join(f"{name} {value}" for name, value in setting.items())
        or "defaults"
        for row, found in results.extra["best"].items()
        for operation, setting in found.items()
    }


def _completing(results: Samples[Transfer]) -> list[str]:
    """How long the server copies parts at the end of a save, which S3 does not."""
    return [
        f"{place}, {row}: completing uploads takes the server {found.median:.2f} s of a save"
        for place in PLACES
        for row in CONTENDERS
        if place != SMALL
        and (found := results.spread(row, "completing_seconds", place=place, operation=SAVE))
    ]


def _stores(results: Samples[Transfer]) -> list[str]:
    lines = []
    for place, words in STORES.items():
        found = results.spread(PENSTOCK, place=place, operation=SAVE)
        ratio = store_ratio(results, place)
        if found and ratio:
            line = f"a save returns after {found.with_range('.2f')} s {words}"
            lines.append(line + f": {ratio.with_range('.3f')} times" * (place != LOCAL))
    return lines


def _doubts(results: Samples[Transfer]) -> list[str]:
    doubts = []
    limits = results.settings["limits"]
    for operation, name in ((SAVE, "up_in_all"), (LOAD, "down_in_all")):
        most = results.spread(PENSTOCK, _RATE, place=PROXIED, operation=operation)
        if most and most.median * 1e3 < _PROXY_HEADROOM * limits[name]:
            doubts.append(
                f"THE PROXY IS A LIMIT ITSELF: without limits a {operation} goes at "
                f"{most.median * 1e3:.0f} MB/s through it, and the limit is {limits[name]:g}"
            )
    partial = results.good(PENSTOCK, operation=PARTIAL)[:1]
    return doubts + [
        f"a partial load asked for {one.nbytes:,} bytes in {one.runs} runs, and "
        f"{one.traffic['down']:,} were fetched"
        for one in partial
    ]
