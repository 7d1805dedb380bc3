"""`View`: a checkpoint of one or many ranks, as one rank sees it.

A rank's tree refers to the rank's own tensors by number, and to tensors that ranks share by name.
The parts of several ranks may list the boxes of one shared tensor. A view has a single tree, in
which every tensor has a number. The stored entries are numbered first, then the *wholes*: shared
tensors, each assembled from its boxes.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.view.merging import Merging
from penstock.checkpoint.view.numbering import Numbering, StoredBoxes
from penstock.checkpoint.view.partial import SalvageLosses, shared_only
from penstock.tensors import dtypes
from penstock.tensors.gc_paused import gc_paused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock import _native
    from penstock._native import BoxEntry, TensorEntry, _Alias
    from penstock.checkpoint.state.tree.tree import Node

_OWN_SHARE_MAX = 0.1
"""Largest fraction of one rank's view that may be another rank's own values."""


class View(NamedTuple):
    """A checkpoint as one rank sees it.

    Attributes:
        node: The tree; leaves refer to ``tensors`` and ``aliases`` by index.
        tensors: Stored entries, then wholes.
        aliases: Further names, and windows.
        wholes: Index of each whole -> its name in the parts.
        unreached: Wholes that are stored but not in the tree, by name.
        lost: Losses of a salvage that the tree does not mark as missing.
        is_shared: Whether the checkpoint may hold more than this rank sees.
        tree_chars: Length of all trees that were parsed.
    """

    node: Node
    tensors: Sequence[TensorEntry]
    aliases: Sequence[_Alias]
    wholes: dict[int, str]
    unreached: dict[str, StoredBoxes]
    lost: tuple[str, ...]
    is_shared: bool
    tree_chars: int

    @property
    def are_few_unreached(self) -> bool:
        """Whether the unreached tensors may be values that each rank has of its own.

        An example are the statistics of a normalization, beside weights that all ranks have. Layers
        of pipeline stages with equal names are as large on one rank as on the next.
        """
        reached_bytes = sum(self.tensors[index].end for index in self.wholes)
        own_bytes: Counter[str] = Counter()
        for name, stored in self.unreached.items():
            # Grouped by the lowest rank that holds it, which is the suffix of its name.
            own_bytes[name.rpartition("@")[2]] += stored.items * dtypes.ITEM_BYTES[stored.dtype]
        return max(own_bytes.values()) <= _OWN_SHARE_MAX * reached_bytes


def may_share(checkpoint: _native.Checkpoint, *, has_boxes: bool) -> bool:
    """Whether a tree may name shared tensors, or ranks may hold different ones."""
    # A single rank may have shared tensors without elements, which have no boxes. A member whose
    # name is written with escapes is missed here, but its leaf is refused, as it has no index.
    return checkpoint.world_size > 1 or has_boxes or '"g"' in checkpoint.tree


def view(
    checkpoint: _native.Checkpoint, rank: int, state: Any = None, *, is_alone: bool = False
) -> View:
    """Builds the view of a rank.

    A rank beyond the number that saved sees the checkpoint like the rank modulo that number, and a
    rank that saved nothing like the first one. Tensors that the rank did not have, such as the
    layers of another pipeline stage, are added from the other ranks if their place is unique; other
    trees are parsed only for that. If the rank's state is lost, the tree of another rank gives the
    places of shared tensors, and all other leaves are missing.

    Args:
        checkpoint: An open checkpoint.
        rank: The rank.
        state: The state to fill, if any: only its members are added from other ranks.
        is_alone: Whether the view has exactly the tensors that the rank saved.
    """
    # Collections would look through each entry while the next ones are made.
    with gc_paused():
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
    gone = SalvageLosses.of(checkpoint)
    stored = _stored(boxes, tensors, gone.shared)
    numbering = Numbering(tensors, aliases, checkpoint.offsets(), stored, gone.shared)
    parsed = tree.parse(text)
    if saved_rank in gone.states and not is_alone:
        text, parsed = _in_place_of_lost(checkpoint, gone) or (text, parsed)
    node = numbering.number(parsed, saved_rank)
    tree_chars = len(text)
    unseen = (stored.keys() | gone.shared) - numbering.names
    if unseen and not is_alone:
        merging = Merging(numbering, node, state)
        for other in _storing_first(checkpoint, boxes, unseen, saved_rank):
            if not merging.is_wanting:
                break
            text = checkpoint.rank_tree(other)
            tree_chars += len(text)
            # A tensor without a place in this tree has none in the others either.
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


def _in_place_of_lost(
    checkpoint: _native.Checkpoint, gone: SalvageLosses
) -> tuple[str, Node] | None:
    """Returns a tree with the places of shared tensors, as a substitute for a lost tree.

    All its other leaves belong to another rank, and are missing here.
    """
    for rank in range(checkpoint.world_size):
        text = checkpoint.rank_tree(rank)
        if rank not in gone.states and text not in (tree.AS_FIRST, _NOTHING):
            return text, shared_only(tree.parse(text))
    return None


_NOTHING = "{}"
"""The tree of a rank without a state of its own."""


def _storing_first(
    checkpoint: _native.Checkpoint, boxes: Sequence[BoxEntry], unseen: set[str], own: int
) -> Iterator[int]:
    """Yields the ranks whose trees may name unseen tensors, as long as any are unseen.

    A rank that stores a part of a tensor names it, so these ranks come first; the others follow
    only for tensors that none of those has named.

    Args:
        checkpoint: The checkpoint.
        boxes: The boxes of all tensors.
        unseen: The names that are searched; the caller removes those that a tree has named.
        own: The rank whose tree is known.
    """
    firsts = [first for first, _ in checkpoint.offsets()]
    storing: dict[int, set[str]] = {}
    for box in boxes:
        if box.tensor in unseen:
            rank = bisect.bisect_right(firsts, box.index) - 1
            storing.setdefault(rank, set()).add(box.tensor)
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
    boxes: Sequence[BoxEntry], tensors: Sequence[TensorEntry], missing: frozenset[str]
) -> dict[str, StoredBoxes]:
    """Sums the boxes of each whole that is not missing, by name."""
    found: dict[str, StoredBoxes] = {}
    for box in boxes:
        name = box.tensor
        if name in missing:
            continue
        entry = tensors[box.index]
        items = math.prod(entry.shape)
        known = found.get(name)
        items += 0 if known is None else known.items
        found[name] = StoredBoxes(entry.dtype, box.shape, items)
    return found
