"""The promises of GPUs, a row each, and what a run found: values, figures, reasons, the table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from penstock_bench.results.samples import write_json
from penstock_bench.results.spread import Spread, plain, spread

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One promise.

    A ceiling is not to be passed. A ratio has no unit.
    """

    title: str
    limit: float
    is_ceiling: bool = False
    unit: str = ""

    @property
    def bar(self) -> str:
        """The limit, in words."""
        return f"{'<=' if self.is_ceiling else '>='} {self.limit:,g}{self.unit and ' '}{self.unit}"

    def is_met(self, found: float) -> bool:
        """Whether a median is good enough."""
        return found <= self.limit if self.is_ceiling else found >= self.limit


ROWS = {
    "staging": Row("staging out of the GPU, of its link", 0.95),
    "stall": Row("stall of save_async, of bytes / link", 1.10, is_ceiling=True),
    "stall_dcp": Row("stall of save_async, of a warm DCP stager's", 0.5, is_ceiling=True),
    "lazy_stall": Row("stall of save_async(lazy=True)", 5, is_ceiling=True, unit="ms"),
    "lazy_steps": Row("what a lazy save adds to 8 steps of a training", 0.01, is_ceiling=True),
    "save_memory": Row("save to tmpfs, of the same from memory of the host", 0.97),
    "save_disk": Row("save to the disk, of the same from memory of the host", 0.97),
    "load_memory": Row("verified load from tmpfs, of the link", 0.85),
    "load_fastsafetensors": Row("load from tmpfs, of fastsafetensors (nogds)", 3),
    "load_safetensors": Row("load from tmpfs, of safetensors", 3),
    "load_instanttensor": Row("load from tmpfs, of InstantTensor", 1),
    "load_fio": Row("verified load from the disk, of fio", 0.97),
    "load_kvikio": Row("load from the disk, of kvikio", 1.1),
    "load_cufile": Row("load from the disk, of cuFile in compat mode", 1.1),
    "pinning": Row("pinning, times as fast as cudaHostAlloc", 4),
    "pinned_again": Row("what a second save pins", 0, is_ceiling=True, unit="bytes"),
    "graphs": Row("graph captures beside saves that are voided", 0, is_ceiling=True),
    "conformance": Row("failures of the suite of crates/cuda on this driver", 0, is_ceiling=True),
    "torn": Row("states that a lazy save has torn", 0, is_ceiling=True),
    "leaks": Row("kinds of things that many saves leave", 0, is_ceiling=True),
    "gather_1k": Row("gather of cached rows of 1 KiB into the GPU, of the better of two ways", 0.9),
    "gather_4k": Row("gather of cached rows of 4 KiB into the GPU, of the better of two ways", 0.9),
    "gather_disk": Row("gather from the disk into the GPU, of fio's reads", 0.9),
    "ring_latency": Row("a round trip of the GPU's ring", 5, is_ceiling=True, unit="us"),
    "ring_rate": Row("entries of the GPU's ring", 1e6, unit="/s"),
    "ring_reads": Row("reads by the GPU's ring, of those by the processor", 0.95),
}
"""By the names that measurements know them by, in the order of the table."""

_NEVER = "the run ended before"


@dataclass
class Results:
    """A whole run.

    Attributes:
        machine: The machine and its software.
        gpu: The GPU, its driver, and who stands in for it.
        places: File systems that were used.
        settings: How it was asked for.
        values: What rows came to, a value of each round.
        figures: Everything else that was measured, likewise; their names say the unit.
        reasons: Why a row has no value.
        notes: What is to be known of a row beside its value.
        groups: Measured groups by name: when, for how long, of which revision, and whether whole.
    """

    machine: dict[str, Any]
    gpu: dict[str, Any]
    places: dict[str, Any]
    settings: dict[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    def continue_from(self, path: Path) -> None:
        """Takes over the groups of an earlier run on the same kind of GPU."""
        try:
            found = json.loads(path.read_text())
            earlier = Results(**{one.name: found[one.name] for one in fields(Results)})
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: it has no results of `make gpu`: {error!r}") from error
        size, earlier_size = self.settings["size_bytes"], earlier.settings["size_bytes"]
        if size != earlier_size:
            raise ValueError(
                f"{path}: it was measured with {earlier_size / 1e9:g} GB, and this run has "
                f"{size / 1e9:g} GB: name another directory"
            )
        self.values, self.figures, self.groups = earlier.values, earlier.figures, earlier.groups
        self.notes, self.reasons = earlier.notes, earlier.reasons

    def forget(self, group: str, rows: tuple[str, ...]) -> None:
        """Drops what an earlier run measured of a group, which is measured anew."""
        for row in rows:
            self.values.pop(row, None)
            self.notes.pop(row, None)
            self.reasons.pop(row, None)
        for name in self.groups.pop(group, {}).get("figures", ()):
            self.figures.pop(name, None)

    def is_whole(self, group: str) -> bool:
        """Whether a run has measured all rounds of a group."""
        return bool(self.groups.get(group, {}).get("is_whole"))

    def add(self, row: str, value: float) -> None:
        """Adds what a round came to."""
        self.values.setdefault(row, []).append(value)
        if row not in ROWS:
            raise KeyError(row)

    def figure(self, name: str, value: float) -> None:
        """Adds a figure of a round."""
        self.figures.setdefault(name, []).append(value)

    def skip(self, row: str, reason: str) -> None:
        """Says why a row has no value, or none of some rounds; the first reason counts."""
        self.reasons.setdefault(row, " ".join(reason.split())[:300])

    def spread(self, row: str) -> Spread | None:
        """Of all rounds of a row."""
        return spread(self.values.get(row, []))

    def reason(self, row: str) -> str | None:
        """Why a row has no value; None if it has."""
        return None if self.values.get(row) else self.reasons.get(row, _NEVER)

    def as_json(self) -> list[dict[str, Any]]:
        """Every row, with what became of it."""
        found = []
        for name, row in ROWS.items():
            values = self.spread(name)
            found.append(
                {
                    "row": name,
                    "title": row.title,
                    "bar": row.bar,
                    "found": plain(values),
                    "rounds": self.values.get(name, []),
                    "is_met": row.is_met(values.median) if values else None,
                    "not_run": self.reason(name),
                    "note": self.notes.get(name),
                }
            )
        return found

    def write(self, path: Path) -> None:
        """Everything, as JSON."""
        write_json(path, {**asdict(self), "rows": self.as_json()})


SMOKE = (
    "**This ran on the driver for tests, at small sizes: it shows that everything runs. No figure "
    "says anything about a GPU.**"
)


def markdown(results: Results) -> str:
    """Everything that a run shows."""
    gpu, settings = results.gpu, results.settings
    lines = [
        f"# {gpu['name']}",
        "",
        *([SMOKE, ""] if gpu["is_stand_in"] else []),
        f"Driver for CUDA {gpu['cuda']}, PyTorch {gpu['torch']}; {results.machine['processor']}, "
        f"{results.machine['cores_usable']} cores, Linux {results.machine['kernel']}. "
        f"{settings['size_bytes'] / 1e9:.2f} GB of tensors, {settings['rounds']} interleaved "
        f"rounds, {settings['seconds']:.0f} s in all. Medians [least, most]; a ratio is of one "
        "round, L the rate of the link in the same round.",
        "",
        *(
            f"- {name}: {place['directory']}, {place['file_system']} on {place['device']}"
            for name, place in results.places.items()
        ),
        "",
        "| what | bar | found | |",
        "|---|---|---|---|",
        *(_row(results, name) for name in ROWS),
    ]
    notes = [f"- {ROWS[name].title}: {note}" for name, note in results.notes.items()]
    if notes:
        lines += ["", *notes]
    lines += ["", "| figure | median [least, most] |", "|---|---|"]
    lines += [f"| {name} | {_figures(values)} |" for name, values in results.figures.items()]
    return "\n".join(lines) + "\n"


def _row(results: Results, name: str) -> str:
    row = ROWS[name]
    found = results.spread(name)
    if found is None:
        return f"| {row.title} | {row.bar} | not run: {results.reason(name)} | |"
    unit = f" {row.unit}" if row.unit else ""
    verdict = "met" if row.is_met(found.median) else "**missed**"
    if results.gpu["is_stand_in"]:
        verdict = ""
    return f"| {row.title} | {row.bar} | {_figures(results.values[name])}{unit} | {verdict} |"


def _figures(values: list[float]) -> str:
    found = spread(values)
    if found is None:
        return "-"
    ends = f" [{found.least:.3g}, {found.most:.3g}]" if len(values) > 1 else ""
    return f"{found.median:.3g}{ends}"
