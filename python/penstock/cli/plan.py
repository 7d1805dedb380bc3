"""`penstock plan [STORE]`: advises how often to save."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.examples import example
from penstock.cli.units import AMOUNT, DURATION
from penstock.common.console import (
    PATH,
    PLACE,
    console,
    json_option,
    print_json,
    summary_table,
    table,
)
from penstock.planning import shown
from penstock.planning.advise import advise
from penstock.planning.inputs import Cluster, Drives, Prices, Training, cluster_of
from penstock.planning.models.quantity import given
from penstock.planning.page import require_libraries, write_page
from penstock.planning.records.job_log import read_job_log

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.planning.advice import Advice
    from penstock.planning.records.job_log import JobLog

    _Type = click.ParamType[tuple[int, ...]]
else:
    # `ParamType` is generic for the type checker only: older releases of click lack it.
    _Type = click.ParamType

JSON_KEYS = """\b
JSON: interval_seconds and goodput, each also as _low and _high;
  interval_steps, shares (goodput, saving, lost, down, restarting),
  lost_seconds_per_failure, failures_per_day, saves_per_day,
  bytes_per_day, capacity_bytes, drive_days, drive_writes_per_day,
  dollars_per_month (null where unknown), guesses, notes, inputs (each a
  value, low, high, unit, origin, source), what_if: a list of the same
  with nodes; job_log: path, kind, failures and others by kind,
  node_seconds, nodes, left_out, node_rate (null without --job-log).
"""


_COUNT = re.compile(r"[1-9][0-9]{0,17}")
"""Digits that `int` takes, unlike a superscript, and not thousands of them."""


class _Nodes(_Type):
    """Numbers of nodes for a table: ``nodes=1024,16384``."""

    name = "nodes=n,n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses the numbers, for click."""
        if isinstance(value, tuple):
            return value
        name, _, texts = str(value).partition("=")
        numbers = texts.split(",")
        if name != "nodes" or not all(_COUNT.fullmatch(one) for one in numbers):
            self.fail(f"{value!r}: write nodes= and numbers, as in nodes=1024,16384", param, ctx)
        return tuple(int(one) for one in numbers)


@click.command(
    epilog=example(
        "penstock plan /checkpoints --nodes 64",
        "penstock plan --save-seconds 60 --restart-seconds 120 --mtbf 3h",
        "penstock plan /checkpoints --what-if nodes=1024,16384 --html plan.html",
        after=JSON_KEYS,
    )
)
@click.argument("store", type=PLACE, required=False, metavar="[ROOT]")
@click.option(
    "--save-seconds", type=DURATION, help="Time from the call of a save until it is durable."
)
@click.option(
    "--stall-seconds",
    type=DURATION,
    help="Time for which a save stops training; else the whole save.",
)
@click.option(
    "--slowdown", type=float, help="Share of its speed that training loses beside a save."
)
@click.option(
    "--restart-seconds", type=DURATION, help="Time from a restart until training goes on."
)
@click.option("--detection-seconds", type=DURATION, help="Time from a failure until the restart.")
@click.option(
    "--step-seconds", type=DURATION, help="Time of a training step, for an answer in steps."
)
@click.option("--save-bytes", type=AMOUNT, help="Size of a checkpoint, as in 105GB.")
@click.option(
    "--mtbf", type=DURATION, help="Mean time between failures of the whole job, as in 3h."
)
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes, instead of --mtbf.")
@click.option("--node-rate", type=float, help="Failures per 1,000 node-days; about 4 if not given.")
@click.option(
    "--job-log",
    type=PATH,
    metavar="FILE",
    help="Failure rate from `sacct -XPD` or a log of torchrun.",
)
@click.option(
    "--keep", type=click.IntRange(min=1), default=2, show_default=True, help="Checkpoints kept."
)
@click.option("--drives", type=click.IntRange(min=1), help="Number of drives that share the bytes.")
@click.option("--drive-bytes", type=AMOUNT, help="Capacity of a drive, as in 7.68TB.")
@click.option("--drive-endurance", type=AMOUNT, help="Bytes a drive is warranted for (TBW): 14PB.")
@click.option("--dollars-per-gb-month", type=float, help="Price of a bucket that gets each copy.")
@click.option("--dollars-per-1000-puts", type=float, default=0.0, help="Price of its requests.")
@click.option("--what-if", type=_Nodes(), help="Also advise for other numbers of nodes.")
@click.option(
    "--html", type=PATH, metavar="FILE", help="Write a page with charts (extra: penstock[plan])."
)
@json_option
def plan(
    store: str | None,
    as_json: bool,
    what_if: tuple[int, ...] | None,
    html: Path | None,
    job_log: Path | None,
    **options: Any,
) -> int:
    """Advise how often to save, from the history of the store ROOT and from the options.

    Options win over the history, and the history over documented defaults, which the
    output names. Times are in seconds unless they have a unit: 90, 1.5h, 2d.
    """
    try:
        if html is not None:
            # Before the work: a page that cannot be made is an error of its own.
            require_libraries()
        log = None if job_log is None else read_job_log(job_log, nodes=options["nodes"])
        advice = advise(store, training=_training(options), cluster=_cluster(options, log))
        others = [advice.with_nodes(nodes) for nodes in what_if or ()]
        if html is not None:
            write_page(advice, html, others)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        rows = [{"nodes": other.cluster.nodes, **other.as_json()} for other in others]
        read = None if log is None else log.as_json()
        print_json({**advice.as_json(), "what_if": rows, "job_log": read})
    else:
        _print(advice, others, log)
    return 0


def _training(options: dict[str, Any]) -> Training:
    numbers = {
        "durable": ("save_seconds", "s"),
        "stall": ("stall_seconds", "s"),
        "restart": ("restart_seconds", "s"),
        "slowdown": ("slowdown", ""),
        "step": ("step_seconds", "s"),
        "save_bytes": ("save_bytes", "bytes"),
    }
    return Training(
        **{
            name: given(options[option], unit, f"--{option.replace('_', '-')}")
            for name, (option, unit) in numbers.items()
            if options[option] is not None
        }
    )


def _cluster(options: dict[str, Any], log: JobLog | None) -> Cluster:
    more: dict[str, Any] = {"keep": options["keep"]}
    if options["detection_seconds"] is not None:
        more["detection"] = given(options["detection_seconds"], "s", "--detection-seconds")
    if options["drives"] is not None:
        if options["drive_bytes"] is None:
            raise ValueError("--drives needs the capacity of one: --drive-bytes")
        more["drives"] = Drives(
            options["drives"], options["drive_bytes"], options["drive_endurance"]
        )
    if options["dollars_per_gb_month"] is not None:
        more["prices"] = Prices(options["dollars_per_gb_month"], options["dollars_per_1000_puts"])
    nodes, rate = options["nodes"], options["node_rate"]
    if log is None:
        return cluster_of(mtbf_seconds=options["mtbf"], nodes=nodes, node_rate=rate, **more)
    if options["mtbf"] is not None or rate is not None:
        raise ValueError("--job-log gives the failure rate: leave out --mtbf and --node-rate")
    return Cluster(nodes=nodes or log.nodes, node_rate=log.node_rate(), **more)


def _print(advice: Advice, others: list[Advice], log: JobLog | None) -> None:
    out = console()
    out.print(shown.headline(advice))
    out.print()
    out.print(summary_table(*shown.facts(advice)), "")
    if others:
        numbers = tuple(name for name in shown.WHAT_IF if name != "save every")
        rows = table(*shown.WHAT_IF, numbers=numbers)
        for row in shown.what_if(others):
            rows.add_row(*row)
        out.print(rows, "")
    for note in advice.notes:
        out.print(note)
    if log is not None:
        out.print(str(log))
        out.print()
    rows = table(*shown.INPUTS, folded=["from", ""])
    for row in shown.inputs(advice.inputs):
        rows.add_row(*row)
    out.print(rows)
