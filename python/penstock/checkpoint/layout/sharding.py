"""Which tensors and boxes each of many ranks writes, determined by each rank independently.

A `DTensor` carries its mesh and placements, so each rank knows which *box* of the tensor it holds
and which other ranks, its *replicas*, hold the same box. Each replicated box is written once: its
holders divide the boxes by the same rule (`sharing`), without communication. For plain tensors, as
under `DistributedDataParallel`, the ranks that hold equal ones are replicas.

One number verifies that every rank saw the same tensors, see `Balance`. This module reads no
tensors and does not communicate.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.checkpoint.layout.boxes import Box, Cut, boxes
from penstock.checkpoint.ranks.members import Copy, Members
from penstock.errors import UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """The distribution of a tensor over the ranks, seen from one rank.

    Attributes:
        shape: Sizes of the global tensor.
        boxes: The boxes that this rank holds.
        holders: All ranks that take part in the tensor.
        replicas: The ranks that hold the same boxes as this one.
        token: Represents the placements in hashes.
        is_held: Whether this rank is one of the holders; a holder may hold no box.
    """

    shape: tuple[int, ...]
    boxes: list[Box]
    holders: Members
    replicas: Members
    token: bytes
    is_held: bool = True


def boxes_of(tensor: DTensor, local_shape: Sequence[int], name: str) -> list[Box]:
    """Returns the boxes that this rank holds of a `DTensor`.

    The local shape is the actual one of the local tensor.
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
    """Refuses a `DTensor` whose local tensor does not match its placements.

    FSDP over tensor parallelism creates such tensors if sizes do not divide evenly. Memory is
    accessed by the boxes, and would be exceeded if they were wrong.
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
    """Returns the cuts that lead to the boxes of the rank at a mesh coordinate."""
    _check_order_is_known(tensor.placements, name)
    placed = zip(tensor.placements, mesh_shape, coordinate, strict=True)
    cuts = [_cut_of(placement, pieces, index, name) for placement, pieces, index in placed]
    return _ordered([cut for cut in cuts if cut is not None], tensor, name)


class _Layout(NamedTuple):
    """The layout given by a mesh and placements, for any shape of the tensor.

    Attributes:
        mesh: Kept alive, so that no other mesh gets its id.
        cuts: The cuts that lead to this rank's boxes; None for a rank outside of the mesh.
        holders: The mesh's ranks.
        replicas: The ranks with the same boxes.
        token: Represents the layout in hashes.
    """

    mesh: DeviceMesh
    cuts: list[Cut] | None
    holders: Members
    replicas: Members
    token: bytes


class Sharder:
    """Determines the distribution of one state's tensors over the ranks.

    Args:
        rank: This rank's number in the group.
        ranks: The group's global ranks, in the group's order.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank = rank
        numbers = np.asarray(ranks, np.int64)
        self._order = np.argsort(numbers)
        self._sorted = numbers[self._order]
        self._interned: dict[bytes, Members] = {}
        self._meshes: dict[tuple[Any, ...], _Layout] = {}
        self._known: dict[tuple[Any, ...], Sharding] = {}

    def plain(self, shape: Sequence[int], holders: Members) -> Sharding:
        """Returns the distribution of a plain tensor: whole, on every rank with an equal one."""
        holders = self._interned.setdefault(holders.token, holders)
        shape = tuple(shape)
        zeros = (0,) * len(shape)
        whole = [] if 0 in shape else [Box(zeros, shape, zeros)]
        return Sharding(shape, whole, holders, holders, b"plain")

    def sharded(self, tensor: DTensor, name: str) -> Sharding:
        """Returns the distribution of a `DTensor`."""
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
        holders = self._members(layout.ravel(), name)
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
        same = layout[where].ravel()
        replicas = holders if same.size == layout.size else self._members(same, name)
        return _Layout(mesh, cuts, holders, replicas, token)

    def _members(self, ranks: npt.NDArray[Any], name: str) -> Members:
        """Returns the members with these global ranks; the same object for equal ranks."""
        found = np.searchsorted(self._sorted, ranks)
        known = self._sorted[np.minimum(found, len(self._sorted) - 1)]
        if (known != ranks).any():
            raise UnsupportedStateError(
                f"{name}: its mesh has rank {ranks[known != ranks][0]}, which is not in the "
                "process group that saves: save with a group that has every rank of the mesh",
                key=name,
            )
        members = Members.of_array(self._order[found])
        return self._interned.setdefault(members.token, members)


def _cut_of(placement: Any, pieces: int, index: int, name: str) -> Cut | None:
    """Returns the cut of a placement; None for a replicating one."""
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


def _check_order_is_known(placements: Sequence[Any], name: str) -> None:
    """Refuses two cuts of one dimension if PyTorch does not record their order.

    FSDP around tensor parallelism cuts in the opposite order of the mesh's dimensions. From PyTorch
    2.5 on, the placement records this (``_StridedShard``); before, it is an ordinary ``Shard``, and
    the boxes would be those of other rows.
    """
    dims = [placement.dim for placement in placements if type(placement).__name__ == "Shard"]
    if len(set(dims)) < len(dims):
        # A late import: it loads all of `DTensor`'s dependencies, and few tensors need it.
        from penstock.tensors.torch_names import SAYS_SHARD_ORDER

        if not SAYS_SHARD_ORDER:
            raise UnsupportedStateError(
                f"{name}: this DTensor is sharded twice along one dimension ({placements}), and "
                "PyTorch before 2.5 does not say in which order: install 'torch>=2.5'",
                key=name,
            )


def _replicates(placement: Any) -> bool:
    return type(placement).__name__ == "Replicate"


def _ordered(cuts: list[Cut], tensor: DTensor, name: str) -> list[Cut]:
    """Returns the cuts in the order in which they were made: from left to right.

    PyTorch has no public API to query another order of a tensor.
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


class Balance:
    """One number by which ranks verify that all of them saw the same tensors.

    Each rank adds a hash of every tensor that it holds; the lowest holder of a tensor subtracts the
    hash as many times as there are holders. Over all ranks the sum is 0 (modulo 2⁶⁴) exactly if
    each holder has the tensor, under the same name, with the same type, shape and placements.
    Replicated elements are counted once more in the same way, by their fingerprints.
    """

    def __init__(self, rank: int) -> None:
        self.copies: list[Copy] = []
        self._rank = rank
        self._sum = 0

    def add(self, name: str, dtype: str, sharding: Sharding) -> None:
        """Adds a tensor to the sum."""
        text = f"{name}\0{dtype}\0{sharding.shape}\0".encode("utf-8", "surrogatepass")
        holders = sharding.holders
        self._count(text + sharding.token + holders.token, holders)

    def add_copy(self, name: str, mark: int, device: str, replicas: Members) -> None:
        """Adds a replicated tensor's fingerprint to the sum."""
        self.copies.append(Copy(name, replicas.leader, mark, device))
        text = f"{name}\0{mark}\0".encode("utf-8", "surrogatepass")
        self._count(text + replicas.token, replicas)

    def _count(self, text: bytes, members: Members) -> None:
        share = _hash(text)
        if self._rank == members.leader:
            share -= share * len(members.ranks)
        self._sum = (self._sum + share) & _U64

    @property
    def sum(self) -> int:
        """This rank's sum: 64 bits."""
        return self._sum


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), sys.byteorder)


class Mismatch(NamedTuple):
    """Two ranks whose copies of a tensor differ, although they should be equal."""

    first: Copy
    second: Copy
    rank: int


def find_mismatch(copies: Iterable[Iterable[Copy]]) -> Mismatch | None:
    """Returns the first two copies that differ, given those of all ranks in order; None if none."""
    known: dict[tuple[str, int], Copy] = {}
    for rank, held in enumerate(copies):
        for copy in held:
            first = known.setdefault((copy.name, copy.leader), copy)
            if first.mark != copy.mark:
                return Mismatch(first, copy, rank)
    return None


def is_balanced(sums: Iterable[int]) -> bool:
    """Whether the sums of all ranks show that each tensor is on all of its holders."""
    return sum(sums) & _U64 == 0
