"""The interface of a writer: a library, used as its documentation recommends for speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.workloads.content import Source

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
    the time.

    Attributes:
        synced: What is on stable storage when `save` returns: everything, names of files included;
            the content of files; or nothing for certain.

    Args:
        rank: The number of this one.
        ranks: How many save together. More than one have initialized `torch.distributed`.
    """

    synced: ClassVar[Literal["everything", "files", "nothing"]] = "nothing"

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank = rank
        self.ranks = ranks

    def input(self, source: Source) -> Any:
        """The state in the form that `save` takes; not timed."""
        return source.nested()

    def targets(self, source: Source) -> Any:
        """Tensors for `load` to fill, in memory that was never touched; not timed."""
        del source

    @abstractmethod
    def save(self, directory: Path, state: Any) -> Detail | None:
        """Saves into an existing, empty directory, which all ranks share."""

    @abstractmethod
    def load(
        self, directory: Path, targets: Any, variant: str | None = None
    ) -> tuple[Any, Detail | None]:
        """Loads what this rank saved; returns nested or flat tensors, and what there is to tell."""

    @abstractmethod
    def own_files(self, directory: Path) -> list[Path]:
        """The files that this rank wrote: those of all ranks are all files."""

    def close(self) -> None:  # noqa: B027
        """Ends what outlives a call; not timed."""


class FlatWriter(Writer):
    """A writer that takes tensors alone, in a flat dictionary."""

    def input(self, source: Source) -> Any:
        """The tensors under dotted names, tied ones once, plain values left out."""
        return source.flat()
