"""Merges tensors that only other ranks' trees reach into the tree of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.references import is_data, references
from penstock.checkpoint.state.tree.scalars import TreeError, encode_key, member
from penstock.checkpoint.state.tree.tree import LEVELS_MAX, MAPPINGS, Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.view.numbering import Numbering


class Merging:
    """Adds to the tree of one rank the tensors that only the trees of other ranks reach.

    Dictionaries at one path may be different objects rather than one: the layers of pipeline stages
    that number their own from 0, or the moments of their optimizers. Nothing is therefore added to
    a dictionary, nor below it, if the same keys hold other tensors on the other rank. A rank's own
    values are not added either: only tensors that ranks share are.

    Args:
        numbering: The numbering of the tree and of added nodes.
        node: The numbered tree; changed in place.
        state: The state to fill; only its members are added. None to add all.
    """

    def __init__(self, numbering: Numbering, node: Node, state: Any) -> None:
        self._numbering = numbering
        self._node = node
        self._state = state

    @property
    def is_wanting(self) -> bool:
        """Whether more tensors may be added."""
        return self._state is None or _lacks(self._node, self._state)

    def add(self, further: Node, rank: int) -> set[str]:
        """Adds tensors from another rank's tree; returns all names of wholes in that tree."""
        names = set(_names(further))
        self._merge(self._node, further, rank, self._state, 0)
        return names

    def _merge(self, node: Node, further: Node, rank: int, state: Any, level: int) -> None:
        own, others = _members(node), _members(further)
        if own is None or others is None or self._contradict(own, others):
            return
        if level >= LEVELS_MAX:
            raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
        for key, child in others.items():
            inner = None
            if self._state is not None:
                if not isinstance(state, dict) or key not in state:
                    continue
                inner = state[key]
            if key in own:
                self._merge(own[key], child, rank, inner, level + 1)
                continue
            if inner is not None:
                child = _within(child, inner)
            if any(name not in self._numbering.names for name in _names(child)):
                _insert(node, key, self._numbering.number(child, rank))

    def _contradict(self, own: dict[Any, Node], others: dict[Any, Node]) -> bool:
        """Whether two dictionaries hold different wholes under one key.

        A name identifies the value below it; a number only its position.
        """
        for key, child in others.items():
            if type(key) is int or (type(key) is str and key.isdecimal()):
                inner, further = _members(own.get(key)), _members(child)
                if inner is not None and further is not None and self._contradict(inner, further):
                    return True
            name = _name(child)
            if name is not None and key in own:
                known = self._numbering.name_of(own[key])
                if known is not None and known != name:
                    return True
        return False


def _name(node: Node) -> str | None:
    """Returns the name of the whole that an unnumbered leaf refers to."""
    return member(node, "g", str) if is_data(node) and "g" in node else None


def _names(node: Node) -> Iterator[str]:
    """Yields the names of the wholes in an unnumbered tree."""
    return (member(leaf, "g", str) for leaf in references(node) if "g" in leaf)


def _lacks(node: Node, state: Any) -> bool:
    """Whether a state has members that the dictionaries of a tree lack."""
    own = _members(node)
    if own is None or not isinstance(state, dict):
        return False
    return any(key not in own or _lacks(own[key], value) for key, value in state.items())


def _within(node: Node, state: Any) -> Node:
    """Returns a node without the dictionary members that a state lacks."""
    if not isinstance(state, dict) or _members(node) is None:
        return node
    if "$" not in node:
        return {key: _within(child, state[key]) for key, child in node.items() if key in state}
    members = zip(tree.pairs(node), tree.branches(node) or (), strict=True)
    kept = [
        [key, _within(child, state[name])] for (key, _), (name, child) in members if name in state
    ]
    return {**node, "v": kept}


def _members(node: Node) -> dict[Any, Node] | None:
    """Returns the current members of a dictionary; None for anything else."""
    if type(node) is not dict:
        return None
    if "$" not in node:
        return dict(node)
    if type(node["$"]) is str and node["$"] in MAPPINGS:
        return dict(tree.branches(node) or ())
    return None


def _insert(node: dict[str, Node], key: Any, child: Node) -> None:
    """Adds a member to a dictionary, converting it to the form for any keys if necessary."""
    if "$" not in node:
        if type(key) is str and key != "$":
            node[key] = child
            return
        entries: list[Node] = [[encode_key(own, LEVELS_MAX), value] for own, value in node.items()]
        node.clear()
        node |= {"$": "dict", "v": entries}
    node["v"].append([encode_key(key, LEVELS_MAX), child])
