"""`advise`: the plan for a store, from its history and from what the caller knows."""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from penstock.common.paths import absolute, of_bucket
from penstock.planning.advice import Advice, plan
from penstock.planning.inputs import Cluster, Training
from penstock.planning.models.failures import RANKS_PER_NODE, mtbf, mtbf_counted
from penstock.planning.models.units import show_seconds
from penstock.planning.records.history import NAME, Summary, summarize

if TYPE_CHECKING:
    from penstock.planning.models.quantity import Quantity


def advise(
    store: Any = None,
    *,
    training: Training | None = None,
    cluster: Cluster | None = None,
) -> Advice:
    """Advises how often to save, from the history of a store and from numbers that are given.

    Numbers given win over the history, the history over documented defaults. `Advice.guesses` names
    the defaults used, `Advice.inputs` the origin and spread of each number.

    Args:
        store: A `penstock.CheckpointStore` or the path of one; None without a history.
        training: Costs of a save. What it lacks is taken from the history.
        cluster: Failure rate, drives, prices. Without a rate, that of `failures.NODE_RATE` and the
            failures of the history count, for a node of each eight ranks that saved.

    Returns:
        The interval, the goodput and its parts, and what storage they take.

    Raises:
        ValueError: Nothing is known of the cost of a save, or of failures, or a number is out of
            range.

    Example:
        >>> from penstock.planning import Training, advise, cluster_of, given
        >>> run = Training(stall=given(60, "s", "bench"), durable=given(60, "s", "bench"))
        >>> advice = advise(training=run, cluster=cluster_of(nodes=2048, node_rate=4))
        >>> round(advice.interval.value), round(advice.goodput.value, 2)
        (1145, 0.87)
    """
    root = None if store is None else _root(store)
    summary = Summary() if root is None else summarize(root)
    where = "" if root is None else f"{os.path.join(root, NAME)} has no saves: "
    return plan(
        _completed_training(training or Training(), summary, where),
        _completed_cluster(cluster or Cluster(), summary, where),
    )


def _completed_training(given: Training, summary: Summary, where: str) -> Training:
    """The numbers given, and those of the history in place of others."""
    known: dict[str, Quantity | None] = {
        one.name: getattr(given, one.name) or getattr(summary, one.name) for one in fields(Training)
    }
    durable = known["durable"] or known["stall"]
    if durable is None:
        raise ValueError(
            f"{where or 'nothing is known of saves: '}give --save-seconds (`durable` of Training), "
            "or the directory of a store that has a history"
        )
    stall = known["stall"] or replace(durable, source="the whole save, as no stall is given")
    if stall.value > durable.value:
        if given.stall is not None and given.durable is not None:
            raise ValueError(
                f"{stall.source} {stall.value:g} is longer than the whole save, {durable.value:g} s"
            )
        # One is given, the other is of the history.
        stall = durable = given.stall or durable
    return Training(**known | {"stall": stall, "durable": durable})


def _completed_cluster(given: Cluster, summary: Summary, where: str) -> Cluster:
    """The cluster, with nodes and failures of the history where none are given."""
    nodes, found = given.nodes, given.mtbf
    if nodes is None and summary.ranks:
        nodes = math.ceil(summary.ranks / RANKS_PER_NODE)
    if found is None:
        if nodes is None:
            raise ValueError(
                f"{where or 'nothing is known of failures: '}give --nodes or --mtbf (`nodes` or "
                "`mtbf` of Cluster)"
            )
        found = mtbf(nodes, given.node_rate)
    if summary.starts and found.is_guess:
        seconds = summary.exposure_seconds
        source = f"{found.source}; and {summary.failures} failures in {show_seconds(seconds)}"
        found = mtbf_counted(summary.failures, seconds, source, found)
    return replace(given, nodes=nodes, mtbf=found)


def _root(store: Any) -> str:
    # A `pathlib.Path` has a root, too: that of its file system.
    is_path = isinstance(store, (str, bytes, os.PathLike))
    root = os.fsdecode(store if is_path else store.root)
    if of_bucket(root):
        raise ValueError(f"{root}: a store in a bucket keeps no history; give the numbers instead")
    root = absolute(root)
    if not os.path.isdir(root):
        raise ValueError(f"{root}: no such directory")
    return root
