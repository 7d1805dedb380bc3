"""The interface of a writer: a library, used as its documentation recommends for speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock_bench.harness.storage import files_below

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.workloads.content import StateSpec

Detail = dict[str, Any]
"""The report of a call.

Of these keys sums and tables are made, where they are there: ``direct_io`` (whether all data went
past the page cache), ``engine`` and ``engine_setup``, ``fallbacks``, ``syncs`` (calls of fsync and
fdatasync that are not made in Python), ``metadata`` (counts of others that concern files) and
``stall_seconds`` (what training waits for).
"""


class Writer(ABC):
    """A way to save and load the state of one rank, or of several that save together.

    The harness syncs files that `save` wrote and did not sync, within the time. A `load` leaves
    every tensor in memory of its own: tensors that a library maps from the file are copied, within
    the time. Libraries are imported by the first call, which is not timed.

    Attributes:
        synced: What is on stable storage when `save` returns: everything, names of files included;
            the content of files; or nothing for certain.
        is_flat: Whether it takes tensors alone, in a flat dictionary: under dotted names, tied ones
            once, plain values left out.
        fills: Whether `load` fills tensors that it is given.
        suffix: The end of the name of the rank's file.

    Args:
        rank: The number of this one.
        ranks: How many save together. More than one have initialized `torch.distributed`.
    """

    synced: ClassVar[Literal["everything", "files", "nothing"]] = "nothing"
    is_flat: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    suffix: ClassVar[str] = ""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank = rank
        self.ranks = ranks

    def input(self, source: StateSpec) -> Any:
        """The state in the form that `save` takes; not timed."""
        return source.flat() if self.is_flat else source.nested()

    def targets(self, source: StateSpec) -> Any:
        """Tensors for `load` to fill, in memory that was never touched; not timed."""
        if not self.fills:
            return None
        return source.flat_targets() if self.is_flat else source.nested_targets()

    def path(self, directory: Path) -> Path:
        """The file or the directory of this rank."""
        return directory / f"rank-{self.rank:05}{self.suffix}"

    @abstractmethod
    def save(self, directory: Path, state: Any) -> Detail | None:
        """Saves into an existing, empty directory, which all ranks share."""

    @abstractmethod
    def load(
        self, directory: Path, targets: Any, variant: str | None = None
    ) -> tuple[Any, Detail | None]:
        """Loads what this rank saved; returns nested or flat tensors, and what there is to tell."""

    def own_files(self, directory: Path) -> list[Path]:
        """The files that this rank wrote: those of all ranks are all files."""
        found = sorted(directory.glob(f"rank-{self.rank:05}*"))
        return [file for one in found for file in (files_below(one) if one.is_dir() else [one])]

    def close(self) -> None:  # noqa: B027
        """Ends what outlives a call; not timed."""
