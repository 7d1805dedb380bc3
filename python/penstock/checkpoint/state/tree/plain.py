"""Converts values of classes and composite tensors in a tree to dictionaries."""

from __future__ import annotations

from penstock.checkpoint.state.tree.references import is_composite
from penstock.checkpoint.state.tree.scalars import TreeError, member
from penstock.checkpoint.state.tree.tree import (
    CLASS,
    CLASS_VALUE,
    CONTEXT,
    LEVELS_MAX,
    MAPPINGS,
    SEQUENCES,
    Node,
    pairs,
)


def plain(node: Node, level: int = 0) -> Node:
    """Returns the tree with dictionaries of the stored members in place of such values."""
    if level > LEVELS_MAX:
        raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
    if type(node) is list:
        return [plain(child, level + 1) for child in node]
    if type(node) is not dict:
        return node
    if "$" not in node:
        return {key: plain(child, level + 1) for key, child in node.items()}
    tag = node["$"]
    if type(tag) is not str:
        return node
    if tag in SEQUENCES:
        return {**node, "v": plain(member(node, "v", list), level)}
    if tag in MAPPINGS:
        return {**node, "v": [[key, plain(child, level + 1)] for key, child in pairs(node)]}
    if tag == "object":
        inner = plain(node.get("v"), level + 1)
        is_members = type(inner) is dict and "$" not in inner
        members = inner if is_members else {CLASS_VALUE: inner}
        return {CLASS: member(node, "type", str), **members}
    if is_composite(node):
        facts = {f"({key})": fact for key, fact in node.items() if key not in ("$", "v", "context")}
        if "context" in node:
            facts[CONTEXT] = plain(node["context"], level + 1)
        tensors = plain(member(node, "v", dict), level)
        return {CLASS: tag, **facts, **tensors}
    return node
