"""What was measured of tensors at offsets of files, and the ratios that come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.save_load.results import Spread, plain, spread, write

if TYPE_CHECKING:
    from pathlib import Path

PENSTOCK, PENSTOCK_PLAIN = "penstock", "penstock-plain"
DEEPSPEED, DEEPSPEED_PLAIN = "deepspeed", "deepspeed-plain"
PENSTOCK_REUSED, FIO = "penstock-reused", "fio"
ROWS = {
    PENSTOCK: "TensorIO, tensors of Buffers, at the block size; else its defaults",
    DEEPSPEED: "async_io, pinned tensors, at the best point of its sweep at the block size",
    PENSTOCK_REUSED: "the same, of no more memory than fio uses, over and over as fio does",
    FIO: "io_uring, O_DIRECT, huge pages, as many bytes in flight as Penstock",
    PENSTOCK_PLAIN: "TensorIO, tensors of PyTorch, all defaults",
    DEEPSPEED_PLAIN: "async_io, tensors of PyTorch, all defaults",
}
LATENCY = "latency"


@dataclass
class Sample:
    """One operation.

    Attributes:
        row: A name of `ROWS`.
        round_index: The round, from 0.
        operation: ``read`` or ``write``, with the block size where it is set; or `LATENCY`.
        nbytes: That were moved.
        seconds: From the call until all is moved; of `LATENCY`, of one read, the median.
        cpu_seconds: Of the process and its threads meanwhile.
        error: Why there is no measurement.
    """

    row: str
    round_index: int
    operation: str
    nbytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    error: str | None = None

    @property
    def gb_per_second(self) -> float:
        """The rate."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Processor time."""
        return self.cpu_seconds / self.nbytes * 1e9


@dataclass
class Results:
    """A whole run.

    Attributes:
        best: DeepSpeed's best setting of each operation, in words.
        sweep: All that was tried for it: operation, setting, seconds.
    """

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    best: dict[str, str] = field(default_factory=dict)
    sweep: list[tuple[str, str, float]] = field(default_factory=list)

    @property
    def operations(self) -> list[str]:
        """What was measured."""
        return list(dict.fromkeys(one.operation for one in self.samples))

    def spread(self, row: str, operation: str, what: str = "gb_per_second") -> Spread | None:
        """A cell of the table."""
        return spread(list(self._values(row, operation, what).values()))

    def ratio(
        self, operation: str, upper: str, lower: str, what: str = "gb_per_second"
    ) -> Spread | None:
        """How many times one is the other, within a round."""
        above, below = (self._values(row, operation, what) for row in (upper, lower))
        return spread([above[index] / below[index] for index in above if index in below])

    def errors(self) -> list[str]:
        """Why measurements are missing, each reason once."""
        found = [f"{one.row}, {one.operation}: {one.error}" for one in self.samples if one.error]
        return list(dict.fromkeys(found))

    def write(self, path: Path) -> None:
        """Everything as JSON, with the statistics beside the samples they come from."""
        summary = {
            row: {
                operation: plain(self.spread(row, operation))
                for operation in self.operations
                if operation != LATENCY
            }
            for row in ROWS
        }
        write(path, self, gb_per_second=summary)

    def _values(self, row: str, operation: str, what: str) -> dict[int, float]:
        return {
            one.round_index: getattr(one, what)
            for one in self.samples
            if one.error is None and (one.row, one.operation) == (row, operation)
        }
