"""`Flattened`: what comes of a state that is taken apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._native import _Alias, _Linked
    from penstock.tensors.memory import TensorSource


@dataclass(frozen=True, slots=True)
class Flattened:
    """A state, taken apart.

    Attributes:
        tensors: What to store, in the order of the state.
        aliases: Further names of those, and windows of them.
        tree: The rest, as JSON text.
        linked: What lies in files already, counted behind the tensors.
        overlaps: Leaves that share memory, where they were asked for.
        untied: Names of tensors that share memory with another one, and come back independent.
    """

    tensors: list[TensorSource]
    aliases: list[_Alias]
    tree: str
    linked: _Linked
    overlaps: Sequence[Overlap] = ()
    untied: Sequence[tuple[str, str]] = ()


class Overlap(NamedTuple):
    """Leaves that share memory.

    Attributes:
        sources: Indices of those that are stored.
        values: All of them.
    """

    sources: list[int]
    values: list[Any]
