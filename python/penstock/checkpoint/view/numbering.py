"""One list of numbers for the tensors of all ranks' trees."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.checkpoint.state.references import is_data, reference, references
from penstock.checkpoint.state.scalars import TreeError, UnknownError, member
from penstock.checkpoint.view.partial import MISSING
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import KeysView, Sequence

    from penstock._native import _Alias
    from penstock.checkpoint.state.references import Row
    from penstock.checkpoint.state.ties import Window
    from penstock.checkpoint.state.tree import Node

    _BoxRow: TypeAlias = tuple[int, str, tuple[int, ...], tuple[int, ...]]


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


_NOWHERE = -1
"""In place of the index of a whole that is missing."""


class Numbering:
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
        for leaf in references(node):
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
