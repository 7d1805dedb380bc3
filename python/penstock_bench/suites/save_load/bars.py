"""The ratios that the project holds itself to, each computed within a round, then the median.

Two figures of one round were measured minutes apart on the same device, so their ratio holds though
the device drifts from run to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock_bench.harness.tables import Bar
from penstock_bench.peers.save_load import CONTENDERS
from penstock_bench.results.samples import quotient

if TYPE_CHECKING:
    from penstock_bench.results.samples import Figure, Samples
    from penstock_bench.results.spread import Spread

FIO = "fio"


class _Ratio(Protocol):
    def __call__(self, results: Samples[Any], state: str) -> Spread | None: ...


class _Goal(NamedTuple):
    """A ratio of some states, and what it has to reach; without a bar it is there to be seen."""

    title: str
    ratio: _Ratio
    states: tuple[str, ...]
    bar: float | None = None
    aim: float | None = None
    is_ceiling: bool = False


def judge(results: Samples[Any]) -> list[Bar]:
    """Every bar for every state that it belongs to and that was measured."""
    states = results.extra["states"]
    found = [
        Bar(goal.title, goal.ratio(results, state), goal.bar, goal.aim, goal.is_ceiling, state)
        for goal in _GOALS
        for state in goal.states
        if state in states
    ]
    return [*found, *_scaling(results)]


def _over(upper: str, *lower: str, operation: str, figure: Figure = "gb_per_second") -> _Ratio:
    """The ratio of a figure of one row to that of another one; of several, to the best rate."""

    def ratio(results: Samples[Any], state: str) -> Spread | None:
        return results.ratio(upper, *lower, figure=figure, state=state, operation=operation)

    return ratio


def _faster(operation: str, *others: str) -> _Ratio:
    return _over("penstock", *others, operation=operation)


_PEERS = tuple(
    row
    for name, entry in CONTENDERS.items()
    if entry.package != "penstock"
    for row in (name, *(f"{name}:{variant}" for variant in entry.load_variants))
)
_DCP, _TORCH = ("dcp-1", "dcp-4"), ("torch", "torch-tuned")
_LLAMA, _SMALL, _OTHERS = ("llama",), ("small",), ("gpt2", "small")
_CPU, _MACHINE_CPU = "cpu_seconds_per_gb", "machine_cpu_seconds_per_gb"

# Time with digests over time without: 1.03 is a cost of 3 %. A save has no such switch; one would
# be a contender beside the others, and a bar of the same kind here.
_DIGESTS = _over("penstock:unverified", "penstock", operation="load")

_GOALS = (
    _Goal("durable save / fio's best write", _faster("save", FIO), _LLAMA, 0.90, 0.97),
    _Goal("durable save / best other library", _faster("save", *_PEERS), _LLAMA, 1.7, 2.2),
    _Goal("cold verified load / fio's best read", _faster("load", FIO), _LLAMA, 0.90, 0.97),
    _Goal("cold verified load / best other library", _faster("load", *_PEERS), _LLAMA, 1.3, 1.5),
    _Goal("durable save / DCP", _faster("save", *_DCP), _SMALL, 20, 50),
    _Goal("cold load / DCP", _faster("load", *_DCP), _SMALL, 20, 50),
    _Goal("durable save / torch.save", _faster("save", *_TORCH), _SMALL, 2, 5),
    _Goal("cold load / torch.load", _faster("load", *_TORCH), _SMALL, 2, 5),
    _Goal("time of a load with digests / without", _DIGESTS, _LLAMA, 1.03, 1.01, True),
    _Goal(
        "CPU seconds per GB saved / safetensors",
        _over("penstock", "safetensors", operation="save", figure=_CPU),
        _LLAMA,
        1.0,
        0.6,
        True,
    ),
    _Goal(
        "the same for the whole machine, write-back included",
        _over("penstock", "safetensors", operation="save", figure=_MACHINE_CPU),
        _LLAMA,
    ),
    _Goal(
        "threads engine / uring engine, durable save",
        _over("penstock-threads", "penstock", operation="save"),
        _LLAMA,
        0.85,
        0.95,
    ),
    _Goal("durable save / fio's best write", _faster("save", FIO), _OTHERS),
    _Goal("durable save / best other library", _faster("save", *_PEERS), _OTHERS),
    _Goal("cold verified load / fio's best read", _faster("load", FIO), _OTHERS),
    _Goal("cold verified load / best other library", _faster("load", *_PEERS), _OTHERS),
)
_SCALING_BAR, _SCALING_AIM = 4.2, 4.0


def _scaling(results: Samples[Any]) -> list[Bar]:
    """Time of the largest save over that of the smallest, where `--scaling` measured them."""
    sizes = {label: about["bytes"] for label, about in results.extra["states"].items()}
    labels = sorted(
        (label for label in sizes if label.startswith("scaling")), key=sizes.__getitem__
    )
    if len(labels) < 2:
        return []
    small, large = labels[0], labels[-1]
    seconds = [results.values("penstock", state=one, operation="save") for one in (large, small)]
    factor = sizes[large] / sizes[small]
    title = f"time of a save {factor:.2f} times as large ({large} / {small})"
    return [Bar(title, quotient(*seconds), _SCALING_BAR, _SCALING_AIM, True, "scaling")]
