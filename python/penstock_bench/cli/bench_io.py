"""`penstock bench io`: how fast requests of every kind are."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import endings
from penstock.cli.examples import example
from penstock.cli.units import Finite, Size
from penstock.common.console import PATH, console, json_option, table
from penstock.common.machine import gpus
from penstock_bench.cli import outputs
from penstock_bench.cli.outputs import output_option, print_headlines, report_option, writable
from penstock_bench.cli.tune import tune_io
from penstock_bench.harness import cases, fio
from penstock_bench.harness.cases import PRESETS, Case
from penstock_bench.harness.running import BenchError, rotated, run, unused
from penstock_bench.results.compare import rounds_needed
from penstock_bench.results.results import Measurement, Results, latencies
from penstock_bench.suites.io import movers
from penstock_bench.workloads import scaling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.table import Table


_NONE = "-"

_WIDE_COLUMNS = 100
"""A terminal with more columns than this also shows the less important figures."""

_FREE_TIMES_SIZE = 1.05
"""Free space for each byte of one case: a file system keeps some for itself."""


class _Several(click.ParamType[list[Any]]):
    """A list with commas."""

    name = "list"

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        if isinstance(value, list):
            return value
        return [self._item.convert(one, param, ctx) for one in str(value).split(",")]


def _preset(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    if name is not None and name not in PRESETS:
        known = "; ".join(f"{one}: {what}" for one, what in PRESETS.items())
        raise click.BadParameter(f"there is no {name!r}. Known are {known}")
    return name


_PEERS = ("fio", movers.TENSOR_IO, movers.DEEPSPEED, *movers.OF_GPUS)


class _Gpu(click.ParamType[int]):
    """``gpu``, or ``gpu:1``."""

    name = "gpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        word, _, number = str(value).partition(":")
        if word not in ("gpu", "cuda") or not (number or "0").isdecimal():
            self.fail(f"{value!r} is neither gpu nor gpu:1", param, ctx)
        return int(number or "0")


_METHODS = click.Choice(["posix", "threads", "uring", "uring_registered", "executor", "cufile"])
_OF_GPUS = ("posix", "threads", "uring", "cufile")
_ONE_BY_ONE = ("posix", "cufile")
_PATTERNS = click.Choice(["write", "read", "random_read"])
_LAYOUTS = click.Choice(["file_per_tensor", "file_per_process", "shared_file"])


@click.command("io", epilog=example("penstock bench io /checkpoints --vs fio --rounds 7"))
@click.argument("directory", type=PATH, default=".")
@click.option("--preset", metavar="NAME", callback=_preset, help=f"One of {', '.join(PRESETS)}.")
@click.option("--pattern", "patterns", type=_Several(_PATTERNS), help="write,read,random_read")
@click.option(
    "--method",
    "methods",
    type=_Several(_METHODS),
    help="posix,threads,uring,uring_registered,executor; with --to gpu cufile",
)
@click.option("--direct", type=_Several(click.Choice(["on", "off"])), help="on,off")
@click.option("--layout", "layouts", type=_Several(_LAYOUTS), help="Files for tensors.")
@click.option("--aggregated", type=_Several(click.Choice(["yes", "no"])), help="Of tensors.")
@click.option("--block", "blocks", type=_Several(Size()), help="Sizes of requests. [1M]")
@click.option("--depth", "depths", type=_Several(click.IntRange(1, 4096)), help="[16]")
@click.option("--threads", type=_Several(click.IntRange(1, 1024)), help="Of a process. [1]")
@click.option("--processes", type=_Several(click.IntRange(1, 1024)), help="[1]")
@click.option("--to", "device", type=_Gpu(), metavar="gpu[:N]", help="Move memory of a GPU.")
@click.option("--size", type=Size(), default="1G", show_default=True, help="Bytes of a case.")
@click.option("--seconds", type=Finite(min=0.1), help="Of a case; else once over all.")
@click.option(
    "--rounds", type=click.IntRange(1), help="Of each case. [as many as bench compare needs]"
)
@click.option("--no-fsync", is_flag=True, help="Do not sync what was written.")
@click.option("--verify", is_flag=True, help="Check every block that is read.")
@click.option(
    "--vs",
    type=_Several(click.Choice(_PEERS)),
    help="Also measure with these, in turns. [of the preset ds_io: tensor_io and deepspeed]",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1, show_default=True)
@click.option(
    "--tune",
    type=PATH,
    callback=writable,
    help="Search for the best options and write them there.",
)
@click.option("--tune-seconds", type=Finite(min=1), default=300.0, show_default=True)
@output_option
@report_option
@json_option
def bench_io(
    directory: Path,
    size: int,
    rounds: int | None,
    verify: bool,
    vs: list[str] | None,
    seed: int,
    tune: Path | None,
    tune_seconds: float,
    output: Path | None,
    report: Path | None,
    as_json: bool,
    **axes: Any,
) -> int:
    """Measure requests of every kind in DIRECTORY.

    A preset is a set of cases; options choose others, or change those of the preset. All cases are
    measured once before any is measured again.

    With --to gpu what is read ends in memory of a GPU, and what is written begins there, by way of
    pinned memory; which way each byte took stands below the table, by the names of gdsio.

    With --tune, saves and loads of --size bytes are measured with one setting after the other.
    """
    outputs.check_distinct(output, report, tune)
    if axes["device"] is not None:
        _check_gpu(axes["device"], tunes=tune is not None)
    chosen = _cases(axes)
    found = gpus.cufile()
    if found is not None and any(case.method == "cufile" for case in chosen):
        # For the processes that move the bytes.
        os.environ["PENSTOCK_CUFILE"] = found
    place = directory.absolute()
    outputs.check_directory(place)
    _check_room(place, [Case()] if tune is not None else chosen, size)
    if tune is not None:
        with endings.tidy():
            return tune_io(
                place, tune, size=size, seconds=tune_seconds, rounds=rounds or 1, seed=seed,
                output=output, as_json=as_json,
            )  # fmt: skip
    rounds = rounds or rounds_needed(len(chosen))
    measures: dict[str, Callable[[Case, int], Measurement]] = {}
    work = unused(place)

    def ours(case: Case, number: int) -> Measurement:
        return run(case, work, size, seed=seed, verifies=verify, round_index=number)

    measures["penstock"] = ours
    peers = _peers(vs, axes["preset"])
    for by in peers:
        measures[by] = partial(_by_peer, by, work=work, size=size, seed=seed)
    settings = {
        "size_bytes": size,
        "rounds": rounds,
        "verify": verify,
        "seed": seed,
        "vs": ",".join(peers) or None,
    }
    results = outputs.started("io", place, settings)
    results.cases = {case.label: case.as_json() for case in chosen}
    with outputs.reported(results, _print, output=output, report=report, as_json=as_json):
        _measure(results, chosen, measures, rounds, is_quiet=as_json)
    return 0 if any(not one.error for one in results.measurements) else 1


def _peers(vs: list[str] | None, preset: str | None) -> list[str]:
    """Who else measures; what is not installed is left out, and told where it was asked for."""
    implied = [movers.TENSOR_IO, movers.DEEPSPEED] if preset == "ds_io" else []
    found = []
    for by in dict.fromkeys(implied if vs is None else vs):
        is_there = fio.is_there() if by == "fio" else movers.is_there(by)
        if is_there:
            found.append(by)
        elif vs is not None:
            missing = fio.MISSING if by == "fio" else movers.MISSING[by]
            console(stderr=True).print(f"without {by}: {missing}")
    return found


def _check_gpu(device: int, *, tunes: bool) -> None:
    """Refuses a GPU that cannot be used, and what has nothing of one."""
    if tunes:
        raise click.UsageError(
            "--tune measures saves and loads of the host's memory: leave --to out"
        )
    problem = gpus.usable(device)
    if problem is not None:
        raise click.UsageError(f"--to gpu: {problem}. `penstock doctor` says what there is")


def _by_peer(by: str, case: Case, number: int, *, work: Path, size: int, seed: int) -> Measurement:
    if by == "fio":
        return fio.run(case, work, size, seed=seed, round_index=number)
    return movers.run(case, by, work, size, round_index=number)


def _cases(axes: dict[str, Any]) -> list[Case]:
    name = axes["preset"]
    values: dict[str, list[Any] | None] = {
        "pattern": axes["patterns"],
        "method": axes["methods"],
        "direct": axes["direct"] and [word == "on" for word in axes["direct"]],
        "layout": axes["layouts"],
        "aggregated": axes["aggregated"] and [word == "yes" for word in axes["aggregated"]],
        "block_bytes": axes["blocks"],
        "depth": axes["depths"],
        "threads": axes["threads"],
        "processes": axes["processes"],
        "seconds": axes["seconds"] and [axes["seconds"]],
        "tensors": [True] if axes["layouts"] or axes["aggregated"] else None,
        "syncs": [False] if axes["no_fsync"] else None,
        "device": None if axes["device"] is None else [axes["device"]],
    }
    given = {axis: list(dict.fromkeys(some)) for axis, some in values.items() if some}
    chooses = given.keys() - {"seconds", "syncs", "device"}
    based = cases.preset(name) if name else [] if chooses else cases.preset("quick")
    if not based:
        based = [Case()] if "pattern" in given else [Case(), Case(pattern="read")]
    made: dict[Case, None] = {}
    for case in based:
        for combined in itertools.product(*given.values()):
            one = dataclasses.replace(case, **dict(zip(given, combined, strict=True)))
            if one.method in _ONE_BY_ONE:
                one = dataclasses.replace(one, depth=1)
            if one.device is not None and one.method not in _OF_GPUS:
                raise click.UsageError(
                    f"{one.method} moves memory of the host alone: with --to gpu choose a "
                    f"--method of {', '.join(_OF_GPUS)}"
                )
            if one.device is None and one.method == "cufile":
                raise click.UsageError("cufile moves memory of a GPU alone: add --to gpu")
            unit = 4096 if one.direct else 8
            if one.block_bytes < unit or one.block_bytes % unit:
                raise click.UsageError(
                    f"a block of {one.block_bytes} bytes is no multiple of {unit}, which "
                    f"{'direct' if one.direct else 'buffered'} requests take"
                )
            if one.block_bytes > cases.BLOCK_BYTES_MAX:
                raise click.UsageError(
                    f"a block of {one.block_bytes} bytes is too large: "
                    f"{cases.BLOCK_BYTES_MAX} at most"
                )
            made[one] = None
    return list(made)


def _check_room(directory: Path, chosen: list[Case], size: int) -> None:
    """Refuses cases whose files or buffers there is no room for; a block is the least of a file."""
    largest = max(chosen, key=lambda case: cases.total_bytes(case, size))
    written = cases.total_bytes(largest, size)
    free = shutil.disk_usage(directory).free
    needed = int(_FREE_TIMES_SIZE * written)
    if free < needed:
        raise click.UsageError(
            f"{directory} has {free / 1e9:.2f} GB free and a case of {written / 1e9:.2f} GB "
            f"({largest.label}) takes {needed / 1e9:.2f}: choose a smaller --size or --block, or "
            "another directory"
        )
    greedy = max(chosen, key=lambda case: cases.buffer_bytes(case, size))
    taken, memory = cases.buffer_bytes(greedy, size), scaling.memory_bytes()
    if memory < taken:
        raise click.UsageError(
            f"{memory / 1e9:.2f} GB of memory are free and the requests in flight of "
            f"{greedy.label} take {taken / 1e9:.2f}: choose a smaller --depth or --block"
        )


def _measure(
    results: Results,
    chosen: list[Case],
    measures: dict[str, Callable[[Case, int], Measurement]],
    rounds: int,
    *,
    is_quiet: bool,
) -> None:
    turns = [
        (number, case, by)
        for number in range(rounds)
        for case in chosen
        for by in rotated(list(measures), number)
    ]
    with outputs.progress(len(turns), is_quiet=is_quiet) as update:
        for number, case, by in turns:
            update(description=f"{by}: {case.label}")
            try:
                made = measures[by](case, number)
            except BenchError as error:
                made = Measurement(case=case.label, by=by, round_index=number, error=str(error))
            results.measurements.append(made)
            update(advance=1)


def _print(results: Results) -> None:
    out = console()
    print_headlines(results)
    out.print(_table(results, is_wide=out.width > _WIDE_COLUMNS))
    failed = {f"{one.by}, {one.case}: {one.error}" for one in results.measurements if one.error}
    notes = {f"{one.case}: {note}" for one in results.measurements for note in one.notes}
    for line in sorted(failed | notes):
        out.print(line)
    took: dict[str, set[str]] = {}
    for one in results.measurements:
        if one.path and not one.error:
            took.setdefault(one.path, set()).add(one.by)
    for path, who in sorted(took.items()):
        out.print(f"{path} ({', '.join(sorted(who))}): {cases.GPU_PATHS[path]}")


def _table(results: Results, *, is_wide: bool) -> Table:
    """A row of each case by each who measured it, without columns that are empty."""
    names = list(dict.fromkeys(one.by for one in results.measurements))
    is_shared = len(names) > 1
    peers = ("fio", movers.DEEPSPEED, *movers.OF_GPUS)
    peer = next((by for by in peers if by in names), None)
    made: list[tuple[str, str, dict[str, str]]] = []
    for case in results.cases:
        for by in names:
            figures = _figures(results, case, by, peer=peer)
            more = _figures_of_files(results, case, by) if is_wide else {}
            made.append((case if by == names[0] else "", by, figures | more))
    numbers = [
        name
        for name in dict.fromkeys(name for *_, figures in made for name in figures)
        if any(figures.get(name, _NONE) not in ("", _NONE) for *_, figures in made)
    ]
    columns = ["case", *(["by"] if is_shared else []), *numbers]
    rows = table(*columns, numbers=numbers, folded=["case"])
    for case, by, figures in made:
        cells = [figures.get(name, _NONE) for name in numbers]
        rows.add_row(case, *([by] if is_shared else []), *cells)
    return rows


def _figures(results: Results, case: str, by: str, *, peer: str | None) -> dict[str, str]:
    """Medians of a case by heading; of what was written, rates with the sync."""
    rate = results.spread(case, by, lambda one: one.durable_gb_per_second)
    if rate is None:
        return {}

    def median(value: Callable[[Measurement], float], form: str) -> str:
        spread = results.spread(case, by, value)
        return _NONE if spread is None else format(spread.median, form)

    # A library that moves a tensor by one call does not report the latency of its requests.
    found = latencies(results, case, by)
    figures = {
        "GB/s": rate.shown(".2f"),
        "IOPS": median(lambda one: one.requests_per_second, ",.0f"),
        **{
            f"{name} us": f"{found[name]:,.0f}" if name in found else _NONE
            for name in ("p50", "p99")
        },
    }
    if peer is None:
        return figures | {"CPU s/GiB": median(lambda one: one.cpu_seconds_per_gib, ".2f")}
    # The column of the processor makes room for that of the peer.
    theirs = results.spread(case, peer, lambda one: one.durable_gb_per_second)
    is_compared = by != peer and theirs is not None
    share = f"{rate.median / theirs.median:.2f}" if is_compared and theirs else ""
    return figures | {f"of {peer}": share}


def _figures_of_files(results: Results, case: str, by: str) -> dict[str, str]:
    """Columns for wide terminals: rates without the sync, and calls that concern files."""
    made = results.of(case, by)
    if not made:
        return {}
    rate = results.spread(case, by, lambda one: one.gb_per_second)
    is_write = results.cases[case]["pattern"] == "write"
    has_synced = is_write and any(one.sync_seconds for one in made)
    calls = results.spread(case, by, lambda one: sum(one.metadata.values()))
    return {
        "no fsync": rate.shown(".2f") if has_synced and rate else "",
        "file calls": f"{calls.median:,.0f}" if calls is not None and calls.most else "",
    }
