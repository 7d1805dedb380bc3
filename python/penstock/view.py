"""`View`: a checkpoint of one or many ranks, as one rank sees it.

The tree of every rank refers to its own tensors by number, and by name to those that many hold,
whose boxes are in the parts of several. A view has one tree again, in which every tensor has a
number: first all stored entries, then the *wholes*, tensors that are put together from boxes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import dtypes, tree
from penstock.scalars import TreeError, decode_key, encode_key, member
from penstock.tree import MAPPINGS, Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock import _native
    from penstock._native import _Alias
    from penstock.restore import Row
    from penstock.ties import View as Window

NO_FILE = ""
"""Stands for the file of a tensor that lies in several."""


class View(NamedTuple):
    """What one rank sees of a checkpoint.

    Attributes:
        node: The tree; leaves refer to ``tensors`` and ``aliases`` by index.
        tensors: Stored entries, then wholes: ``(name, dtype, shape, file, begin, end)``.
        aliases: Further names, and windows.
        wholes: Index of each whole -> its name in the parts.
        is_shared: Whether there may be more in the checkpoint than this rank sees.
    """

    node: Node
    tensors: Sequence[Row]
    aliases: Sequence[_Alias]
    wholes: dict[int, str]
    is_shared: bool


def view(checkpoint: _native.Checkpoint, rank: int, state: Any = None) -> View:
    """The view of a rank.

    A rank beyond those that saved sees what the rank modulo their number saw. What that rank did
    not have, such as the layers of another pipeline stage, is added from the others.

    Args:
        checkpoint: An open checkpoint.
        rank: Who looks.
        state: What is to be filled, if anything: of what the saving rank did not have, only what
            this holds is added.

    Raises:
        TreeError: A tree is malformed.
    """
    tensors, aliases = checkpoint.tensors(), checkpoint.aliases()
    trees = checkpoint.trees()
    boxes = checkpoint.boxes()
    if len(trees) == 1 and not boxes:
        return View(tree.parse(trees[0]), tensors, aliases, {}, is_shared=False)
    saved_rank = rank % len(trees)
    stored = _stored(boxes, tensors)
    numbering = _Numbering(tensors, aliases, checkpoint.offsets(), stored)
    node = numbering.number(tree.parse(trees[saved_rank]), saved_rank)
    unseen = stored.keys() - numbering.names
    for other in range(len(trees)):
        if not unseen:
            break
        if other != saved_rank:
            further = numbering.number(tree.parse(trees[other]), other)
            _add(node, further, state, is_open=state is None)
            unseen -= numbering.names
    return View(node, numbering.tensors, numbering.aliases, numbering.wholes, is_shared=True)


class _Stored(NamedTuple):
    """What there is of a whole.

    Attributes:
        dtype: Its element type.
        shape: Its dimensions.
        items: Elements in all of its boxes, which do not overlap.
    """

    dtype: str
    shape: tuple[int, ...]
    items: int


def _stored(
    boxes: Sequence[tuple[int, str, tuple[int, ...], tuple[int, ...]]], tensors: Sequence[Row]
) -> dict[str, _Stored]:
    """What the boxes of each whole come to, by name."""
    found: dict[str, _Stored] = {}
    for index, name, shape, _ in boxes:
        _, dtype, box_shape, *_ = tensors[index]
        items = math.prod(box_shape)
        known = found.get(name)
        found[name] = _Stored(dtype, shape, items + (0 if known is None else known.items))
    return found


class _Numbering:
    """Gives the tensors of all trees numbers in one list."""

    def __init__(
        self,
        tensors: Sequence[Row],
        aliases: Sequence[_Alias],
        offsets: Sequence[tuple[int, int]],
        stored: dict[str, _Stored],
    ) -> None:
        self.tensors = list(tensors)
        self.aliases = list(aliases)
        self.wholes: dict[int, str] = {}
        self._offsets = offsets
        self._stored = stored
        self._whole_of: dict[str, int] = {}
        self._window_of: dict[tuple[int, Window], int] = {}

    @property
    def names(self) -> set[str]:
        """Names of all wholes met so far."""
        return set(self._whole_of)

    def number(self, node: Node, rank: int) -> Node:
        """The tree of a rank with numbers of this list; changes it in place."""
        tensor, alias = self._offsets[rank]
        for leaf in _references(node):
            if "g" in leaf:
                self._number_whole(leaf)
            elif "a" in leaf:
                leaf["a"] = member(leaf, "a", int) + alias
            elif "i" in leaf and leaf["$"] != "missing":
                leaf["i"] = member(leaf, "i", int) + tensor
        return node

    def _number_whole(self, leaf: dict[str, Node]) -> None:
        index = self._index(
            member(leaf, "g", str), member(leaf, "dtype", str), member(leaf, "shape", list)
        )
        window = leaf.get("view")
        for name in ("g", "dtype", "shape", "view"):
            leaf.pop(name, None)
        if window is None:
            leaf["i"] = index
            return
        key = (index, _window(window))
        if key not in self._window_of:
            self._window_of[key] = len(self.aliases)
            self.aliases.append((f"{self.tensors[index][0]}[…]", *key))
        leaf["a"] = self._window_of[key]

    def _index(self, name: str, dtype: str, dims: list[Node]) -> int:
        if not all(type(dim) is int and dim >= 0 for dim in dims):
            raise TreeError(f"tensor {name!r:.80}: no shape: {dims!r:.80}")
        shape = tuple(dims)
        known = self._whole_of.get(name)
        if known is None:
            known = self._whole_of[name] = len(self.tensors)
            items = math.prod(shape)
            nbytes = items * _item_bytes(dtype, name)
            # Before anybody takes memory for it.
            if items and self._stored.get(name) != _Stored(dtype, shape, items):
                raise TreeError(
                    f"tensor {name!r:.80}: the parts do not hold all of a {dtype} tensor of shape "
                    f"{list(shape)!r:.80}"
                )
            self.tensors.append((name, dtype, shape, NO_FILE, 0, nbytes))
            self.wholes[known] = name
        elif self.tensors[known][1:3] != (dtype, shape):
            raise TreeError(f"tensor {name!r:.80} has two types or shapes")
        return known


def _item_bytes(dtype: str, name: str) -> int:
    item_bytes = dtypes.ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise TreeError(f"tensor {name!r:.80}: no type of a shared tensor: {dtype!r:.80}")
    return item_bytes


def _window(value: Node) -> Window:
    """A view as the tree has it: shape, strides and offset."""
    if type(value) is not list or len(value) != 3:
        raise TreeError(f"no view: {value!r:.80}")
    shape, strides, offset = value
    for numbers in (shape, strides, [offset]):
        if type(numbers) is not list or not all(type(number) is int for number in numbers):
            raise TreeError(f"no view: {value!r:.80}")
    if offset < 0:
        raise TreeError(f"no view: {value!r:.80}")
    return tuple(shape), tuple(strides), offset


def _references(node: Node) -> Iterator[dict[str, Any]]:
    """Every tagged object of a tree that may refer to a tensor."""
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


def _add(node: Node, further: Node, state: Any, *, is_open: bool) -> None:
    """Adds to the dictionaries of a tree what those of another rank's have beside.

    Args:
        node: The tree that is added to.
        further: The other one.
        state: What is to be filled.
        is_open: Whether everything is added, for want of a state.
    """
    own, others = _members(node), _members(further)
    if own is None or others is None:
        return
    for key, child in others.items():
        has_state = isinstance(state, dict) and key in state
        if key in own:
            _add(own[key], child, state[key] if has_state else None, is_open=is_open)
        elif is_open or has_state:
            _insert(node, key, child)


def _members(node: Node) -> dict[Any, Node] | None:
    """The members of a dictionary; None for anything else."""
    if type(node) is not dict:
        return None
    if "$" not in node:
        return node
    if type(node["$"]) is str and node["$"] in MAPPINGS:
        return {decode_key(key): child for key, child in tree.pairs(node)}
    return None


def _insert(node: dict[str, Node], key: Any, child: Node) -> None:
    if "$" not in node and type(key) is str and key != "$":
        node[key] = child
    elif "$" in node:
        node["v"].append([encode_key(key, tree.LEVELS_MAX), child])
