"""The command behind `make bench SUITE=published`: published figures beside those of our models.

Inputs of a row come from its source alone, and no number is fitted to the output that it is
compared with. docs/planning.md has the table and what cannot be reproduced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from penstock.common.console import console, json_option, print_json, table
from penstock.planning import (
    best_period,
    copies_survive,
    daly,
    drive_writes_per_day,
    ettr,
    given,
    mtbf,
    rfo,
    young,
)
from penstock.planning.models.failures import NODE_RATE
from penstock.planning.simulation import load, simulate
from penstock_bench.workloads.models import MODELS, dlio_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE = 0.10
"""Largest difference of a row that counts as reproduced, as a share of what is published."""

HOUR, DAY = 3600.0, 86_400.0


@dataclass(frozen=True)
class Row:
    """A published figure and what our model gives.

    Attributes:
        number: Number of the row in the documentation.
        source: Publication.
        what: The figure, with its unit.
        published: The value there.
        modelled: Ours, from the source's inputs.
        is_bound: Whether the source says "more than"; reproduced then means not below it.
    """

    number: int
    source: str
    what: str
    published: float
    modelled: float
    is_bound: bool = False

    @property
    def difference(self) -> float:
        """Ours against the published value, as a share of it."""
        return self.modelled / self.published - 1

    @property
    def is_reproduced(self) -> bool:
        """Whether the difference is within `TOLERANCE`."""
        if self.is_bound:
            return self.modelled >= self.published
        return abs(self.difference) <= TOLERANCE


# Times between failures of 2^10 … 2^19 nodes, and four periods for each: arXiv 1302.3752.
_PERIODS = {
    3849609: (68567, 68573, 67961, 68240),
    1924805: (48660, 48668, 48052, 48320),
    962402: (34584, 34595, 33972, 34189),
    481201: (24630, 24646, 24014, 24231),
    240601: (17592, 17615, 16968, 17194),
    120300: (12615, 12648, 11982, 12218),
    60150: (9096, 9142, 8449, 8701),
    30075: (6608, 6673, 5941, 6214),
    15038: (4848, 4940, 4154, 4458),
    7519: (3604, 3733, 2869, 3218),
}


def rows() -> Iterator[Row]:
    """All rows of the table, in their order."""
    yield from _formulas()
    yield from _clusters()
    yield from _storage()


def _formulas() -> Iterator[Row]:
    worst = (0.0, 1.0, 1.0)
    for time, published in _PERIODS.items():
        ours = (
            young(600, time),
            daly(600, time, 600, 60),
            rfo(600, time, 600, 60),
            best_period(600, time),
        )
        for theirs, mine in zip(published, ours, strict=True):
            worst = max(worst, (abs(mine / theirs - 1), float(theirs), mine))
    source = "Aupy, Robert, Vivien, Zaidouni 2013"
    yield Row(1, source, "40 periods, the worst of them (s)", worst[1], worst[2])


def _clusters() -> Iterator[Row]:
    meta = "Meta RSC, arXiv 2410.21680"
    for nodes, hours in ((2048, 1.8), (16_384, 0.23)):
        time = mtbf(nodes, given(6.50, NODE_RATE.unit, meta)).value / HOUR
        yield Row(2, meta, f"time between failures, {nodes * 8:,} GPUs (h)", hours, time)
    for number, preset, published in ((3, "rsc-1", 0.93), (4, "rsc-2", 0.90)):
        mean = float(simulate(load(preset)).goodput.mean())
        yield Row(number, meta, f"effective training time, {preset}, simulated", published, mean)
    for nodes in (256, 512):
        value = ettr(6.50e-3, nodes, period_seconds=HOUR, restart_seconds=300)
        yield Row(5, meta, f"effective training time, {nodes} nodes", 0.90, value, is_bound=True)
    llama = load("llama-3-405b")
    source = "Llama 3, arXiv 2407.21783"
    yield Row(
        6, source, "time between failures (h)", 54 * 24 / 419, llama.cluster.mtbf_seconds / HOUR
    )
    mean = float(simulate(llama).goodput.mean())
    yield Row(6, source, "effective training time, simulated", 0.90, mean, is_bound=True)
    source = "Meta FT-HSDP, arXiv 2602.00277"
    for stall, published in ((10, 0.44), (3, 0.80)):
        yield Row(7, source, f"effective time, a stall of {stall} min", published, 1 - stall / 18)
    for gpus, published in ((100_000, 30), (1_000_000, 3)):
        figure = f"time between failures, {gpus:,} GPUs (min)"
        yield Row(8, "MLCommons, Epoch AI", figure, published, 50_000 * 60 / gpus)
    source = "BLOOM 176B, BigScience"
    saves = 90 * DAY / (3 * HOUR)
    yield Row(9, source, "saves in 90 days", 720, saves)
    yield Row(9, source, "hours of them", 8, saves * 40 / HOUR)
    yield Row(9, source, "share of the time (%)", 0.37, 100 * 40 / (3 * HOUR))
    seconds = 530e9 * 12 / (20e9 / 8)
    yield Row(10, "Gemini, SOSP'23", "MT-NLG 530B to storage of 20 Gb/s (min)", 42, seconds / 60)
    for lost, published in ((2, 93.3), (3, 80.0)):
        percent = 100 * copies_survive(16, 2, lost)
        yield Row(11, "Gemini, SOSP'23", f"16 hosts in pairs, {lost} lost (%)", published, percent)


def _storage() -> Iterator[Row]:
    every, few = load("nvidia-340b-all"), load("nvidia-340b-few")
    yield Row(12, "NVIDIA 340B", "48 nodes write 4.3 TiB (s)", 16, every.write_seconds())
    yield Row(12, "NVIDIA 340B", "their peak (GB/s)", 275, every.peak_rate() / 1e9)
    yield Row(13, "NVIDIA 340B", "peak of 12 writers (GB/s)", 75, few.peak_rate() / 1e9)
    for name, published in (("llama3-8b", 105), ("llama3-70b", 912), ("llama3-405b", 5290)):
        size = dlio_bytes(MODELS[name]) / 2**30
        yield Row(14, "MLPerf Storage", f"checkpoint of {name} (GiB)", published, size)
    # Rows at the Gen5 drive's rate, read at the rate of Gen4; sampling and training of an A100.
    seconds = 2.87e6 * 18 / 1.5e6 + 3.6 + 4.6
    yield Row(15, "IGBH training on Gen4, GIDS", "an epoch (s)", 43.2, seconds)
    terabytes = 33 * 1636e9 / 1e12
    yield Row(16, "405B fill passes", "33 checkpoints of 1,636 GB (TB)", 54, terabytes)
    writes = 3 * drive_writes_per_day(33 * 1636e9, 61.44e12)
    yield Row(16, "405B fill passes", "three of them, writes of a drive", 2.64, writes)


@click.command()
@json_option
def main(as_json: bool) -> None:
    """Published figures beside those of Penstock's models; exits with 1 if one is missed."""
    found = list(rows())
    if as_json:
        print_json(
            {"rows": [{**one.__dict__, "is_reproduced": one.is_reproduced} for one in found]}
        )
    else:
        shown = table(
            "", "source", "figure", "published", "ours", "difference",
            numbers=("", "published", "ours", "difference"), folded=("source", "figure"),
        )  # fmt: skip
        for one in found:
            bound = "> " if one.is_bound else ""
            shown.add_row(
                str(one.number),
                one.source,
                one.what,
                f"{bound}{one.published:.4g}",
                f"{one.modelled:.4g}",
                "" if one.is_bound else f"{one.difference:+.1%}",
            )
        console().print(shown)
    if not all(one.is_reproduced and math.isfinite(one.modelled) for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
