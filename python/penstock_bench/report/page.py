"""The page: what its template is given."""

from __future__ import annotations

import itertools
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.filters import do_filesizeformat

from penstock.common.page import template
from penstock_bench.report.drawn import drawn
from penstock_bench.report.headline import NOTE, headlines
from penstock_bench.report.lines import all_cases, measurers
from penstock_bench.report.tables import remarks, row_tables, tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock_bench.results.results import Results


def page(runs: list[Results]) -> str:
    """The page that shows these runs."""
    # Identifiers are those of one page.
    names = (f"plot-{number}" for number in itertools.count(1))
    shown = [_shown(results, names) for results in runs]
    return template(Path(__file__).parent, "page.html.j2").render(runs=shown)


def _shown(results: Results, names: Iterator[str]) -> dict[str, Any]:
    command = results.machine.get("command")
    told = headlines(results)
    facts = {name: value for name, value in results.machine.items() if name != "command"}
    return {
        "kind": results.kind,
        "directory": results.disk.get("directory"),
        "created": _time(results.created),
        "command": shlex.join(["penstock", *map(str, command[1:])])
        if isinstance(command, list)
        else "",
        "cases": len(all_cases(results)),
        "rounds": len({one.round_index for one in results.measurements}),
        "names": _names(results),
        "headlines": told,
        "headline_note": NOTE if any("[" in one for one in told) else "",
        "remarks": remarks(results),
        "failed": sum(bool(one.error) for one in results.measurements),
        "tables": [*row_tables(results), *tables(results)],
        "plots": drawn(results, names),
        "facts": {
            "Machine": list(_facts(facts)),
            "Disk": list(_facts(results.disk)),
            "Settings": list(_facts(results.settings)),
        },
    }


def _names(results: Results) -> list[str]:
    """Who measured; policies that were counted and moved nothing are none of them."""
    moved = {one.by for one in results.measurements if one.nbytes or one.error}
    return [name for name in measurers(results) if name in moved or len(moved) < 2]


def _time(created: str) -> str:
    try:
        return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return created


def _facts(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Names and values in words; what is nothing is left out."""
    for key, value in tree.items():
        name = f"{above}{key.removesuffix('_bytes').replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _facts(value, f"{name}: ")
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif key.endswith("_bytes") and isinstance(value, (int, float)):
            yield name, do_filesizeformat(value, binary=True)
        elif isinstance(value, list):
            yield name, ", ".join(_number(one) for one in value)
        elif value not in (None, ""):
            yield name, _number(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
