"""Taking a state apart where many ranks save it together.

Beside what `penstock.flatten` does: tensors that several ranks hold get a name that is the same on
all of them, and of those this rank gets its share to write. The rest is the rank's own, and is
stored as a rank alone would.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from penstock import ties
from penstock.errors import UnsupportedStateError
from penstock.flatten import Flattened, Flattener
from penstock.gcpause import gc_paused
from penstock.memory import CPU, Memory, narrow, of_tensor, to_source
from penstock.sharding import Balance, Piece, Sharder, Wanted, check_local, share_out
from penstock.tree import ROOT, Node, unique_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._native import _TensorSource
    from penstock.flatten import PerRank
    from penstock.sharding import Members, Sharding
    from penstock.ties import View

GENERATOR_BYTES_MAX = 64 << 10
"""A vector of bytes up to this is taken for the state of a random generator, one of each rank."""


@dataclass(frozen=True, slots=True)
class Spread(Flattened):
    """A state of many ranks, taken apart by one of them.

    Attributes:
        balance: What the rank saw, for the others to compare.
    """

    balance: Balance


@dataclass(slots=True)
class _Leaf:
    """A tensor that other ranks hold as well, or a part of."""

    name: str
    node: dict[str, Any]
    memory: Memory
    sharding: Sharding
    identity: object

    @property
    def global_name(self) -> str:
        """Other ranks may have another tensor of the same name, whose lowest holder is another."""
        leader = self.sharding.holders.leader
        return f"{self.name}@{leader}" if leader else self.name


def spread(state: Any, sharder: Sharder) -> Spread:
    """Takes a state apart; see `penstock.flatten.flatten`.

    Args:
        state: What this rank has.
        sharder: How its tensors lie on the ranks.

    Raises:
        UnsupportedStateError: A leaf cannot be stored; the message names it.
    """
    with gc_paused():
        return _Spreader(sharder).spread(state)


class _Spreader(Flattener):
    """The walk over the state of one of many ranks."""

    def __init__(self, sharder: Sharder) -> None:
        super().__init__()
        self._sharder = sharder
        self._shared: list[_Leaf] = []
        self._own_depth = 0
        self._handlers[DTensor] = type(self)._dtensor

    def spread(self, state: Any) -> Spread:
        """Walks a state; once only."""
        root = self.encode(state, ROOT, 0)
        balance = Balance(self._sharder.rank)
        leaves = self._untie(balance)
        pieces = self._shares(leaves)
        own, aliases = self.finish()
        taken = [source[0] for source in own] + [name for name, _, _ in aliases]
        names = unique_names(taken + [leaves[piece.tensor].name for piece in pieces])
        names = names[len(taken) :]
        hosts: dict[int, Memory] = {}
        tensors = own + [
            self._source(leaves[piece.tensor], piece, name, hosts)
            for piece, name in zip(pieces, names, strict=True)
        ]
        tree = json.dumps(root, ensure_ascii=False, check_circular=False, separators=(",", ":"))
        return Spread(tensors, aliases, tree, balance)

    # Leaves.

    def _per_rank(self, value: PerRank, name: str, level: int) -> Node:
        self._own_depth += 1
        node = super()._per_rank(value, name, level)
        self._own_depth -= 1
        return node

    def _tensor(self, value: Any, name: str, level: int) -> Node:
        if self._own_depth or _is_generator_state(value):
            return super()._tensor(value, name, level)
        sharding = self._sharder.plain(value.shape)
        return self._share(value, value, name, sharding)

    def _dtensor(self, value: DTensor, name: str, level: int) -> Node:
        if self._own_depth:
            raise UnsupportedStateError(
                f"{name}: a DTensor is shared by its mesh and cannot be a rank's own: take it out "
                "of PerRank",
                key=name,
            )
        sharding = self._sharder.sharded(value, name)
        local = value._local_tensor
        if type(local) is not torch.Tensor:
            # Still on its way from a collective.
            local = value.to_local().detach()
        if sharding.is_held:
            check_local(sharding.boxes, value, local.shape, name)
        return self._share(value, local, name, sharding)

    def _share(self, value: Any, local: torch.Tensor, name: str, sharding: Sharding) -> Node:
        self._values.append(value)
        memory = of_tensor(local, name)
        storage = local.untyped_storage()._cdata if memory.high == memory.low else memory.address
        identity = (storage, memory.strides, memory.shape, id(sharding.holders), sharding.token)
        node: dict[str, Any] = {"$": "tensor"}
        self._shared.append(_Leaf(name, node, memory, sharding, (identity, sharding.shape)))
        return node

    # The end.

    def _untie(self, balance: Balance) -> list[_Leaf]:
        """Names every leaf's tensor; returns those that are not another one's ties."""
        for leaf, name in zip(
            self._shared, unique_names([leaf.name for leaf in self._shared]), strict=True
        ):
            leaf.name = name
        views = self._views()
        first: dict[object, _Leaf] = {}
        leaves = []
        for leaf in self._shared:
            base, view = views.get(id(leaf), (first.get(leaf.identity), None))
            if base is None:
                base = first[leaf.identity] = leaf
                leaves.append(leaf)
                if leaf.sharding.is_held:
                    balance.add(leaf.global_name, leaf.memory.dtype, leaf.sharding)
            leaf.node |= {
                "g": base.global_name,
                "dtype": base.memory.dtype,
                "shape": list(base.sharding.shape),
            }
            if view is not None:
                shape, strides, offset = view
                leaf.node["view"] = [list(shape), list(strides), offset]
        return leaves

    def _views(self) -> dict[int, tuple[_Leaf, View | None]]:
        """Plain tensors that are other ones, or parts of them."""
        plain = [leaf for leaf in self._shared if leaf.sharding.token == b"plain"]
        tied = ties.find([leaf.memory for leaf in plain])
        return {id(plain[index]): (plain[base], view) for index, (base, view) in tied.items()}

    def _shares(self, leaves: Sequence[_Leaf]) -> list[Piece]:
        """What this rank writes of the tensors that several ranks hold."""
        common: dict[int, tuple[Members, list[Wanted]]] = {}
        for index, leaf in enumerate(leaves):
            replicas = leaf.sharding.replicas
            _, wanted = common.setdefault(id(replicas), (replicas, []))
            wanted += [
                Wanted(index, leaf.global_name, box, leaf.memory.item_bytes)
                for box in leaf.sharding.boxes
            ]
        rank = self._sharder.rank
        shares = [share_out(wanted, replicas, rank) for replicas, wanted in common.values()]
        return sorted(piece for share in shares for piece in share)

    def _source(
        self, leaf: _Leaf, piece: Piece, name: str, hosts: dict[int, Memory]
    ) -> _TensorSource:
        memory = leaf.memory
        if memory.device != CPU:
            # Once for all pieces of it.
            memory = hosts.setdefault(
                piece.tensor, of_tensor(memory.owner.detach().to(CPU), leaf.name)
            )
        whole = (leaf.global_name, leaf.sharding.shape, piece.box.start)
        return to_source(narrow(memory, piece.box.at, piece.box.shape), name, whole)


def _is_generator_state(value: torch.Tensor) -> bool:
    """Whether it looks like what `torch.get_rng_state` gives: a vector of bytes, not a weight."""
    return (
        value.dtype == torch.uint8
        and value.dim() == 1
        and value.is_cpu
        and value.numel() <= GENERATOR_BYTES_MAX
    )
