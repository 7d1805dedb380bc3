"""`penstock bench checkpoint`: how fast a model's state is saved and loaded, by us and others."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import endings
from penstock.cli.examples import example
from penstock.cli.names import names_of
from penstock.cli.units import Finite, Size
from penstock.common.console import PATH, console, json_option
from penstock.errors import MissingDependencyError, PenstockError
from penstock_bench.cli import outputs
from penstock_bench.cli.checkpoint_plan import PASSES, planned, results_of
from penstock_bench.cli.checkpoint_table import print_results
from penstock_bench.cli.outputs import output_option, report_option
from penstock_bench.peers.checkpoint import WRITERS, with_sealed
from penstock_bench.results.compare import rounds_needed
from penstock_bench.suites.checkpoint.spawning import spawn
from penstock_bench.suites.checkpoint.team import Launched, Team, launched, store_at
from penstock_bench.workloads.models import MODELS

if TYPE_CHECKING:
    from penstock_bench.results.results import Measurement, Results
    from penstock_bench.suites.checkpoint.plan import Plan


_REMOVALS_MAX, _REMOVE_AGAIN_SECONDS = 100, 0.05


def _scale(_: click.Context, __: click.Parameter, text: str) -> float | None:
    if text == "auto":
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 1:
        raise click.BadParameter(f"{text!r} is neither auto nor a number above 0 and up to 1")
    return factor


@click.command(
    "checkpoint",
    epilog=example("penstock bench checkpoint /checkpoints --writer penstock,torch.save,dcp"),
)
@click.argument("directory", type=PATH, default=".")
@click.option(
    "--model",
    "models",
    metavar="NAME",
    default="llama3-8b",
    show_default=True,
    callback=names_of(dict.fromkeys(MODELS, "")),
    help=f"One of {', '.join(MODELS)}.",
)
@click.option("--tp", type=click.IntRange(1), help="Tensor parallelism, other than the model's.")
@click.option("--pp", type=click.IntRange(1), help="Pipeline parallelism.")
@click.option("--dp", type=click.IntRange(1), help="Data parallelism.")
@click.option("--zero", type=click.IntRange(0, 3), help="Stage of ZeRO.")
@click.option(
    "--scale",
    "factor",
    metavar="auto|NUMBER",
    default="auto",
    show_default=True,
    callback=_scale,
    help="The part that is written of the bytes of the ranks that take part.",
)
@click.option("--processes", type=click.IntRange(1), help="How many ranks take part. [cores]")
@click.option(
    "--writer",
    "writers",
    metavar="LIST",
    default="penstock,torch.save",
    show_default=True,
    callback=names_of({name: entry.note for name, entry in WRITERS.items()}),
    help=f"Who saves: {', '.join(WRITERS)}.",
)
@click.option(
    "--sealed",
    "is_sealed",
    is_flag=True,
    help="Measure writers that can encrypt sealed as well, and compare.",
)
@click.option(
    "--rounds", type=click.IntRange(1), help="Saves and loads. [as many as bench compare needs]"
)
@click.option(
    "--fill",
    type=Finite(0, 1, min_open=True),
    help="Save until so much of the file system is full, instead of rounds.",
)
@click.option("--fill-size", type=Size(), help="Fill this instead of the file system.")
@click.option("--passes", type=click.IntRange(1), help=f"How often it is filled. [{PASSES}]")
@click.option("--no-fsync", is_flag=True, help="Add no syncs to what writers do by themselves.")
@click.option("--verify", is_flag=True, help="Compare every tensor that was loaded.")
@output_option
@report_option
@json_option
def bench_checkpoint(
    directory: Path,
    writers: list[str],
    is_sealed: bool,
    fill: float | None,
    rounds: int | None,
    output: Path | None,
    report: Path | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """Save and load the state of a model in DIRECTORY, with a process for each rank.

    A save ends when the slowest rank has everything on stable storage; a load begins with the files
    out of the page cache. Also runs under torchrun, mpirun and srun, as one of their ranks each.
    """
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "bench checkpoint takes PyTorch: pip install 'penstock[torch]'", name="torch"
        )
    if fill is None and (asked["fill_size"] or asked["passes"]):
        raise click.UsageError("--fill-size and --passes go with --fill")
    if fill is not None and (rounds or asked["verify"]):
        raise click.UsageError("--rounds and --verify go with loads, and --fill has none")
    here = launched()
    writers = with_sealed(writers) if is_sealed else writers
    # A save and a load of each of ours; others are not compared.
    cases = 2 * max(1, sum(name.startswith("penstock") for name in writers))
    asked |= {"fill": fill, "rounds": rounds or rounds_needed(cases), "writers": writers}
    outputs.check_distinct(output, report)
    place = directory.absolute()

    with ExitStack() as stack:
        stack.enter_context(endings.tidy())
        if here is None:
            plan, settings = planned(place, asked, None)
            team = Team()
        else:
            team = Team(here.rank, here.ranks)
            plan, settings = _agreed(team, place, asked, here)
        results = results_of(place, plan, settings)
        if not team.rank:
            shown = outputs.reported(
                results, print_results, output=output, report=report, as_json=as_json
            )
            stack.enter_context(shown)
        _run(results, plan, team, is_spawned=here is None, is_quiet=as_json or bool(team.rank))
        team.leave()
    if team.rank:
        return 0
    return int(any(one.error for one in results.measurements) or not results.measurements)


def _agreed(
    team: Team, place: Path, asked: dict[str, Any], here: Launched
) -> tuple[Plan, dict[str, Any]]:
    """Plans on the first rank of a launcher, once all have joined; an error there ends all."""
    team.join(store_at(here.address, here.port, here.rank, here.ranks))
    made: tuple[Plan, dict[str, Any]] | None = None
    problem: Exception | None = None
    if not team.rank:
        try:
            made = planned(place, asked, here)
        except (click.ClickException, PenstockError) as error:
            problem = error
    made = team.share(made)
    if problem is not None:
        raise problem
    if made is None:
        raise click.exceptions.Exit(2)
    plan, settings = made
    settings["has_one_clock"] = team.has_one_clock
    return plan, settings


def _run(results: Results, plan: Plan, team: Team, *, is_spawned: bool, is_quiet: bool) -> None:
    """Runs the plan with a bar; its directory is gone afterwards, however it ends."""
    total = None if plan.fill is not None else 2 * plan.rounds * len(plan.writers)
    work = Path(plan.directory)
    with outputs.progress(total, is_quiet=is_quiet) as update:

        def take(said: Measurement | str) -> None:
            if isinstance(said, str):
                update(description=said)
            else:
                results.measurements.append(said)
                update(advance=1)

        if not team.rank:
            work.mkdir()
        try:
            team.meet()
            if is_spawned:
                # However this ends, the processes do before their directory is removed.
                with closing(spawn(plan)) as messages:
                    for said in messages:
                        take(said)
            else:
                # It takes PyTorch, which the one who starts processes needs not import.
                from penstock_bench.suites.checkpoint.checkpoint import Rank

                Rank(plan, team, take).run()
        finally:
            if not team.rank:
                with endings.undisturbed():
                    _remove(work)


def _remove(work: Path) -> None:
    """Removes a directory in which others may still be at work for a moment."""
    for _ in range(_REMOVALS_MAX):
        shutil.rmtree(work, ignore_errors=True)
        if not work.exists():
            return
        time.sleep(_REMOVE_AGAIN_SECONDS)
    console(stderr=True).print(f"{work} could not be removed: others still write there")
