"""Inputs of a plan: the run, its machines, its drives, its bucket; and defaults for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from penstock.planning.models.failures import NODE_RATE
from penstock.planning.models.quantity import Quantity, assumed, given

SLOWDOWN = assumed(0.05, "", "share of its speed that training loses beside a save", 0.0, 0.2)
RESTART = assumed(
    300.0, "s", "starts of 16,000 to 98,000 GPUs: 200 to 900 s (arXiv 2602.00277)", 60.0, 900.0
)
DETECTION = assumed(
    60.0, "s", "an agent notices in seconds, NCCL's watchdog in 10 minutes", 2.0, 600.0
)


@dataclass(frozen=True)
class Training:
    """One training run, as the planner sees it. `advise` completes it from a store's history.

    Attributes:
        stall: Seconds for which a save stops training; None for the whole save.
        durable: Seconds from the call of a save until it is on stable storage; None for the stall,
            as for a synchronous save.
        restart: Seconds from the start of the job until it trains again: imports, ranks, the load;
            None for `RESTART`.
        slowdown: Share of its speed that training loses while a save is in flight, 0 to 1; None for
            `SLOWDOWN`.
        step: Seconds of a training step, if advice in steps is wanted.
        save_bytes: Bytes of one checkpoint.
    """

    stall: Quantity | None = None
    durable: Quantity | None = None
    restart: Quantity | None = None
    slowdown: Quantity | None = None
    step: Quantity | None = None
    save_bytes: Quantity | None = None


@dataclass(frozen=True)
class Drives:
    """Drives that take the checkpoints.

    Attributes:
        count: Number of drives that share the bytes evenly.
        capacity_bytes: Capacity of one.
        endurance_bytes: Bytes that its maker warrants (TBW); None if unknown.
        write_amplification: Bytes written to flash for each byte of the file system.

    Raises:
        ValueError: A number is out of range.
    """

    count: int
    capacity_bytes: float
    endurance_bytes: float | None = None
    write_amplification: float = 1.0

    def __post_init__(self) -> None:
        """Refuses numbers that are out of range."""
        _check(
            "drives",
            count=self.count,
            capacity_bytes=self.capacity_bytes,
            write_amplification=self.write_amplification,
        )
        if self.endurance_bytes is not None:
            _check("drives", endurance_bytes=self.endurance_bytes)


@dataclass(frozen=True)
class Prices:
    """Prices of a bucket, in dollars; read them from your provider's page.

    Attributes:
        gb_month: A gigabyte (10^9 bytes) for a month of 30 days.
        thousand_puts: 1,000 requests that write.
        part_bytes: Bytes of one such request: parts of an upload.

    Raises:
        ValueError: A number is out of range.
    """

    gb_month: float
    thousand_puts: float = 0.0
    part_bytes: float = 64 * 2**20

    def __post_init__(self) -> None:
        """Refuses numbers that are out of range."""
        _check("prices", or_zero=True, gb_month=self.gb_month, thousand_puts=self.thousand_puts)
        _check("prices", part_bytes=self.part_bytes)


def _check(of: str, *, or_zero: bool = False, **numbers: float) -> None:
    """Refuses a number that is not above 0, or not 0 or above, by name."""
    for name, number in numbers.items():
        if not (0 <= number < math.inf and (number or or_zero)):
            expected = "0 or more" if or_zero else "more than 0"
            raise ValueError(f"{name} of {of} = {number!r}: expected {expected}")


@dataclass(frozen=True)
class Cluster:
    """The machines of a run. `advise` completes it from a store's history.

    Attributes:
        mtbf: Mean seconds between failures of the whole job; None for that of the nodes.
        detection: Seconds from a failure until the restart begins.
        nodes: Number of nodes; None if only `mtbf` is known.
        node_rate: Failures per 1,000 node-days.
        drives: Drives that take the checkpoints, for their life and capacity.
        prices: Prices of the bucket that takes a copy of each checkpoint.
        keep: Number of checkpoints kept.
    """

    mtbf: Quantity | None = None
    detection: Quantity = DETECTION
    nodes: int | None = None
    node_rate: Quantity = NODE_RATE
    drives: Drives | None = None
    prices: Prices | None = None
    keep: int = 2

    def with_nodes(self, nodes: int) -> Cluster:
        """The same cluster with another number of nodes of the same failure rate.

        Raises:
            ValueError: Its own number of nodes is unknown.
        """
        if self.nodes is None:
            raise ValueError(
                "nodes: a cluster that is known only by its mean time between failures cannot be "
                "scaled; give its nodes"
            )
        known = None if self.mtbf is None else self.mtbf.scaled(self.nodes / nodes)
        return replace(self, nodes=nodes, mtbf=known)


def cluster_of(
    *,
    mtbf_seconds: float | None = None,
    nodes: int | None = None,
    node_rate: float | None = None,
    **more: Any,
) -> Cluster:
    """A cluster from its mean time between failures, or from its nodes and the rate of one.

    Args:
        mtbf_seconds: Mean seconds between failures of the whole job.
        nodes: Number of nodes.
        node_rate: Failures per 1,000 node-days; `failures.NODE_RATE` if not given.
        more: Further fields of `Cluster`.

    Raises:
        ValueError: A number is out of range.
    """
    if mtbf_seconds is not None:
        if not (math.isfinite(mtbf_seconds) and mtbf_seconds > 0):
            raise ValueError(f"mtbf: expected more than 0 s between failures, not {mtbf_seconds!r}")
        more["mtbf"] = given(mtbf_seconds, "s", "given as such")
    if node_rate is not None:
        more["node_rate"] = given(node_rate, NODE_RATE.unit, "node_rate")
    return Cluster(nodes=nodes, **more)
