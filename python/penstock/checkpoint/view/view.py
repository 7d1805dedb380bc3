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

from penstock.checkpoint.state import tree
from penstock.checkpoint.view.merging import Merging
from penstock.checkpoint.view.numbering import Numbering, Stored
from penstock.checkpoint.view.partial import Gone, shared_only
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock import _native
    from penstock._native import _Alias
    from penstock.checkpoint.state.references import Row
    from penstock.checkpoint.state.tree import Node

    _BoxRow: TypeAlias = tuple[int, str, tuple[int, ...], tuple[int, ...]]

_OWN_SHARE_MAX = 0.1
"""Of what one rank sees, what another may have instead."""


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
