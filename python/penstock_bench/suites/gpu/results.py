"""What came out of a run: values of rows, other figures, and reasons for what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.gpu.rows import ROWS
from penstock_bench.suites.save_load.results import Spread, plain, spread, write

if TYPE_CHECKING:
    from pathlib import Path

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
    """

    machine: dict[str, Any]
    gpu: dict[str, Any]
    places: dict[str, Any]
    settings: dict[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, row: str, value: float) -> None:
        """Adds what a round came to.

        Raises:
            KeyError: There is no such row.
        """
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
        write(path, self, rows=self.as_json())
