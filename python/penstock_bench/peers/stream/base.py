"""The interface of a library that generates text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Setting:
    """The model and the memory to use.

    Attributes:
        model: A directory as `save_pretrained` of transformers makes it.
        place: A directory of its own, for files that it wants to have otherwise.
        memory_bytes: What of its memory may be weights.
    """

    model: str
    place: str
    memory_bytes: int

    @property
    def files(self) -> Path:
        """The directory of its own."""
        return Path(self.place)


class Generator(Protocol):
    """One way to have the weights.

    Attributes:
        joins_early: Whether it opens the model within the limit; else its memory is limited, in its
            favour, from the first token on.
    """

    joins_early: bool

    def prepare(self, setting: Setting) -> None:
        """Makes what it reads from, once, in a process without a limit; not timed."""

    def open(self, setting: Setting) -> Any:
        """A model with the `generate` of transformers."""

    def report(self) -> dict[str, Any]:
        """Its final report: ``pass_bytes``, ``notes``."""
