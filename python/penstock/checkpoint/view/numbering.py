"""Numbers the tensors of all ranks' trees in one list."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from penstock._native import TensorEntry
from penstock.checkpoint.state.tree.references import is_data, reference, references
from penstock.checkpoint.state.tree.scalars import TreeError, UnknownError, member
from penstock.checkpoint.view.partial import MISSING
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import KeysView, Sequence

    from penstock._native import _Alias
    from penstock.checkpoint.state.tree.references import Window
    from penstock.checkpoint.state.tree.tree import Node


NO_FILE = ""
"""Represents the file of a tensor that is stored in several files."""


class StoredBoxes(NamedTuple):
    """The stored boxes of a whole.

    Attributes:
        dtype: The element type.
        shape: The dimensions.
        items: Number of elements in all boxes, which do not overlap.
    """

    dtype: str
    shape: tuple[int, ...]
    items: int


_NOWHERE = -1
"""Index of a missing whole."""


class Numbering:
    """Assigns numbers in one list to the tensors of all trees."""

    def __init__(
        self,
        tensors: Sequence[TensorEntry],
        aliases: Sequence[_Alias],
        offsets: Sequence[tuple[int, int]],
        stored: dict[str, StoredBoxes],
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
        """Names of all wholes encountered so far; a live view."""
        return self._whole_of.keys()

    def number(self, node: Node, rank: int) -> Node:
        """Renumbers a node of a rank's tree to this list; changes it in place."""
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
        """Returns the name of the whole that a numbered leaf or its window refers to; else None."""
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
            self.aliases.append((f"{self.tensors[index].name}[…]", index, view))
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
            # Checked before memory is allocated.
            if items and self._stored.get(name) != StoredBoxes(dtype, shape, items):
                raise TreeError(
                    f"tensor {name!r:.80}: the parts do not hold all of a {dtype} tensor of shape "
                    f"{list(shape)!r:.80}"
                )
            self.tensors.append(TensorEntry(name, dtype, shape, NO_FILE, 0, nbytes))
            self.wholes[known] = name
        elif (self.tensors[known].dtype, self.tensors[known].shape) != (dtype, shape):
            raise TreeError(f"tensor {name!r:.80} has two types or shapes")
        return known


def _item_bytes(dtype: str, name: str) -> int:
    item_bytes = dtypes.ITEM_BYTES.get(dtype)
    if item_bytes is None:
        kind = TreeError if dtype.startswith("numpy:") else UnknownError
        raise kind(f"tensor {name!r:.80}: no type of a shared tensor: {dtype!r:.80}")
    return item_bytes


def _window(value: Node) -> Window:
    """Parses a window in a tree: shape, strides and offset."""
    if type(value) is not list or len(value) != 3:
        raise TreeError(f"no view: {value!r:.80}")
    shape, strides, offset = value
    for numbers in (shape, strides, [offset]):
        if type(numbers) is not list or not all(type(number) is int for number in numbers):
            raise TreeError(f"no view: {value!r:.80}")
    if offset < 0:
        raise TreeError(f"no view: {value!r:.80}")
    return tuple(shape), tuple(strides), offset
