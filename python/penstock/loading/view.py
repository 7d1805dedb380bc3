"""`View`: a checkpoint of one or many ranks, as one rank sees it.

The tree of every rank refers to its own tensors by number, and by name to those that many hold,
whose boxes are in the parts of several. A view has one tree again, in which every tensor has a
number: first all stored entries, then the *wholes*, tensors that are put together from boxes.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock.loading.partial import MISSING, Gone, shared_only
from penstock.state import dtypes, tree
from penstock.state.build import is_data, reference
from penstock.state.scalars import TreeError, UnknownError, encode_key, member
from penstock.state.tree import LEVELS_MAX, MAPPINGS, Node

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView, Sequence

    from penstock import _native
    from penstock._native import _Alias
    from penstock.state.build import Row
    from penstock.state.ties import View as Window

    _BoxRow: TypeAlias = tuple[int, str, tuple[int, ...], tuple[int, ...]]

_OWN_SHARE_MAX = 0.1
"""Of what one rank sees, what another may have instead."""

NO_FILE = ""
"""Stands for the file of a tensor that lies in several."""


class Stored(NamedTuple):
    """What there is of a whole.

    Attributes:
        dtype: Its element type.
        shape: Its dimensions.
        items: Elements in all of its boxes, which do not overlap.
    """

    dtype: str
    shape: tuple[int, ...]
    items: int


class View(NamedTuple):
    """What one rank sees of a checkpoint.

    Attributes:
        node: The tree; leaves refer to ``tensors`` and ``aliases`` by index.
        tensors: Stored entries, then wholes: ``(name, dtype, shape, file, begin, end)``.
        aliases: Further names, and windows.
        wholes: Index of each whole -> its name in the parts.
        unreached: Wholes that are stored and not in the tree, by name.
        lost: What could not be salvaged, and is not in the tree as missing either.
        is_shared: Whether there may be more in the checkpoint than this rank sees.
        tree_chars: Length of all trees that were parsed.
    """

    node: Node
    tensors: Sequence[Row]
    aliases: Sequence[_Alias]
    wholes: dict[int, str]
    unreached: dict[str, Stored]
    lost: tuple[str, ...]
    is_shared: bool
    tree_chars: int

    @property
    def are_few_unreached(self) -> bool:
        """Whether what is not reached may be values that each rank has of its own.

        Such as the statistics of a normalization, beside weights that all have. What pipeline
        stages call the same is as much on one rank as on the next.
        """
        reached_bytes = sum(self.tensors[index][5] for index in self.wholes)
        own_bytes: Counter[str] = Counter()
        for name, stored in self.unreached.items():
            # By the lowest rank that has it, which its name ends with.
            own_bytes[name.rpartition("@")[2]] += stored.items * dtypes.ITEM_BYTES[stored.dtype]
        return max(own_bytes.values()) <= _OWN_SHARE_MAX * reached_bytes


def may_share(checkpoint: _native.Checkpoint, *, has_boxes: bool) -> bool:
    """Whether a tree may name tensors that ranks share, or a rank may have others than the next."""
    # One rank may have such without elements, which have no boxes. A member whose name is written
    # with escapes is passed over here, and its leaf refused, as it has no index.
    return checkpoint.world_size > 1 or has_boxes or '"g"' in checkpoint.tree


def view(
    checkpoint: _native.Checkpoint, rank: int, state: Any = None, *, is_alone: bool = False
) -> View:
    """The view of a rank.

    A rank beyond those that saved sees what the rank modulo their number saw, and one that saved
    nothing what the first one saw. What that rank did not have, such as the layers of another
    pipeline stage, is added from the others where it has one place; trees of others are parsed
    only for that. Where the state of that rank is lost, the tree of another tells where shared
    tensors belong, and all else is missing.

    Args:
        checkpoint: An open checkpoint.
        rank: Who looks.
        state: What is to be filled, if anything: of what the saving rank did not have, only what
            this holds is added.
        is_alone: Have exactly what that rank saved.

    Raises:
        TreeError: A tree is malformed.
    """
    tensors, aliases, boxes = checkpoint.tensors(), checkpoint.aliases(), checkpoint.boxes()
    saved_rank = rank % checkpoint.world_size
    text = checkpoint.rank_tree(saved_rank)
    is_nothing_wanted = isinstance(state, dict) and not state
    has_nothing = text == _NOTHING and not is_alone and not is_nothing_wanted
    if text == tree.AS_FIRST or has_nothing:
        saved_rank, text = 0, checkpoint.rank_tree(0)
    if not may_share(checkpoint, has_boxes=bool(boxes)):
        node = tree.parse(text)
        return View(node, tensors, aliases, {}, {}, (), is_shared=False, tree_chars=len(text))
    gone = Gone.of(checkpoint)
    stored = _stored(boxes, tensors, gone.shared)
    numbering = _Numbering(tensors, aliases, checkpoint.offsets(), stored, gone.shared)
    parsed = tree.parse(text)
    if saved_rank in gone.states and not is_alone:
        text, parsed = _in_place_of_lost(checkpoint, gone) or (text, parsed)
    node = numbering.number(parsed, saved_rank)
    tree_chars = len(text)
    unseen = (stored.keys() | gone.shared) - numbering.names
    if unseen and not is_alone:
        merging = _Merging(numbering, node, state)
        for other in _storing_first(checkpoint, boxes, unseen, saved_rank):
            if not merging.is_wanting:
                break
            text = checkpoint.rank_tree(other)
            tree_chars += len(text)
            # What it names without a place for it has none in the trees of others either.
            unseen -= merging.add(tree.parse(text), other)
    return View(
        node,
        numbering.tensors,
        numbering.aliases,
        numbering.wholes,
        {name: found for name, found in stored.items() if name not in numbering.names},
        gone.of_rank(saved_rank) if is_alone else gone.beside(numbering.names),
        is_shared=checkpoint.world_size > 1 or bool(boxes or numbering.wholes),
        tree_chars=tree_chars,
    )


def _in_place_of_lost(checkpoint: _native.Checkpoint, gone: Gone) -> tuple[str, Node] | None:
    """A tree that tells where shared tensors belong, in place of one that is lost.

    All else in it is another rank's, and missing here.
    """
    for rank in range(checkpoint.world_size):
        text = checkpoint.rank_tree(rank)
        if rank not in gone.states and text not in (tree.AS_FIRST, _NOTHING):
            return text, shared_only(tree.parse(text))
    return None


_NOTHING = "{}"
"""The tree of a rank that has no state of its own."""


def _storing_first(
    checkpoint: _native.Checkpoint, boxes: Sequence[_BoxRow], unseen: set[str], own: int
) -> Iterator[int]:
    """The ranks whose trees may name what is unseen, while anything is.

    Whoever stores a part of a tensor names it, so those come first; the others only for tensors
    that none of those has named.

    Args:
        checkpoint: The checkpoint.
        boxes: Of all tensors.
        unseen: Names that are looked for; whoever asks takes away what a tree has named.
        own: The rank whose tree is known.
    """
    firsts = [first for first, _ in checkpoint.offsets()]
    storing: dict[int, set[str]] = {}
    for index, name, _, _ in boxes:
        if name in unseen:
            storing.setdefault(bisect.bisect_right(firsts, index) - 1, set()).add(name)
    looked = {own}
    for rank in sorted(storing):
        if rank != own and not unseen.isdisjoint(storing[rank]):
            looked.add(rank)
            yield rank
    for rank in range(len(firsts)):
        if not unseen:
            return
        if rank not in looked:
            yield rank


def _stored(
    boxes: Sequence[_BoxRow], tensors: Sequence[Row], missing: frozenset[str]
) -> dict[str, Stored]:
    """What the boxes of each whole that is not missing come to, by name."""
    found: dict[str, Stored] = {}
    for index, name, shape, _ in boxes:
        if name in missing:
            continue
        _, dtype, box_shape, *_ = tensors[index]
        items = math.prod(box_shape)
        known = found.get(name)
        found[name] = Stored(dtype, shape, items + (0 if known is None else known.items))
    return found


_NOWHERE = -1
"""In place of the index of a whole that is missing."""


class _Numbering:
    """Gives the tensors of all trees numbers in one list."""

    def __init__(
        self,
        tensors: Sequence[Row],
        aliases: Sequence[_Alias],
        offsets: Sequence[tuple[int, int]],
        stored: dict[str, Stored],
        missing: frozenset[str],
    ) -> None:
        self.tensors = list(tensors)
        self.aliases = list(aliases)
        self.wholes: dict[int, str] = {}
        self._offsets = offsets
        self._stored = stored
        self._missing = missing
        self._whole_of: dict[str, int] = {}
        self._window_of: dict[tuple[int, str], int] = {}

    @property
    def names(self) -> KeysView[str]:
        """Names of all wholes met so far, and from now on."""
        return self._whole_of.keys()

    def number(self, node: Node, rank: int) -> Node:
        """A node of a rank's tree with numbers of this list; changes it in place."""
        tensor, alias = self._offsets[rank]
        for leaf in _references(node):
            if "g" in leaf:
                self._number_whole(leaf)
            elif "a" in leaf:
                leaf["a"] = member(leaf, "a", int) + alias
            elif "i" in leaf and leaf["$"] != "missing":
                leaf["i"] = member(leaf, "i", int) + tensor
        return node

    def name_of(self, node: Node) -> str | None:
        """The whole that a numbered leaf stands for, or is a window over, if it is one."""
        if not is_data(node):
            return None
        return self.wholes.get(reference(node, self.tensors, self.aliases)[0])

    def _number_whole(self, leaf: dict[str, Node]) -> None:
        name = member(leaf, "g", str)
        if name in self._missing:
            self._whole_of[name] = _NOWHERE
            leaf.clear()
            leaf |= MISSING
            return
        index = self._index(name, member(leaf, "dtype", str), member(leaf, "shape", list))
        window = leaf.get("view")
        for name in ("g", "dtype", "shape", "view"):
            leaf.pop(name, None)
        if window is None:
            leaf["i"] = index
            return
        view = _window(window)
        # As text: see `Builder.leaf`.
        key = (index, repr(view))
        if key not in self._window_of:
            self._window_of[key] = len(self.aliases)
            self.aliases.append((f"{self.tensors[index][0]}[…]", index, view))
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
            if items and self._stored.get(name) != Stored(dtype, shape, items):
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
        kind = TreeError if dtype.startswith("numpy:") else UnknownError
        raise kind(f"tensor {name!r:.80}: no type of a shared tensor: {dtype!r:.80}")
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


class _Merging:
    """Adds to the tree of one rank what only those of others reach.

    Dictionaries at one path may be two of a kind rather than one: the layers of pipeline stages
    that count their own from 0, the moments of their optimizers. So nothing is added to one whose
    members are other tensors than those of the same keys on the other rank, nor below it. And a
    rank keeps its own values for itself: what is added holds a tensor that ranks share.

    Args:
        numbering: Of the tree and of what is added.
        node: The tree, numbered; changed in place.
        state: What is to be filled: nothing else is added then.
    """

    def __init__(self, numbering: _Numbering, node: Node, state: Any) -> None:
        self._numbering = numbering
        self._node = node
        self._state = state

    @property
    def is_wanting(self) -> bool:
        """Whether there is use for more."""
        return self._state is None or _lacks(self._node, self._state)

    def add(self, further: Node, rank: int) -> set[str]:
        """Adds from the tree of another rank; returns all names of wholes in that."""
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
        """Whether two dictionaries hold different wholes under one key, or one number.

        A name says what is below it; a number only how many came before.
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
    """The whole that a leaf without a number names."""
    return member(node, "g", str) if is_data(node) and "g" in node else None


def _names(node: Node) -> Iterator[str]:
    """The wholes that a tree without numbers names."""
    return (member(leaf, "g", str) for leaf in _references(node) if "g" in leaf)


def _lacks(node: Node, state: Any) -> bool:
    """Whether a state holds members that the dictionaries of a tree do not."""
    own = _members(node)
    if own is None or not isinstance(state, dict):
        return False
    return any(key not in own or _lacks(own[key], value) for key, value in state.items())


def _within(node: Node, state: Any) -> Node:
    """A node without those members of dictionaries that a state does not hold."""
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
    """The members that a dictionary has now; None for anything else."""
    if type(node) is not dict:
        return None
    if "$" not in node:
        return dict(node)
    if type(node["$"]) is str and node["$"] in MAPPINGS:
        return dict(tree.branches(node) or ())
    return None


def _insert(node: dict[str, Node], key: Any, child: Node) -> None:
    """Adds a member to a dictionary, which takes the form for any keys where this one asks so."""
    if "$" not in node:
        if type(key) is str and key != "$":
            node[key] = child
            return
        entries: list[Node] = [[encode_key(own, LEVELS_MAX), value] for own, value in node.items()]
        node.clear()
        node |= {"$": "dict", "v": entries}
    node["v"].append([encode_key(key, LEVELS_MAX), child])
