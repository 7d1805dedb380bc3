"""The plan of a benchmark of checkpoints, which every rank receives."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_bench.workloads.models import Model

FULL_TIMES_BYTES = 1.02
"""Bytes of a file system that a checkpoint takes for each byte of its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements to make.

    Attributes:
        directory: Where: a directory that is nobody else's.
        model: The model, after scaling.
        ranks: Which ranks of its layout take part, one a process.
        label: What is saved, in words; the cases are named for it.
        writers: Names of those who save, in the order of the first round.
        rounds: How often each saves and loads.
        syncs: Whether a save ends when all is on stable storage.
        verifies: Whether every tensor that was loaded is compared.
        fill: The part of the file system, or of ``fill_bytes``, that saves fill, instead of rounds.
        fill_bytes: What to fill instead of the file system.
        passes: How often that is done.
    """

    directory: str
    model: Model
    ranks: list[int]
    label: str
    writers: list[str]
    rounds: int = 1
    syncs: bool = True
    verifies: bool = False
    fill: float | None = None
    fill_bytes: int | None = None
    passes: int = 1

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Plan:
        """A plan from the result of `dataclasses.asdict`."""
        return cls(**{**document, "model": Model(**document["model"])})

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        """The cases by label."""
        if self.fill is None:
            return {f"{what}, {self.label}": {"operation": what} for what in ("save", "load")}
        return {
            f"save, {self.label}, pass {index + 1}": {"operation": "save", "pass": index + 1}
            for index in range(self.passes)
        }

    def has_room(self, written_bytes: int, nbytes: int) -> bool:
        """Whether a further checkpoint fits into what is to be filled.

        Bytes are those of tensors: of this pass so far, and of a checkpoint.
        """
        fill, needed = self.fill or 0.0, nbytes * FULL_TIMES_BYTES
        if self.fill_bytes is not None:
            return written_bytes * FULL_TIMES_BYTES + needed <= fill * self.fill_bytes
        usage = shutil.disk_usage(Path(self.directory).parent)
        return usage.total - usage.free + needed <= fill * usage.total
