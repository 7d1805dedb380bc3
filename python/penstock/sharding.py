"""What each of many ranks writes of a state, decided by every rank for itself.

A `DTensor` carries its mesh and placements, so each rank knows which *box* of the tensor it holds
and which other ranks hold the same one, its *replicas*. Of replicas each box is written once: all
who hold it share it out by the same rule, largest first to whoever has least, and so agree without
a word. Of plain tensors, as `DistributedDataParallel` keeps them, ranks that hold the same ones are
replicas.

That every rank saw the same tensors is checked with one number, see `Balance`. Nothing here reads
a tensor or talks to another rank.
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

PIECE_BYTES_MIN = 4 << 20
"""Replicas cut a box no finer than this: smaller pieces cost more requests than they level out."""

_PIECES_PER_SHARE = 8
"""Pieces are at most so small a part of what each replica writes: they fill up to within that."""

_U64 = (1 << 64) - 1

Run = tuple[int, int]
"""First index and the index after the last, along one dimension of a global tensor."""


class Box(NamedTuple):
    """A block of a global tensor.

    Attributes:
        start: First index along each dimension.
        shape: Sizes.
        at: Where it begins in the tensor that this rank holds.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]


class Cut(NamedTuple):
    """One placement that shards.

    Attributes:
        dim: The tensor's dimension.
        pieces: Into how many.
        piece: Which of them is meant.
        split_factor: Pieces that the dimension is in already, each to be cut by itself; 1 for
            an ordinary shard.
    """

    dim: int
    pieces: int
    piece: int
    split_factor: int


def boxes(shape: Sequence[int], cuts: Iterable[Cut]) -> list[Box]:
    """The boxes of a global tensor that remain after some cuts; nearly always one, or none.

    Pieces are those of `torch.chunk`: all of the same size, the last ones shorter or empty.

    Args:
        shape: Sizes of the global tensor.
        cuts: Applied in order.

    Example:
        >>> boxes((10, 4), [Cut(dim=0, pieces=4, piece=3, split_factor=1)])
        [Box(start=(9, 0), shape=(1, 4), at=(0, 0))]
    """
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], cut)
    found = [Box((), (), ())]
    for dim_runs in runs:
        found = [
            Box((*box.start, start), (*box.shape, stop - start), (*box.at, at))
            for box in found
            for (start, stop), at in _placed(dim_runs)
        ]
    return found


def _cut(runs: list[Run], cut: Cut) -> list[Run]:
    chosen: list[Run] = []
    for part in range(cut.split_factor):
        chosen += _chunk(_chunk(runs, cut.split_factor, part), cut.pieces, cut.piece)
    return _joined(chosen)


def _chunk(runs: list[Run], pieces: int, index: int) -> list[Run]:
    """Piece ``index`` of the indices in the runs, all in a row."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // pieces)
    low, high = min(index * size, total), min((index + 1) * size, total)
    chosen = []
    at = 0
    for start, stop in runs:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            chosen.append((start + first, start + last))
        at += stop - start
    return chosen


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _placed(runs: list[Run]) -> list[tuple[Run, int]]:
    """Runs with where each begins in the local tensor."""
    placed = []
    at = 0
    for start, stop in runs:
        placed.append(((start, stop), at))
        at += stop - start
    return placed


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Some of the ranks that save together; compared by identity, as there may be thousands.

    Attributes:
        ranks: Their numbers in the group, ascending.
        token: Stands for them in hashes.
    """

    ranks: tuple[int, ...]
    token: bytes = field(repr=False)

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Members:
        """The members with these numbers."""
        members = tuple(sorted(ranks))
        text = ",".join(map(str, members)).encode()
        return cls(members, blake2b(text, digest_size=8).digest())

    @property
    def leader(self) -> int:
        """The lowest of them."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor lies on the ranks, seen from one of them.

    Attributes:
        shape: Sizes of the global tensor.
        boxes: What this rank holds of it.
        holders: Every rank that takes part in the tensor.
        replicas: Those who hold the same boxes as this one.
        token: Stands for the placements in hashes.
        is_held: Whether this rank is one of the holders; some of them may hold no box.
    """

    shape: tuple[int, ...]
    boxes: list[Box]
    holders: Members
    replicas: Members
    token: bytes
    is_held: bool = True


def boxes_of(tensor: DTensor, local_shape: Sequence[int], name: str) -> list[Box]:
    """What this rank holds of a `DTensor`, whoever holds the rest.

    Args:
        tensor: The tensor.
        local_shape: Sizes of what this rank holds in fact.
        name: Its name, for messages.

    Raises:
        UnsupportedStateError: Its elements are partial sums, or lie in a way that is not known.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or 0 in tensor.shape:
        return []
    found = boxes(tensor.shape, _cuts(tensor, tuple(mesh.shape), coordinate, name))
    check_local(found, tensor, local_shape, name)
    return found


def check_local(
    found: Sequence[Box], tensor: DTensor, local_shape: Sequence[int], name: str
) -> None:
    """Refuses a `DTensor` of which a rank does not hold what its placements say.

    Such are made by FSDP over tensor parallelism, where sizes do not divide evenly. Memory is
    reached by what the boxes say: past its end, if that were wrong.

    Raises:
        UnsupportedStateError: The rank's tensor has other sizes than its boxes together.
    """
    ends = [[at + size for at, size in zip(box.at, box.shape, strict=True)] for box in found]
    said = tuple(map(max, zip(*ends, strict=True)))
    if said != tuple(local_shape) if found else math.prod(local_shape):
        raise UnsupportedStateError(
            f"{name}: this DTensor holds {tuple(local_shape)} of {tuple(tensor.shape)}, which its "
            f"placements {tensor.placements} do not say: .redistribute(…) it first",
            key=name,
        )


def _cuts(
    tensor: DTensor, mesh_shape: Sequence[int], coordinate: Sequence[int], name: str
) -> list[Cut]:
    """The cuts that lead to the boxes of the rank at a coordinate of the mesh."""
    placed = zip(tensor.placements, mesh_shape, coordinate, strict=True)
    cuts = [_cut_of(placement, pieces, index, name) for placement, pieces, index in placed]
    return _ordered([cut for cut in cuts if cut is not None], tensor, name)


class _Layout(NamedTuple):
    """What a mesh and placements come to, whatever the tensor's shape.

    Attributes:
        mesh: Held, so that no other mesh gets its id.
        cuts: What leads to this rank's boxes; None for a rank outside of the mesh.
        holders: The mesh's ranks.
        replicas: Those of the same boxes.
        token: Stands for the layout in hashes.
    """

    mesh: DeviceMesh
    cuts: list[Cut] | None
    holders: Members
    replicas: Members
    token: bytes


class Sharder:
    """Tells how the tensors of one state lie on the ranks.

    Args:
        rank: This rank's number in the group.
        ranks: The group's global ranks, in its order.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank = rank
        self._number_of = {number: index for index, number in enumerate(ranks)}
        self._interned: dict[bytes, Members] = {}
        self._meshes: dict[tuple[Any, ...], _Layout] = {}
        self._known: dict[tuple[Any, ...], Sharding] = {}

    def plain(self, shape: Sequence[int], holders: Members) -> Sharding:
        """How a plain tensor lies: whole, on every rank that has the same one."""
        holders = self._interned.setdefault(holders.token, holders)
        shape = tuple(shape)
        zeros = (0,) * len(shape)
        whole = [] if 0 in shape else [Box(zeros, shape, zeros)]
        return Sharding(shape, whole, holders, holders, b"plain")

    def sharded(self, tensor: DTensor, name: str) -> Sharding:
        """How a `DTensor` lies.

        Raises:
            UnsupportedStateError: Its elements are partial sums, lie on ranks that do not save,
                or in a way that is not known.
        """
        mesh, placements = tensor.device_mesh, tensor.placements
        shape = tuple(tensor.shape)
        key = (id(mesh), placements, shape, getattr(tensor._spec, "shard_order", None))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._describe(tensor, mesh, shape, name)
        return known

    def _describe(
        self, tensor: DTensor, mesh: DeviceMesh, shape: tuple[int, ...], name: str
    ) -> Sharding:
        key = (id(mesh), tensor.placements, getattr(tensor._spec, "shard_order", None))
        if key not in self._meshes:
            self._meshes[key] = self._lay_out(tensor, mesh, name)
        layout = self._meshes[key]
        if layout.cuts is None:
            return Sharding(shape, [], layout.holders, layout.holders, layout.token, is_held=False)
        held = [] if 0 in shape else boxes(shape, layout.cuts)
        return Sharding(shape, held, layout.holders, layout.replicas, layout.token)

    def _lay_out(self, tensor: DTensor, mesh: DeviceMesh, name: str) -> _Layout:
        layout = mesh.mesh.numpy(force=True)
        try:
            holders = self._members(layout.ravel().tolist())
        except KeyError as error:
            raise UnsupportedStateError(
                f"{name}: its mesh has rank {error.args[0]}, which is not in the process group "
                "that saves: save with a group that has every rank of the mesh",
                key=name,
            ) from None
        order = blake2b(np.ascontiguousarray(layout).tobytes(), digest_size=8).digest()
        token = order + f"{layout.shape} {tensor.placements}".encode()
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return _Layout(mesh, None, holders, holders, token)
        cuts = _cuts(tensor, layout.shape, coordinate, name)
        where = tuple(
            slice(None) if _replicates(placement) else index
            for placement, index in zip(tensor.placements, coordinate, strict=True)
        )
        same = layout[where].ravel().tolist()
        replicas = holders if len(same) == layout.size else self._members(same)
        return _Layout(mesh, cuts, holders, replicas, token)

    def _members(self, numbers: list[int]) -> Members:
        """The members with these global ranks; the same object for the same ones."""
        members = Members.of(self._number_of[number] for number in numbers)
        return self._interned.setdefault(members.token, members)


def _cut_of(placement: Any, pieces: int, index: int, name: str) -> Cut | None:
    """The cut that a placement makes; None for one that replicates.

    Raises:
        UnsupportedStateError: It does neither.
    """
    if _replicates(placement):
        return None
    kind = type(placement).__name__
    if kind == "Shard":
        return Cut(placement.dim, pieces, index, 1)
    if kind == "_StridedShard":
        return Cut(placement.dim, pieces, index, int(placement.split_factor))
    if placement.is_partial():
        remedy = "it holds partial sums: .redistribute(…) it to Shard or Replicate first"
    else:
        remedy = f"the placement {placement} is not known: .redistribute(…) it first"
    raise UnsupportedStateError(f"{name}: this DTensor cannot be stored: {remedy}", key=name)


def _replicates(placement: Any) -> bool:
    return type(placement).__name__ == "Replicate"


def _ordered(cuts: list[Cut], tensor: DTensor, name: str) -> list[Cut]:
    """The cuts in the order in which they were made: from left to right.

    PyTorch has no public way to ask a tensor whether it is another.
    """
    spec = tensor._spec
    order = getattr(spec, "shard_order", None)
    default = getattr(spec, "compute_default_shard_order", None)
    if not order or default is None or order == default(tensor.placements):
        return cuts
    raise UnsupportedStateError(
        f"{name}: this DTensor is sharded in an order of its own ({order}): .redistribute(…) it "
        "to the default order first",
        key=name,
    )


class Piece(NamedTuple):
    """A box of a tensor, or a part of it, that somebody has to write.

    Attributes:
        tensor: Which of the tensors.
        box: What of it.
    """

    tensor: int
    box: Box


class Wanted(NamedTuple):
    """A box that is on several ranks.

    Attributes:
        tensor: Which of the tensors.
        name: Its name, the same on all ranks.
        box: What of it.
        item_bytes: Bytes of an element.
    """

    tensor: int
    name: str
    box: Box
    item_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return _nbytes(self.box.shape, self.item_bytes)


def share_out(wanted: Sequence[Wanted], replicas: Members, rank: int) -> list[Piece]:
    """What one of several ranks, all of which hold the same boxes, writes of them.

    Boxes that are large beside a fair share are cut along a dimension. Then the largest piece goes
    to the rank that has least, and so on ("longest processing time first", Graham 1969), which
    leaves the fullest rank within a piece of the emptiest.

    Args:
        wanted: All boxes that these ranks have in common, in any order.
        replicas: The ranks.
        rank: The one that asks.
    """
    if len(replicas.ranks) == 1:
        return [Piece(item.tensor, item.box) for item in wanted]
    share_bytes = sum(item.nbytes for item in wanted) // len(replicas.ranks)
    piece_bytes_max = max(share_bytes // _PIECES_PER_SHARE, PIECE_BYTES_MIN)
    pieces = [
        (-_nbytes(box.shape, item.item_bytes), item.name, box, item.tensor)
        for item in wanted
        for box in _split(item.box, item.nbytes, piece_bytes_max)
    ]
    pieces.sort()
    # Equal loads go by number: a heap of pairs needs no more.
    loads = [(0, number) for number in replicas.ranks]
    mine = []
    for minus_bytes, _, box, tensor in pieces:
        load_bytes, number = loads[0]
        heapq.heapreplace(loads, (load_bytes - minus_bytes, number))
        if number == rank:
            mine.append(Piece(tensor, box))
    return mine


def _split(box: Box, nbytes: int, piece_bytes_max: int) -> list[Box]:
    """A box in about equal pieces along its first dimension that has enough to give."""
    pieces = -(-nbytes // piece_bytes_max)
    if pieces == 1:
        return [box]
    dim = next((dim for dim, size in enumerate(box.shape) if size >= pieces), None)
    if dim is None:
        dim = max(range(len(box.shape)), key=box.shape.__getitem__)
        pieces = box.shape[dim]
    size = box.shape[dim]
    cut = []
    for piece in range(pieces):
        low, high = size * piece // pieces, size * (piece + 1) // pieces
        cut.append(
            Box(
                _with(box.start, dim, box.start[dim] + low),
                _with(box.shape, dim, high - low),
                _with(box.at, dim, box.at[dim] + low),
            )
        )
    return cut


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _nbytes(shape: tuple[int, ...], item_bytes: int) -> int:
    return math.prod(shape) * item_bytes


class Balance:
    """One number by which ranks that each saw some tensors find out whether all saw the same.

    Each rank adds a hash of every tensor that it holds; the lowest of a tensor's holders takes off
    as many times that hash as there are holders. Over all ranks that comes to 0 (modulo 2⁶⁴) just
    when each holder has the tensor, under the same name, with the same type, shape and placements.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sum = 0

    def add(self, name: str, dtype: str, sharding: Sharding) -> None:
        """Counts a tensor in."""
        text = f"{name}\0{dtype}\0{sharding.shape}\0".encode("utf-8", "surrogatepass")
        holders = sharding.holders
        digest = blake2b(text + sharding.token + holders.token, digest_size=8).digest()
        share = int.from_bytes(digest, sys.byteorder)
        if self._rank == holders.leader:
            share -= share * len(holders.ranks)
        self._sum = (self._sum + share) & _U64

    @property
    def sum(self) -> int:
        """This rank's number: 64 bits."""
        return self._sum


def is_balanced(sums: Iterable[int]) -> bool:
    """Whether the numbers of all ranks say that each tensor is on all of its holders."""
    return sum(sums) & _U64 == 0
