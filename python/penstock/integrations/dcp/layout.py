"""Maps DCP's items to the tree of a checkpoint and back.

DCP flattens a state before it saves it: an *item* is a tensor or a plain value, and its name (FQN,
"fully qualified name") is the path of keys to it, joined by dots. The tree holds the nested state.
The rule by which DCP flattens tells which of its nodes are items; everything else is recorded in
the *note*, an object under `NOTE` in the manifest's metadata:

- ``"raw"``: names of items that are the planner's own bytes, returned to it unchanged;
- ``"planner_data"``: DCP's path for every name, if the tree implies others; as a node;
- ``"flat"``: true if the tree is not nested: its keys are the names of the items.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.tree.references import is_composite
from penstock.checkpoint.state.tree.scalars import label
from penstock.errors import UnsupportedStateError
from penstock.plugin import LEVELS_MAX, MAPPINGS, ROOT, Flattener, Node, TreeError, branches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NOTE = "dcp"
"""The member of the manifest's metadata that belongs to this module."""

Path: TypeAlias = tuple[str | int, ...]

_NAME_CHARS_PER_CHAR = 256
_NAME_CHARS_MIN = 1 << 20
"""Limits for the names of all items, in characters for each character of the tree and in any case:
each name repeats the keys around it, so a small file could imply endless names."""


class Layout(NamedTuple):
    """The items of a checkpoint.

    Attributes:
        nodes: The node of each item, by its name.
        raw: Names of items that are the planner's own bytes.
        planner_data: Data from the planner that saved for the one that loads; nearly always the
            path of each item.
    """

    nodes: dict[str, Node]
    raw: frozenset[str]
    planner_data: Any


@dataclass(frozen=True, slots=True)
class _StateLeaf:
    """A leaf of a state whose node is known."""

    node: Node


class _Encoder(Flattener):
    """Encodes containers whose leaves are nodes already."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers[_StateLeaf] = lambda _walk, leaf, _name, _level: leaf.node


def arrange(
    nodes: Mapping[str, Node],
    raw: list[str],
    planner_data: Any,
    further: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """The tree and the metadata of a checkpoint, as JSON text.

    Args:
        nodes: The node of each item.
        raw: Names of items that are the planner's own bytes.
        planner_data: Data that the planner needs when it loads; with the default planner the paths
            that DCP has flattened.
        further: Members of the note that `read` ignores.
    """
    note: dict[str, Any] = {"raw": sorted(raw), **(further or {})}
    state = _nest(nodes, planner_data) if _are_paths(planner_data, nodes) else None
    if state is None:
        note["flat"] = True
        state = {name: _StateLeaf(node) for name, node in nodes.items()}
    root = _Encoder().encode(state, ROOT, 0)
    if "flat" in note or _paths(root) != planner_data:
        note["planner_data"] = _encode(planner_data)
    return _to_json(root), _to_json({NOTE: note})


def read(root: Node, note: Any, tree_chars: int) -> Layout:
    """The items of a tree.

    Raises:
        TreeError: The tree is no dictionary, or tree or note is malformed.
    """
    note = {} if note is None else note
    if type(note) is not dict:
        raise TreeError(f"what DCP left beside it is {note!r:.80}")
    if not _is_mapping(root):
        raise TreeError("DCP loads dictionaries, and this is none")
    raw = note.get("raw", [])
    if type(raw) is not list or not all(type(name) is str for name in raw):
        raise TreeError(f"the names of raw values are {raw!r:.80}")
    chars_max = _NAME_CHARS_MIN + _NAME_CHARS_PER_CHAR * tree_chars
    planner_data = None
    if "planner_data" in note:
        planner_data = Builder((), (), {}).build(note["planner_data"])
    if note.get("flat"):
        nodes = {label(key): node for key, node in branches(root) or ()}
    elif planner_data is None:
        items = list(_bounded(root, chars_max))
        nodes = {name: node for name, _, node in items}
        if len(nodes) != len(items):
            raise TreeError("two of its leaves have one name to DCP")
        planner_data = {name: path for name, path, _ in items}
    else:
        if not _are_paths(planner_data, {}):
            raise TreeError("its paths are malformed")
        found = {name: _at(root, path) for name, path in planner_data.items()}
        nodes = {name: leaf.node for name, leaf in found.items() if leaf is not None}
    return Layout(nodes, frozenset(raw), planner_data)


def _encode(planner_data: Any) -> Node:
    encoder = Flattener()
    node = encoder.encode(planner_data, "planner_data", 0)
    tensors, _ = encoder.finish()
    if tensors:
        raise UnsupportedStateError(
            "planner_data: what a planner leaves for loading must not hold tensors, arrays or long "
            "byte strings: make them items of the plan",
            key="planner_data",
        )
    return node


def _to_json(node: Node) -> str:
    return json.dumps(node, ensure_ascii=False, check_circular=False, separators=(",", ":"))


def _are_paths(planner_data: Any, names: Mapping[str, Any]) -> bool:
    """Whether ``planner_data`` has a path for every one of the names."""
    return (
        type(planner_data) is dict
        and names.keys() <= planner_data.keys()
        and all(
            type(path) is tuple and path and all(type(key) in (str, int) for key in path)
            for path in planner_data.values()
        )
    )


# Nesting.


def _nest(nodes: Mapping[str, Node], paths: Mapping[str, Path]) -> dict[str, Any] | None:
    """The nested state from which the items were flattened; None if they do not fit into one.

    They do not if ranks had different states: one a value where another had a dictionary.
    """
    state: dict[str, Any] = {}
    # In the order of the state; the order of the items depends on the ranks that wrote them.
    for name, path in paths.items():
        if name in nodes and not _put(state, path, _StateLeaf(nodes[name])):
            return None
    return state


def _put(container: Any, path: Path, leaf: _StateLeaf) -> bool:
    """Puts a leaf into nested dictionaries and lists; returns whether it has a place there."""
    *keys, last = path
    for key, following in zip(keys, path[1:], strict=True):
        empty: Any = {} if type(following) is str else []
        if not _make_room(container, key):
            return False
        if container[key] is None:
            container[key] = empty
        container = container[key]
        if type(container) is not type(empty):
            return False
    if not _make_room(container, last) or container[last] is not None:
        return False
    container[last] = leaf
    return True


def _make_room(container: Any, key: str | int) -> bool:
    """Makes an empty slot (None) for a key; returns whether the container has such keys."""
    if type(container) is dict and type(key) is str:
        container.setdefault(key, None)
        return True
    if type(container) is list and type(key) is int and key >= 0:
        container += [None] * (key + 1 - len(container))
        return True
    return False


# Flattening, as `torch.distributed.checkpoint._traverse.traverse_state_dict` does.


def _paths(root: Node) -> dict[str, Path] | None:
    """The path of every item of a tree; None if two have one name."""
    items = list(_items(root, (), 0))
    paths = {_name(path): path for path, _ in items}
    return paths if len(paths) == len(items) else None


def _bounded(root: Node, chars_max: int) -> Iterator[tuple[str, Path, Node]]:
    chars = 0
    for path, node in _items(root, (), 0):
        name = _name(path)
        chars += len(name)
        if chars > chars_max:
            raise TreeError(f"the names of its leaves take more than {chars_max} characters")
        yield name, path, node


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _items(node: Node, path: Path, level: int) -> Iterator[tuple[Path, Node]]:
    if level > LEVELS_MAX:
        raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
    if _is_mapping(node):
        for key, child in branches(node) or ():
            yield from _items(child, (*path, label(key)), level + 1)
    elif type(node) is list and not _is_terminal(node, level):
        for index, child in enumerate(node):
            yield from _items(child, (*path, index), level + 1)
    else:
        yield path, node


def _is_terminal(nodes: list[Node], level: int) -> bool:
    """Whether DCP treats a list as a value: it holds no tensor, no dictionary, and no other list.

    A missing entry counts as a tensor, as it may have been one.
    """
    if level > LEVELS_MAX:
        raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
    return not any(
        _is_mapping(node)
        or (type(node) is list and not _is_terminal(node, level + 1))
        or is_composite(node)
        or (type(node) is dict and node.get("$") in ("tensor", "missing"))
        for node in nodes
    )


def _is_mapping(node: Node) -> bool:
    if type(node) is not dict:
        return False
    return "$" not in node or (type(node["$"]) is str and node["$"] in MAPPINGS)


def _at(node: Node, path: Path) -> _StateLeaf | None:
    """The node at a path, wrapped, as a node may be None; None if there is no such node."""
    for key in path:
        if type(node) is list:
            children: Any = node if type(key) is int and 0 <= key < len(node) else {}
        elif type(node) is dict and "$" not in node:
            children = node if key in node else {}
        elif _is_mapping(node):
            children = {label(name): child for name, child in branches(node) or ()}
            children = children if key in children else {}
        else:
            children = {}
        if not children:
            return None
        node = children[key]
    return _StateLeaf(node)
