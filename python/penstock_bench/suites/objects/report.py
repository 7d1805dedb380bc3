"""The tables of what saves to buckets and loads from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock_bench.suites.objects.contenders import CONTENDERS, LOAD, PENSTOCK, SAVE
from penstock_bench.suites.objects.results import LOCAL, PARTIAL, PLACES, PROXIED, SMALL, STORES
from penstock_bench.suites.save_load.report import describe, with_range

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock_bench.suites.objects.results import Results
    from penstock_bench.suites.save_load.results import Spread

# What the proxy has to carry beyond its limits, or it would be one itself.
_HEADROOM = 1.1

_RATE_FORM = ".3f"


def render(results: Results) -> RenderableType:
    """Everything that a run shows."""
    parts: list[RenderableType] = [Text("\n".join(_heading(results)))]
    for place in PLACES:
        if any(one.place == place for one in results.samples):
            parts += [Text(), _table(results, place)]
    parts += [Text(f"  FAILED: {error}", style="bold red") for error in results.errors()]
    parts += [Text(f"  {line}") for line in _settings(results)]
    parts += [Text(f"  {line}") for line in (*_completing(results), *_stores(results))]
    parts += [Text(f"  {line}", style="yellow") for line in _doubts(results)]
    return Group(*parts, Text(), _bars(results))


def _heading(results: Results) -> list[str]:
    settings = results.settings
    limits = settings["limits"]
    return [
        *describe(results.machine, results.disk),
        f"{settings['size_bytes'] / 1e9:.2f} GB in {settings['tensors']} tensors, "
        f"{settings['rounds']} interleaved rounds, median [least, most]; "
        f"server (and proxy) on processors {settings['server_cores']}, clients on "
        f"{settings['client_cores']}",
        f"server: {settings['server']}",
        f"limits of the proxy: {limits['up']:g} MB/s up and {limits['down']:g} MB/s down a "
        f"connection, {limits['up_in_all']:g} and {limits['down_in_all']:g} in all, "
        f"{limits['latency_seconds'] * 1e3:g} ms before an answer",
    ]


def _table(results: Results, place: str) -> Table:
    table = Table("", title=PLACES[place], title_justify="left", title_style="bold")
    speed = ("ms", "milliseconds") if place == SMALL else ("GB/s", "gb_per_second")
    cells = [
        (operation, *cell)
        for cell in (
            (*speed, ".0f" if place == SMALL else _RATE_FORM),
            ("CPU s/GB", "cpu_seconds_per_gb", ".2f"),
            ("server's", "server_cpu_seconds_per_gb", ".2f"),
            ("extra MiB", "extra_mib", ".0f"),
            ("requests", "requests_in_all", ".0f"),
        )
        for operation in (SAVE, LOAD)
    ]
    for operation, unit, _, _ in cells:
        table.add_column(f"{operation}\n{unit}", justify="right")
    for row in CONTENDERS:
        found = [results.spread(place, row, one, what) for one, _, what, _ in cells]
        if any(found):
            forms = [form for _, _, _, form in cells]
            shown = [_shown(one, form) for one, form in zip(found, forms, strict=True)]
            table.add_row(row, *shown, style="bold" if row == PENSTOCK else "")
    return table


def _shown(found: Spread | None, form: str) -> str:
    """Rates with their range; `objects.json` has it of the others."""
    if found is None:
        return "-"
    return with_range(found, form) if form == _RATE_FORM else f"{found.median:{form}}"


def _settings(results: Results) -> list[str]:
    return [
        f"{row}, {operation}: "
        + (", ".join(f"{name} {value}" for name, value in setting.items()) or "defaults")
        for row, found in results.best.items()
        for operation, setting in found.items()
    ]


def _completing(results: Results) -> list[str]:
    """How long the server copies parts at the end of a save: S3 does not."""
    found = {
        (place, row): results.spread(place, row, SAVE, "completing_seconds")
        for place in PLACES
        for row in CONTENDERS
    }
    return [
        f"{place}, {row}: completing uploads takes the server {spread.median:.2f} s of a save"
        for (place, row), spread in found.items()
        if spread and place != SMALL
    ]


def _stores(results: Results) -> list[str]:
    found = {place: results.spread(place, PENSTOCK, SAVE, "seconds") for place in STORES}
    lines = []
    for place, spread in found.items():
        ratio = results.store_ratio(place)
        if spread and ratio:
            line = f"a save returns after {with_range(spread, '.2f')} s {STORES[place]}"
            lines.append(line + f": {with_range(ratio, '.3f')} times" * (place != LOCAL))
    return lines


def _doubts(results: Results) -> list[str]:
    doubts = []
    limits = results.settings["limits"]
    for operation, name in ((SAVE, "up_in_all"), (LOAD, "down_in_all")):
        most = results.spread(PROXIED, PENSTOCK, operation, "gb_per_second")
        if most and most.median * 1e3 < _HEADROOM * limits[name]:
            doubts.append(
                f"THE PROXY IS A LIMIT ITSELF: without limits a {operation} goes at "
                f"{most.median * 1e3:.0f} MB/s through it, and the limit is {limits[name]:g}"
            )
    for one in results.samples:
        if one.operation == PARTIAL and not one.error:
            doubts.append(
                f"a partial load asked for {one.nbytes:,} bytes in {one.runs} runs, and "
                f"{one.traffic['down']:,} were fetched"
            )
            break
    return doubts


def _bars(results: Results) -> Table:
    caption = "Ratios within a round, then their median."
    if not results.is_official:
        caption += " Not judged: the bars are for a state of 1 GiB or more."
    table = Table("", title="Bars", title_justify="left", title_style="bold", caption=caption)
    for heading in ("median [least, most]", "bar", ""):
        table.add_column(heading, justify="right")
    for one in results.bars():
        is_met = one.is_met if results.is_official else None
        table.add_row(
            one.title,
            with_range(one.found, ".3f") if one.found else "not measured",
            f"{'<=' if one.is_ceiling else '>='} {one.bar:g}",
            {None: "", True: "met", False: "MISSED"}[is_met],
            style={None: "", True: "green", False: "bold red"}[is_met],
        )
    return table
