"""Loads a partial checkpoint: its available leaves, and errors for missing ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.references import is_composite, references
from penstock.checkpoint.state.tree.scalars import TreeError, member
from penstock.checkpoint.state.tree.select import without
from penstock.errors import PartialCheckpointError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from penstock import _native
    from penstock.checkpoint.state.tree.tree import Node

_NAMED_MAX = 8


def is_missing(node: Node) -> bool:
    """Whether a leaf is a tensor that could not be salvaged, or contains one."""
    if type(node) is not dict:
        return False
    if node.get("$") == "object" or is_composite(node):
        return any(one.get("$") == "missing" for one in references(node))
    return node.get("$") == "missing"


def loadable(
    node: Node,
    checkpoint: _native.Checkpoint,
    path: str,
    *,
    allow_partial: bool,
    lost: Sequence[str] = (),
) -> tuple[Node, bool]:
    """Returns the loadable part of the tree, and whether leaves are left out.

    Args:
        node: The tree, `SKIPPED` where nothing was requested.
        checkpoint: The checkpoint of the tree.
        path: The path of the checkpoint.
        allow_partial: Whether missing leaves are left out.
        lost: Requested leaves that are missing without a mark in the tree.

    Raises:
        PartialCheckpointError: A requested leaf is missing, or was never checked, and
            ``allow_partial`` is False; or no leaf is left.
        TreeError: The tree is malformed.
    """
    partial = checkpoint.partial
    if partial is None:
        return node, False
    _, unverified = partial
    names = [name for name, leaf in tree.leaves(node) if is_missing(leaf)]
    if allow_partial:
        rest = without(node, is_missing) if names else node
        if names and rest is tree.SKIPPED:
            raise _error(
                f"nothing of it is left of what was asked for: {_some(names)}", path, names
            )
        return rest, bool(names or lost)
    names += lost
    if unverified:
        raise _error(
            "it was salvaged without digests, so nothing proves that it is what was saved; "
            "penstock.load with allow_partial=True loads it all the same",
            path,
            names,
        )
    if names:
        raise _error(
            f"it was salvaged from a damaged one and lacks {_some(names)}; penstock.load with "
            "allow_partial=True loads the rest, with keys= what of that you name",
            path,
            names,
        )
    return node, False


class SalvageLosses(NamedTuple):
    """Losses of a salvage, except ranks' own tensors, which their trees mark as missing.

    Attributes:
        shared: Names of shared tensors, to which trees still refer.
        states: For each rank whose structure and plain values are lost, the name of that loss.
    """

    shared: frozenset[str]
    states: dict[int, str]

    @classmethod
    def of(cls, checkpoint: _native.Checkpoint) -> SalvageLosses:
        """Returns the losses of a checkpoint; none unless it is partial."""
        rows = [] if checkpoint.partial is None else checkpoint.missing()
        shared = frozenset(row.name for row in rows if row.kind == "shared")
        states = {
            row.rank: row.name for row in rows if row.kind == "state" and row.rank is not None
        }
        return cls(shared, states)

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """Returns the losses of one rank."""
        return (self.states[rank],) if rank in self.states else ()

    def beside(self, names: Container[str]) -> tuple[str, ...]:
        """Returns all losses, without the shared tensors of these names."""
        rest = sorted(name for name in self.shared if name not in names)
        return (*self.states.values(), *rest)


MISSING = {"$": "missing", "i": 0}
"""Represents a missing leaf; its number is never used."""


def shared_only(node: Node, level: int = 0) -> Node:
    """Returns a tree in which everything is missing except tensors that ranks share."""
    if level > tree.LEVELS_MAX:
        raise TreeError(f"nested deeper than {tree.LEVELS_MAX} levels")
    if type(node) is list:
        return [shared_only(child, level + 1) for child in node]
    if type(node) is not dict:
        return dict(MISSING)
    tag = node.get("$")
    if "$" not in node:
        return {key: shared_only(child, level + 1) for key, child in node.items()}
    if type(tag) is str and tag in tree.SEQUENCES:
        return {**node, "v": shared_only(member(node, "v", list), level)}
    if type(tag) is str and tag in tree.MAPPINGS:
        pairs = [[key, shared_only(child, level + 1)] for key, child in tree.pairs(node)]
        return {**node, "v": pairs}
    if is_composite(node):
        is_shared = all("g" in one for one in references(node))
        return node if is_shared else dict(MISSING)
    return node if "g" in node else dict(MISSING)


def _error(what: str, path: str, names: list[str]) -> PartialCheckpointError:
    return PartialCheckpointError(f"{path} is partial: {what}", path=path, missing=tuple(names))


def _some(names: list[Any]) -> str:
    named = ", ".join(map(repr, names[:_NAMED_MAX]))
    rest = len(names) - _NAMED_MAX
    return f"{named} and {rest} more" if rest > 0 else named
