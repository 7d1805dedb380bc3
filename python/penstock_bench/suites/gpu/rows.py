"""What has to be reached: a row each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One promise.

    Attributes:
        title: What is measured.
        limit: What has to be reached, or not passed.
        is_ceiling: Whether the limit is not to be passed.
        unit: Of the limit and of what is found; nothing for a ratio.
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
    "gather": Row("gather of cached rows into the GPU, of the better of two ways", 0.9),
    "gather_disk": Row("gather from the disk into the GPU, of fio's reads", 0.9),
    "ring_latency": Row("a round trip of the GPU's ring", 5, is_ceiling=True, unit="us"),
    "ring_rate": Row("entries of the GPU's ring", 1e6, unit="/s"),
    "ring_reads": Row("reads by the GPU's ring, of those by the processor", 0.95),
}
"""By the names that measurements know them by, in the order of the table."""
