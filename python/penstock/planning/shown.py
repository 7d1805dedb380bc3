"""Advice in words and numbers for people; the command line and the page show the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.planning.models.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.planning.advice import Advice
    from penstock.planning.models.quantity import Quantity

_SPREAD_MIN = 1.02
"""A range whose ends differ by less than this factor is not shown."""

WHAT_IF = ("nodes", "save every", "counts", "saving", "lost", "failures a day")
"""Columns of `what_if`."""

INPUTS = ("input", "value", "from", "")
"""Columns of `inputs`."""


def headline(advice: Advice) -> str:
    """The answer in one sentence."""
    low, high = advice.interval.bounds
    text = f"save every {show_seconds(advice.interval.value)}"
    if high > low * _SPREAD_MIN:
        text += f" [{show_seconds(low)} to {show_seconds(high)}]"
    if advice.steps is not None:
        text += f" = {advice.steps:,} steps"
    low, high = advice.goodput.bounds
    text += f"; {advice.goodput.value:.1%} of the time is training that counts"
    return text + (f" [{low:.1%} to {high:.1%}]" if high - low > 0.001 else "")


def parts(advice: Advice) -> list[tuple[str, float]]:
    """Names and shares of the parts of the time."""
    shares = advice.shares
    return [
        ("training that counts", shares.goodput),
        ("saving", shares.saving),
        ("work lost to failures", shares.lost),
        ("waiting for restarts", shares.down),
        ("restarting", shares.restarting),
    ]


def facts(advice: Advice) -> Iterator[tuple[str, str]]:
    """Names and values of all results that are known."""
    for name, share in parts(advice):
        yield name, f"{share:.1%}"
    loss = show_seconds(advice.lost_seconds)
    yield "a failure", f"{advice.failures_per_day:.3g} a day, each loses {loss}"
    if advice.bytes_per_day is not None:
        yield "written", f"{show_bytes(advice.bytes_per_day)} a day"
    if advice.capacity_bytes is not None:
        size, kept = show_bytes(advice.capacity_bytes), advice.cluster.keep
        yield "storage", f"{size} for {kept} kept and one in flight"
    if advice.drive_writes_per_day is not None:
        yield "drive", f"{advice.drive_writes_per_day:.2g} drive writes a day"
    if advice.drive_days is not None:
        yield "drive's endurance", f"used up in {show_seconds(advice.drive_days * 86_400)}"
    if advice.dollars_per_month is not None:
        yield "bucket", f"${advice.dollars_per_month:,.2f} a month"


def what_if(others: Sequence[Advice]) -> Iterator[tuple[str, ...]]:
    """A row for each advice for another number of nodes."""
    for one in others:
        yield (
            f"{one.cluster.nodes:,}",
            show_seconds(one.interval.value),
            f"{one.shares.goodput:.1%}",
            f"{one.shares.saving:.1%}",
            f"{one.shares.lost:.1%}",
            f"{one.failures_per_day:.3g}",
        )


def inputs(known: dict[str, Quantity]) -> Iterator[tuple[str, str, str, str]]:
    """A row for each input: name, value with its spread, origin, source."""
    for name, one in known.items():
        show = {"s": show_seconds, "bytes": show_bytes}.get(one.unit, "{:.3g}".format)
        low, high = one.bounds
        spread = f" [{show(low)} to {show(high)}]" if high > low * _SPREAD_MIN else ""
        origin = "a guess" if one.is_guess else one.origin
        yield name.replace("_", " "), show(one.value) + spread, origin, one.source
