"""Loading a partial checkpoint: what of it is there, and what was asked for and is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import tree
from penstock.errors import PartialCheckpointError

if TYPE_CHECKING:
    from penstock import _native
    from penstock.tree import Node

_NAMED_MAX = 8


def is_missing(node: Node) -> bool:
    """Whether a leaf stands for a tensor that could not be salvaged."""
    return type(node) is dict and node.get("$") == "missing"


def settle(
    node: Node, checkpoint: _native.Checkpoint, path: str, *, allow_partial: bool
) -> tuple[Node, bool]:
    """The tree as it can be loaded, and whether leaves were left out.

    Args:
        node: The tree, `SKIPPED` where nothing was asked for.
        checkpoint: The checkpoint that it belongs to.
        path: Where that is.
        allow_partial: Leave out what is missing.

    Raises:
        PartialCheckpointError: Something that was asked for is missing, or was never checked, and
            ``allow_partial`` is False; or nothing is left.
        TreeError: The tree is malformed.
    """
    partial = checkpoint.partial
    if partial is None:
        return node, False
    _, unverified = partial
    names = [name for name, leaf in tree.leaves(node) if is_missing(leaf)]
    if allow_partial:
        if not names:
            return node, False
        rest = tree.without(node, is_missing)
        if rest is tree.SKIPPED:
            raise _error(
                f"nothing of it is left of what was asked for: {_some(names)}", path, names
            )
        return rest, True
    if unverified:
        raise _error(
            "it was salvaged without digests, so nothing proves that it is what was saved; pass "
            "allow_partial=True to load it all the same",
            path,
            names,
        )
    if names:
        raise _error(
            f"it was salvaged from a damaged one and lacks {_some(names)}; pass "
            "allow_partial=True to load the rest, or name what you want with keys=",
            path,
            names,
        )
    return node, False


def _error(what: str, path: str, names: list[str]) -> PartialCheckpointError:
    return PartialCheckpointError(f"{path} is partial: {what}", path=path, missing=tuple(names))


def _some(names: list[Any]) -> str:
    named = ", ".join(map(repr, names[:_NAMED_MAX]))
    rest = len(names) - _NAMED_MAX
    return f"{named} and {rest} more" if rest > 0 else named
