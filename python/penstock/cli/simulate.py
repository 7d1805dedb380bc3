"""`penstock simulate SCENARIO…`: a cluster and a job over weeks, many times."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.examples import example
from penstock.common.console import PATH, console, json_option, print_json, table
from penstock.planning.models.units import show_seconds

if TYPE_CHECKING:
    from penstock.planning.simulation import Replay, Results, Scenario

JSON_KEYS = """\b
JSON: days, runs, seed, scenarios: a list of
  name, source, mtbf_seconds (null without failures), save_seconds,
  restart_seconds, interval_seconds, goodput (a mean) and goodput_low,
  goodput_high (90 % of the runs), saving, lost, down, restarting,
  missing (training of missing nodes), failures (a mean). With --failures,
  notes: sentences about the log.
"""


@click.command(
    epilog=example(
        "penstock simulate llama-3-405b",
        "penstock simulate cluster.toml --set interval_seconds=600 --days 90",
        "penstock simulate research-64 --compare interval_seconds=300,900,3600",
        "penstock simulate jobs.toml --failures lanl.csv --failures-where System=20",
        after=JSON_KEYS,
    )
)
@click.argument("scenarios", nargs=-1, metavar="SCENARIO…")
@click.option("--list", "lists", is_flag=True, help="List the presets and their sources.")
@click.option("--days", type=float, default=30.0, show_default=True, help="Length of a run.")
@click.option("--runs", type=int, help="Number of runs. [1000; 20 of jobs that share a cluster]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random numbers.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a value (keys: docs/planning.md).",
)
@click.option("--compare", metavar="KEY=A,B,…", help="Run once for each value of a key.")
@click.option(
    "--failures",
    type=PATH,
    help="Replay failures: a second a line, or a table with columns time, node, duration.",
)
@click.option(
    "--failures-where",
    "wheres",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Take these rows of that table.",
)
@click.option("--trace", type=PATH, help="Write the timeline of one run for ui.perfetto.dev.")
@json_option
def simulate(
    scenarios: tuple[str, ...],
    lists: bool,
    days: float,
    runs: int | None,
    seed: int,
    sets: tuple[str, ...],
    compare: str | None,
    failures: Path | None,
    wheres: tuple[str, ...],
    trace: Path | None,
    as_json: bool,
) -> int:
    """Simulate a cluster and its training job, from a TOML file or a preset.

    Shows the share of time that is training which counts, and where the rest goes.
    """
    # Here, as the help needs no NumPy.
    from penstock.planning.simulation import load, read_replay, timeline

    if lists or not scenarios:
        return _list(as_json=as_json)
    try:
        if compare is not None and len(scenarios) > 1:
            raise ValueError("--compare takes one scenario")
        chosen = [load(one).with_values(**_values(sets)) for one in scenarios]
        chosen = [other for one in chosen for other in _compared(one, compare)]
        replay = (
            None if failures is None else read_replay(failures, _pairs("failures-where", wheres))
        )
        if runs is None:
            runs = _RUNS_OF_JOBS if any(one.needs_events for one in chosen) else _RUNS
        rows = [row for one in chosen for row in _rows(one, days, runs, seed, replay)]
        if trace is not None:
            if chosen[0].needs_events:
                raise ValueError("--trace: for a job on all nodes, without nodes_min, repair_crews")
            made = timeline(chosen[0], days=days, seed=seed, **_replayed(replay))
            Path(trace).write_text(json.dumps(made), encoding="utf-8")
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None
    notes = () if replay is None else replay.notes
    if as_json:
        found = {"days": days, "runs": runs, "seed": seed, "scenarios": rows}
        print_json(found | ({} if replay is None else {"notes": list(notes)}))
    else:
        _print(rows, days, runs, _heading(scenarios, chosen, compare))
        for note in notes:
            console().print(f"{failures}: {note}")
        if trace is not None:
            console().print("", f"timeline of one run: {trace}")
    return 0


_RUNS, _RUNS_OF_JOBS = 1000, 20


def _values(sets: tuple[str, ...]) -> dict[str, Any]:
    return {key: _typed(value) for key, value in _pairs("set", sets).items()}


def _pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for one in texts:
        key, is_pair, value = one.partition("=")
        if not is_pair:
            raise ValueError(f"--{option} {one}: write KEY=VALUE")
        pairs[key] = value
    return pairs


def _heading(scenarios: tuple[str, ...], chosen: list[Scenario], compare: str | None) -> str:
    """The title of the first column, if its cells are short; empty for names below letters."""
    if compare is not None:
        return compare.partition("=")[0]
    if len(scenarios) == 1 and len(chosen) > 1:
        return "policy"
    return "job" if len(chosen) == 1 and chosen[0].jobs else ""


def _typed(text: str) -> Any:
    """A value as TOML would have it: a number, true or false, else text with a unit."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _compared(scenario: Scenario, compare: str | None) -> list[Scenario]:
    if compare is None:
        return scenario.compared()
    key, is_pair, values = compare.partition("=")
    if not is_pair or not values:
        raise ValueError(f"--compare {compare}: write KEY=A,B")
    return [
        replace(
            scenario.with_values(**{key: _typed(value)}),
            name=f"{scenario.name} with {key}={value}",
            row=value,
        )
        for value in values.split(",")
    ]


def _rows(
    scenario: Scenario, days: float, runs: int, seed: int, replay: Replay | None
) -> list[dict[str, Any]]:
    """A row for each job of a scenario."""
    from penstock.planning.simulation import simulate, simulate_jobs

    if not scenario.needs_events:
        results = simulate(scenario, days=days, runs=runs, seed=seed, **_replayed(replay))
        return [_row(scenario, scenario.row or scenario.name, results)]
    if replay is not None:
        raise ValueError(
            f"{scenario.name}: --failures: for a job on all nodes, without nodes_min, repair_crews"
        )
    found = simulate_jobs(scenario, days=days, runs=runs, seed=seed)
    rows = []
    for job in scenario.jobs or (replace(scenario.job, name=scenario.job.name or scenario.name),):
        nodes = job.nodes or scenario.cluster.nodes
        cluster = replace(scenario.cluster, nodes=nodes)
        name = job.name if scenario.jobs else scenario.row or scenario.name
        alone = replace(scenario, job=job, jobs=(), cluster=cluster)
        rows.append(_row(alone, name, found[job.name]))
    return rows


def _replayed(replay: Replay | None) -> dict[str, Any]:
    """The arguments of a run that replays a log."""
    return {} if replay is None else {"gaps": replay.gaps, "repairs": replay.repairs}


def _row(scenario: Scenario, name: str, results: Results) -> dict[str, Any]:
    mtbf = scenario.cluster.mtbf_seconds
    return {
        "name": name,
        "source": scenario.source,
        "mtbf_seconds": mtbf if math.isfinite(mtbf) else None,
        "save_seconds": scenario.write_seconds(),
        "restart_seconds": scenario.job.start_seconds + scenario.read_seconds(),
        **results.summary(),
    }


def _list(*, as_json: bool) -> int:
    from penstock.planning.simulation import load, presets

    rows = [(name, load(name)) for name in presets()]
    if as_json:
        found = [{"preset": name, "name": one.name, "source": one.source} for name, one in rows]
        print_json({"presets": found})
        return 0
    shown = table("preset", "scenario", "source", folded=["scenario", "source"])
    for name, one in rows:
        shown.add_row(name, one.name, one.source)
    console().print(shown)
    return 0


def _print(rows: list[dict[str, Any]], days: float, runs: int, heading: str) -> None:
    out = console()
    columns = ["counts (90 %)", "saving", "lost", "down", "restart"]
    if any(row["missing"] for row in rows):
        columns.append("missing")
    shown = table(heading, "every", *columns, numbers=columns)
    for index, row in enumerate(rows):
        name = row["name"]
        if not heading:
            name = chr(ord("A") + index) if index < 26 else str(index)
            out.print(f"{name}: {row['name']}")
        low, high = 100 * row["goodput_low"], row["goodput_high"]
        shares = [row[key] for key in ("saving", "lost", "down", "restarting", "missing")]
        shown.add_row(
            name,
            show_seconds(row["interval_seconds"]),
            f"{row['goodput']:.1%} ({low:.1f}-{high:.1%})",
            *(f"{share:.1%}" for share in shares[: len(columns) - 1]),
        )
    out.print("", shown, "")
    missing = "; missing: training that missing nodes would have done" if len(columns) > 5 else ""
    out.print(
        f"{runs:,} runs of {days:g} days. every: from save to save; counts: share of the time "
        "whose training no failure undid; lost: training that failures undid; down: from a failure "
        f"to the restart{missing}."
    )
