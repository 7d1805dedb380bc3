"""Selects the leaves of a tree that a caller requests by name."""

from __future__ import annotations

import difflib
from itertools import islice
from typing import TYPE_CHECKING

from penstock.checkpoint.state.tree.names import escaped, is_wild, matcher
from penstock.checkpoint.state.tree.plain import plain
from penstock.checkpoint.state.tree.tree import ROOT, SEQUENCES, SKIPPED, Node, branches, leaves
from penstock.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def select(node: Node, patterns: Sequence[str], path: str) -> Node:
    """Returns the tree with `SKIPPED` in place of every leaf that no pattern matches.

    A pattern is a leaf's name, or a pattern of `fnmatch` over names (``*`` also matches dots); see
    `penstock.checkpoint.state.tree.names`.

    Raises:
        StateMismatchError: A pattern matches nothing.
        TreeError: The tree is malformed.
    """
    # Names are checked one by one and never kept: a short tree may have endlessly long ones.
    whole = frozenset(patterns)
    matchers = [(pattern, matcher(pattern)) for pattern in patterns if is_wild(pattern)]
    found: set[str] = set()
    wanted: set[int] = set()
    count = 0
    for name, _ in leaves(node):
        # Exact names are looked up in a set: a list of them costs its length, not that times the
        # leaves.
        matching = [pattern for pattern, matches in matchers if matches(name)]
        if name in whole:
            matching.append(name)
        if matching:
            found.update(matching)
            wanted.add(count)
        count += 1
    for pattern in patterns:
        if pattern not in found:
            raise _no_match(pattern, node, path)
    ordinals = iter(range(count))
    return _mask(node, lambda: next(ordinals) in wanted)


def without(node: Node, is_unwanted: Callable[[Node], bool]) -> Node:
    """Returns the tree with `SKIPPED` in place of further leaves."""
    wanted = [leaf is not SKIPPED and not is_unwanted(leaf) for _, leaf in leaves(node)]
    answers = iter(wanted)
    return _mask(node, lambda: next(answers))


def _mask(node: Node, is_wanted: Callable[[], bool]) -> Node:
    """Walks the leaves in the order of `leaves`, and replaces unwanted ones."""
    if not branches(node):
        return node if is_wanted() else SKIPPED
    if type(node) is list:
        children = [_mask(child, is_wanted) for child in node]
        return children if any(child is not SKIPPED for child in children) else SKIPPED
    if "$" not in node:
        entries = {key: _mask(child, is_wanted) for key, child in node.items()}
        return entries if any(child is not SKIPPED for child in entries.values()) else SKIPPED
    if node["$"] in SEQUENCES:
        inner = _mask(node["v"], is_wanted)
    else:
        masked = [[key, _mask(child, is_wanted)] for key, child in node["v"]]
        inner = masked if any(child is not SKIPPED for _, child in masked) else SKIPPED
    return SKIPPED if inner is SKIPPED else {**node, "v": inner}


def _no_match(pattern: str, node: Node, path: str) -> StateMismatchError:
    is_inside = any(name.startswith(f"{pattern}.") for name, _ in leaves(node))
    # A name of more than three times the length cannot share the required half.
    similar = (name for name, _ in leaves(node) if len(name) <= 3 * len(pattern))
    # A comparison takes microseconds; ten thousand names take at most a second.
    names = list(islice(similar, 10_000))
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    # The pattern may be a raw key, whose name has backslashes.
    close = [escaped(pattern)] if escaped(pattern) in names else close
    owner = _owner(pattern, node)
    if owner is not None:
        remedy = (
            f"it is a part of {owner!r}: ask for that, or penstock.load with plain=True loads "
            "parts by themselves"
        )
    elif is_inside:
        remedy = f"it is a container, ask for {pattern + '.*'!r}"
    elif close:
        remedy = "did you mean " + " or ".join(f"'{name}'" for name in close) + "?"
    else:
        remedy = "penstock.inspect(path) lists the names"
    return StateMismatchError(
        f"{path}: no leaf of the checkpoint matches {pattern!r}; {remedy}", key=pattern, path=path
    )


def _owner(pattern: str, node: Node) -> str | None:
    """Returns the leaf of which a pattern names a member, of a composite tensor or a class."""
    matches = matcher(pattern)
    part = next((name for name, _ in leaves(plain(node)) if matches(name)), None)
    if part is None:
        return None
    if not branches(node):
        return ROOT
    return next((name for name, _ in leaves(node) if part.startswith(f"{name}.")), None)
