"""Penstock against itself: saves and loads of one state under different `Options`, interleaved.

`.venv/bin/python -m penstock_bench.suites.save_load.sweep` measures the settings that
docs/maintainers/tuning.md compares; `--options engine=threads,io_threads=2` measures others beside
the defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

import penstock
from penstock_bench.harness import tables
from penstock_bench.harness.options import directory_option, size_option
from penstock_bench.harness.running import rotated
from penstock_bench.results.spread import spread
from penstock_bench.suites.save_load.child import save_and_load
from penstock_bench.workloads import states

if TYPE_CHECKING:
    from pathlib import Path

_SETTINGS = (
    "",
    "io_threads=1",
    "queue_depth=4",
    "queue_depth=32",
    "extent_bytes=4194304,queue_depth=4",
    "extent_bytes=4194304,queue_depth=16",
    "engine=threads",
    "verify=False",
    "direct=off",
)
_WORDS = {"True": True, "False": False}


def parse(text: str) -> dict[str, Any]:
    """Options from ``name=value,…``."""
    pairs = (pair.partition("=") for pair in filter(None, text.split(",")))
    return {
        name: int(value) if value.isdecimal() else _WORDS.get(value, value)
        for name, _, value in pairs
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--options", "settings", multiple=True, metavar="NAME=VALUE,…")
@size_option
@click.option("--rounds", default=5, show_default=True)
@directory_option
def main(settings: tuple[str, ...], size_gib: float, rounds: int, directory: Path) -> None:
    """Measure durable saves and cold loads under different options."""
    chosen = ("", *settings) if settings else _SETTINGS
    directory.mkdir(parents=True, exist_ok=True)
    spec = states.describe("llama", int(size_gib * states.GIB))
    state = spec.nested()
    rates: dict[str, list[tuple[float, ...]]] = {text: [] for text in chosen}
    for index in range(rounds):
        for text in rotated(chosen, index):
            options = penstock.Options(**parse(text))
            saved, loaded = save_and_load(directory / "sweep", state, spec, options)
            rates[text].append(tuple(spec.nbytes / one.seconds / 1e9 for one in (saved, loaded)))
    table = tables.figures(
        spec.description,
        ["save GB/s", "load GB/s"],
        {
            text or "(defaults)": [
                tables.cell(spread(one), ".2f") for one in zip(*found, strict=True)
            ]
            for text, found in rates.items()
        },
        first="options",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
