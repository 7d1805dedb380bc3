"""`Flattened`: the result of flattening a state: tensors, aliases, tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._native import _Alias
    from penstock.checkpoint.layout.tiling import Pieces
    from penstock.tensors.native_rows import Linked, TensorSource


@dataclass(frozen=True, slots=True)
class Flattened:
    """A flattened state.

    Attributes:
        tensors: The tensors to store, in the order of the state.
        aliases: Further names of tensors, and windows of them.
        tree: All other values, as JSON text.
        linked: Tensors already stored in files, numbered after the tensors.
        overlaps: Leaves that share memory, if requested.
        untied: Names of tensors that share memory with another, but are restored as independent.
        pieces: The arrays and tensors in pieces.
    """

    tensors: list[TensorSource]
    aliases: list[_Alias]
    tree: str
    linked: Linked
    overlaps: Sequence[Overlap] = ()
    untied: Sequence[tuple[str, str]] = ()
    pieces: Sequence[Pieces] = ()


class Overlap(NamedTuple):
    """Leaves that share memory: all their values, and the indices of the stored ones."""

    sources: list[int]
    values: list[Any]
