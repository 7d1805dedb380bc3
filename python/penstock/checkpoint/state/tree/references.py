"""Resolves a leaf's reference to the stored tensor with its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.checkpoint.state.tree.scalars import TreeError, member

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._native import TensorEntry, _Alias
    from penstock.checkpoint.state.tree.tree import Node


Window: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""The part of a tensor that a leaf has: shape, strides and offset in items."""


BytesLocation: TypeAlias = tuple[Any, int]
"""The place of a tensor's bytes: an object with the buffer protocol, and the offset in it."""


DATA_TAGS = frozenset({"tensor", "ndarray", "bytes", "bytearray"})
"""Tags of leaves whose bytes may be in a shard."""


BYTES_TAGS = frozenset({"bytes", "bytearray"})
"""Those tags whose values are copied from the bytes read."""


COMPOSITE_TAGS = frozenset({"sparse", "nested", "jagged", "subclass"})
"""Tags of composite tensors, whose members are in the node's member ``"v"``, by name."""


def is_composite(node: Node) -> bool:
    """Whether a leaf is a composite tensor."""
    return type(node) is dict and type(node.get("$")) is str and node["$"] in COMPOSITE_TAGS


def is_data(node: Node) -> bool:
    """Whether a leaf's value is in a shard rather than in the tree."""
    if type(node) is not dict:
        return False
    tag = node.get("$")
    return type(tag) is str and tag in DATA_TAGS and "v" not in node


def needed(
    node: Node,
    tensors: Sequence[TensorEntry],
    aliases: Sequence[_Alias],
    tags: frozenset[str] = DATA_TAGS,
) -> list[int]:
    """Returns the indices of stored tensors that leaves of some kinds refer to, ascending."""
    found: set[int] = set()
    rest = [node]
    while rest:
        node = rest.pop()
        if type(node) is list:
            rest += node
        elif is_data(node):
            if node["$"] in tags:
                found.add(reference(node, tensors, aliases)[0])
        elif type(node) is dict:
            rest += node.values()
    return sorted(found)


def reference(
    node: dict[str, Node], tensors: Sequence[TensorEntry], aliases: Sequence[_Alias]
) -> tuple[int, Window | None]:
    """Returns the stored tensor of a leaf, and the part of it; None for the whole."""
    if "a" in node:
        alias = member(node, "a", int)
        if not 0 <= alias < len(aliases):
            raise TreeError(f"alias {alias} of {len(aliases)}")
        _, index, window = aliases[alias]
    else:
        index, window = member(node, "i", int), None
    if not 0 <= index < len(tensors):
        raise TreeError(f"tensor {index} of {len(tensors)}")
    return index, window


def references(node: Node) -> Iterator[dict[str, Any]]:
    """Yields every tagged object of a tree that may refer to a tensor."""
    rest = [node]
    while rest:
        node = rest.pop()
        if type(node) is list:
            rest += node
        elif type(node) is dict:
            if node.get("$") in _REFERRING and "v" not in node:
                yield node
            else:
                rest += node.values()


_REFERRING = ("tensor", "ndarray", "bytes", "bytearray", "missing")
