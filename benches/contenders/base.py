"""What a contender is: a library, used as its documentation recommends for speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from benches.states import StateSpec

Detail = dict[str, Any]


class Contender(ABC):
    """A way to save and load a state. A fresh instance lives in the process of each operation.

    The runner syncs what `save` wrote, within the time. A `load` leaves every tensor in memory
    of its own: what a library maps from the file, the contender copies, within the time.
    """

    def input(self, spec: StateSpec) -> Any:
        """The state in the form that `save` takes; not timed."""
        return spec.nested()

    def targets(self, spec: StateSpec) -> Any:
        """What `load` fills, of memory that was never touched; not timed."""
        del spec

    @abstractmethod
    def save(self, directory: Path, state: Any) -> Detail | None:
        """Saves into an existing, empty directory; returns what is worth recording."""

    @abstractmethod
    def load(self, directory: Path, targets: Any, variant: str | None) -> tuple[Any, Detail | None]:
        """Loads; returns nested or flat tensors, and what is worth recording."""

    def close(self) -> None:  # noqa: B027
        """Ends what outlives a call; not timed."""


class FlatContender(Contender):
    """A contender that takes tensors alone, in a flat dictionary."""

    def input(self, spec: StateSpec) -> Any:
        """The tensors under dotted names, tied ones once, plain values left out."""
        return spec.flat()
