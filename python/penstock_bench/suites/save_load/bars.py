"""The ratios that the project holds itself to, each computed within a round, then the median.

Two numbers of one round were measured minutes apart on the same device, so their ratio holds
though the device drifts from run to run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock_bench.peers.save_load import CONTENDERS
from penstock_bench.suites.save_load.results import Results, Sample, Spread, spread
from penstock_bench.suites.save_load.runner import FIO

if TYPE_CHECKING:
    from collections.abc import Callable

Round = dict[tuple[str, str], Sample]


@dataclass(frozen=True)
class Bar:
    """One ratio, what it has to reach and what it aims at; some are there to be seen only."""

    title: str
    value: Callable[[Round], float | None]
    states: tuple[str, ...]
    bar: float | None = None
    aim: float | None = None
    is_ceiling: bool = False


@dataclass(frozen=True)
class Verdict:
    """What came out for a bar."""

    state: str
    title: str
    found: Spread | None
    bar: float | None
    aim: float | None
    is_ceiling: bool

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the bar; None if there is none, or no number."""
        if self.found is None or self.bar is None:
            return None
        return self.found.median <= self.bar if self.is_ceiling else self.found.median >= self.bar

    def as_json(self) -> dict[str, Any]:
        """The verdict for the results file."""
        found = self.found._asdict() if self.found else None
        return {**asdict(self), "found": found, "is_met": self.is_met}


def judge(results: Results) -> list[Verdict]:
    """Every bar for every state it belongs to and that was measured."""
    verdicts = []
    for bar in BARS:
        for state in (name for name in bar.states if name in results.states):
            rounds = _rounds(results, state)
            values = [value for one in rounds if (value := bar.value(one)) is not None]
            found = spread(values)
            verdicts.append(Verdict(state, bar.title, found, bar.bar, bar.aim, bar.is_ceiling))
    return [*verdicts, *_scaling(results)]


def _rounds(results: Results, state: str) -> list[Round]:
    rounds: dict[int, Round] = {}
    for sample in results.samples:
        if sample.state == state and sample.error is None:
            rounds.setdefault(sample.round_index, {})[sample.row, sample.operation] = sample
    return list(rounds.values())


def _rate(*rows: str, operation: str) -> Callable[[Round], float | None]:
    """The best rate among rows."""

    def value(one: Round) -> float | None:
        found = [one[row, operation].gb_per_second for row in rows if (row, operation) in one]
        return max(found, default=None)

    return value


def _over(
    upper: Callable[[Round], float | None], lower: Callable[[Round], float | None]
) -> Callable[[Round], float | None]:
    def value(one: Round) -> float | None:
        above, below = upper(one), lower(one)
        return above / below if above is not None and below else None

    return value


def _faster(operation: str, *others: str) -> Callable[[Round], float | None]:
    return _over(_rate("penstock", operation=operation), _rate(*others, operation=operation))


def _cpu(row: str) -> Callable[[Round], float | None]:
    return lambda one: one[row, "save"].cpu_seconds_per_gb if (row, "save") in one else None


def _machine_cpu(row: str) -> Callable[[Round], float | None]:
    return lambda one: one[row, "save"].machine_cpu_seconds_per_gb if (row, "save") in one else None


def _digest_cost(one: Round) -> float | None:
    # Seconds with digests over seconds without: 1.03 is a cost of 3 %. A save has no such switch;
    # one would be a contender beside the others, and a bar of the same kind here.
    return _over(
        _rate("penstock:unverified", operation="load"), _rate("penstock", operation="load")
    )(one)


_PEERS = tuple(
    row
    for name, entry in CONTENDERS.items()
    if entry.package != "penstock"
    for row in (name, *(f"{name}:{variant}" for variant in entry.load_variants))
)
_DCP = ("dcp-1", "dcp-4")
_TORCH = ("torch", "torch-tuned")

BARS = (
    Bar("durable save / fio's best write", _faster("save", FIO), ("llama",), 0.90, 0.97),
    Bar("durable save / best other library", _faster("save", *_PEERS), ("llama",), 1.7, 2.2),
    Bar("cold verified load / fio's best read", _faster("load", FIO), ("llama",), 0.90, 0.97),
    Bar("cold verified load / best other library", _faster("load", *_PEERS), ("llama",), 1.3, 1.5),
    Bar("durable save / DCP", _faster("save", *_DCP), ("small",), 20, 50),
    Bar("cold load / DCP", _faster("load", *_DCP), ("small",), 20, 50),
    Bar("durable save / torch.save", _faster("save", *_TORCH), ("small",), 2, 5),
    Bar("cold load / torch.load", _faster("load", *_TORCH), ("small",), 2, 5),
    Bar("time of a load with digests / without", _digest_cost, ("llama",), 1.03, 1.01, True),
    Bar(
        "CPU seconds per GB saved / safetensors",
        _over(_cpu("penstock"), _cpu("safetensors")),
        ("llama",),
        1.0,
        0.6,
        True,
    ),
    Bar(
        "the same for the whole machine, write-back included",
        _over(_machine_cpu("penstock"), _machine_cpu("safetensors")),
        ("llama",),
    ),
    Bar(
        "threads engine / uring engine, durable save",
        _over(_rate("penstock-threads", operation="save"), _rate("penstock", operation="save")),
        ("llama",),
        0.85,
        0.95,
    ),
    Bar("durable save / fio's best write", _faster("save", FIO), ("gpt2", "small")),
    Bar("durable save / best other library", _faster("save", *_PEERS), ("gpt2", "small")),
    Bar("cold verified load / fio's best read", _faster("load", FIO), ("gpt2", "small")),
    Bar("cold verified load / best other library", _faster("load", *_PEERS), ("gpt2", "small")),
)
SCALING_BAR = 4.2
SCALING_AIM = 4.0


def _scaling(results: Results) -> list[Verdict]:
    """Time of the largest save over that of the smallest, where `--scaling` measured them."""
    labels = [label for label in results.states if label.startswith("scaling")]
    if len(labels) < 2:
        return []
    sizes = sorted(labels, key=lambda label: results.states[label]["bytes"])
    small, large = _seconds_by_round(results, sizes[0]), _seconds_by_round(results, sizes[-1])
    found = spread([large[index] / small[index] for index in large if index in small])
    factor = results.states[sizes[-1]]["bytes"] / results.states[sizes[0]]["bytes"]
    title = f"time of a save {factor:.2f} times as large ({sizes[-1]} / {sizes[0]})"
    return [Verdict("scaling", title, found, SCALING_BAR, SCALING_AIM, is_ceiling=True)]


def _seconds_by_round(results: Results, state: str) -> dict[int, float]:
    samples = results.good(state, "penstock", "save")
    return {sample.round_index: sample.seconds for sample in samples}
