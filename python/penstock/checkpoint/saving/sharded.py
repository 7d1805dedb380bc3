"""Flattens a state that many ranks save together.

It extends `penstock.checkpoint.state.flatten`: tensors that several ranks hold get the same global
name on all of them, and this rank writes its share of them. All other values are the rank's own,
and are stored as a single rank would.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from penstock.checkpoint.layout.fingerprints import fingerprints
from penstock.checkpoint.layout.sharding import Balance, Sharder, check_local
from penstock.checkpoint.layout.sharing import HeldBox, WriteShare, share_out
from penstock.checkpoint.saving.grouping import names_of_nodes
from penstock.checkpoint.saving.groups import NO_GROUPS, Groups
from penstock.checkpoint.state import ties
from penstock.checkpoint.state.composites import refuse_part
from penstock.checkpoint.state.flatten import Flattener
from penstock.checkpoint.state.flattened import Flattened, Overlap
from penstock.checkpoint.state.linked import mark_of, place_of, type_of
from penstock.checkpoint.state.tree.tree import ROOT, Node, unique_names
from penstock.errors import UnsupportedStateError
from penstock.tensors.devices import CurrentStreams, is_scattered
from penstock.tensors.gc_paused import gc_paused
from penstock.tensors.memory import CPU, Memory, narrow, of_tensor, to_source
from penstock.tensors.native_rows import GlobalBox
from penstock.tensors.torch_names import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.checkpoint.layout.boxes import Box
    from penstock.checkpoint.layout.sharding import Sharding
    from penstock.checkpoint.ranks.members import Members
    from penstock.checkpoint.state.tree.references import Window
    from penstock.tensors.file_tensor import FileTensor
    from penstock.tensors.marks import Boxes, PerRank
    from penstock.tensors.native_rows import TensorSource

GENERATOR_BYTES_MAX = 64 << 10
"""Largest vector of bytes that is taken for the state of a random generator, one per rank."""

Holders: TypeAlias = "Callable[[Sequence[int]], Sequence[Members]]"
"""Returns the ranks that hold each plain tensor, given the tensors' fingerprints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedState(Flattened):
    """One rank's flattened state in a save of many ranks.

    Attributes:
        balance: Facts about the state that the ranks compare.
    """

    balance: Balance


@dataclass(slots=True, eq=False)
class _ShardedLeaf:
    """A tensor of which other ranks may hold a replica or another part.

    Attributes:
        name: Its dotted name, unique on this rank.
        node: The node of the tree; completed at the end.
        value: The tensor.
        dtype: The element type.
        sharding: Its distribution over the ranks; None for a plain tensor until it is known.
        global_name: The name that all its holders use, once it is known.
    """

    name: str
    node: dict[str, Any]
    value: Any
    dtype: str
    sharding: Sharding | None
    global_name: str = field(default="", init=False)

    @property
    def how(self) -> Sharding:
        """The distribution over the ranks, once it is known."""
        if self.sharding is None:
            raise AssertionError("known of every leaf by the time anything is shared out")
        return self.sharding

    def name_globally(self) -> None:
        """Sets the global name."""
        # Another rank may have another tensor of the same name, with another lowest holder. A name
        # that already ends in such a suffix must not be taken for a global one.
        leader = self.how.holders.leader
        is_led = leader or _LED.search(self.name)
        self.global_name = f"{self.name}@{leader}" if is_led else self.name

    def refer(self, base: _ShardedLeaf, window: Window | None) -> None:
        """Completes the node: a tensor that many ranks hold, or a window of it."""
        self.node |= {
            "g": base.global_name,
            "dtype": base.dtype,
            "shape": list(base.how.shape),
        }
        if window is not None:
            shape, strides, offset = window
            self.node["view"] = [list(shape), list(strides), offset]


@dataclass(slots=True, eq=False)
class _MemoryLeaf(_ShardedLeaf):
    """A tensor in memory."""

    memory: Memory

    @property
    def identity(self) -> object:
        """A key that is equal for references to the same tensor of a mesh."""
        memory, how = self.memory, self.how
        layout = (memory.dtype, memory.shape, memory.strides, how.shape, id(how.holders), how.token)
        if memory.high > memory.low:
            return (memory.device, memory.address, layout)
        if 0 not in memory.shape:
            # A copy, or memory without an address.
            return (id(self.value), layout)
        # The address of an empty part is meaningless; its storage is that of the whole tensor.
        owner = memory.owner
        return (owner.untyped_storage()._cdata, owner.storage_offset(), layout)


@dataclass(slots=True, eq=False)
class _FileLeaf(_ShardedLeaf):
    """A tensor in a file."""

    value: FileTensor

    @property
    def identity(self) -> object:
        """A key that is equal for references to the same place."""
        return (place_of(self.value), self.how.shape, id(self.how.holders), self.how.token)


_Tie: TypeAlias = "tuple[_ShardedLeaf, _ShardedLeaf, Window | None]"
"""A tensor, its base, and the window of the base; None for the whole base."""

_OfMesh = TypeVar("_OfMesh", _MemoryLeaf, _FileLeaf)

_LED = re.compile(r"@[0-9]+$")
"""Suffix of the global names of tensors that rank 0 does not hold."""


def flatten_sharded(
    state: Any,
    sharder: Sharder,
    holders: Holders,
    *,
    finds_overlaps: bool = False,
    groups: Groups | None = None,
) -> ShardedState:
    """Flattens a state; see `penstock.checkpoint.state.flatten.flatten`.

    Args:
        state: This rank's state.
        sharder: Determines the distribution of its tensors over the ranks.
        holders: Returns, in one call, the ranks that hold the same plain tensors.
        finds_overlaps: Whether to find leaves that share memory.
        groups: Tensors that readers of models shall find: if ranks hold the whole tensor, one rank
            writes all of it.
    """
    with gc_paused():
        flattener = _ShardedFlattener(sharder, holders, groups or NO_GROUPS)
        return flattener.flatten_sharded(state, finds_overlaps=finds_overlaps)


class _ShardedFlattener(Flattener):
    """The walk over one rank's state."""

    def __init__(self, sharder: Sharder, holders: Holders, groups: Groups) -> None:
        super().__init__()
        self._sharder = sharder
        self._holders = holders
        self._groups = groups
        # Identities of tensors that belong to a group under their own name.
        self._grouped: set[int] = set()
        self._shared: list[_MemoryLeaf] = []
        self._shared_files: list[_FileLeaf] = []
        self._own_depth = 0
        self.handlers[DTensor] = type(self)._dtensor

    def flatten_sharded(self, state: Any, *, finds_overlaps: bool) -> ShardedState:
        """Walks a state; may be called once."""
        root = self.encode(state, ROOT, 0)
        balance = Balance(self._sharder.rank)
        names = names_of_nodes(root) if self._groups.group_of else {}
        leaves, in_files = self._name(balance, names)
        pieces = self._shares(leaves)
        own, aliases = self.finish()
        self._check_pieces()
        self.link_files(len(own) + len(pieces), aliases)
        taken = [row[0] for rows in (own, self.linker.linked.tensors, aliases) for row in rows]
        wanted = [leaves[piece.tensor].name for piece in pieces]
        wanted += [leaf.name for leaf, _ in in_files]
        labels = unique_names(taken + wanted)[len(taken) :]
        places = CurrentStreams()
        tensors = own + [
            _source(leaves[piece.tensor], piece, name, places)
            for piece, name in zip(pieces, labels[: len(pieces)], strict=True)
        ]
        for (leaf, box), name in zip(in_files, labels[len(pieces) :], strict=True):
            self.linker.add(
                leaf.value, name, GlobalBox(leaf.global_name, leaf.how.shape, box.start)
            )
        tree = json.dumps(root, ensure_ascii=False, check_circular=False, separators=(",", ":"))
        overlaps: list[Overlap] = []
        if finds_overlaps:
            written: dict[int, list[int]] = {}
            for number, piece in enumerate(pieces, len(own)):
                written.setdefault(id(leaves[piece.tensor]), []).append(number)
            overlaps = self.overlaps(
                [(leaf.memory, leaf.value, written.get(id(leaf), [])) for leaf in self._shared]
            )
        return ShardedState(
            tensors,
            aliases,
            tree,
            self.linker.linked,
            overlaps,
            self.untied,
            self.in_pieces,
            balance=balance,
        )

    # Leaves.

    def encode_per_rank(self, value: PerRank, name: str, level: int) -> Node:
        self._own_depth += 1
        node = super().encode_per_rank(value, name, level)
        self._own_depth -= 1
        return node

    def encode_tensor(self, value: Any, name: str, level: int) -> Node:
        if self._own_depth:
            return super().encode_tensor(value, name, level)
        return self._share(value, value, name, None)

    def _dtensor(self, value: DTensor, name: str, level: int) -> Node:
        if self._own_depth:
            raise _not_own(name, "DTensor")
        sharding = self._sharder.sharded(value, name)
        local = value._local_tensor
        if type(local) is not torch.Tensor:
            # An asynchronous collective has not delivered it yet.
            local = value.to_local().detach()
            refuse_part(local, name)
        if sharding.is_held:
            check_local(sharding.boxes, value, local.shape, name)
        return self._share(value, local, name, sharding)

    def _share(self, value: Any, local: torch.Tensor, name: str, sharding: Sharding | None) -> Node:
        node: dict[str, Any] = {"$": "tensor"}
        memory = of_tensor(local, name)
        self._shared.append(_MemoryLeaf(name, node, value, memory.dtype, sharding, memory))
        return node

    def encode_boxes(self, value: Boxes, name: str, level: int) -> Node:
        if value.is_array:
            raise UnsupportedStateError(
                f"{name}: this array lies in pieces of one process, and ranks of torch.distributed "
                "save together: save with no_dist=True, each rank to a path of its own",
                key=name,
            )
        if self._own_depth:
            raise _not_own(name, "tensor in pieces")
        return super().encode_boxes(value, name, level)

    def encode_file_tensor(self, value: FileTensor, name: str, level: int) -> Node:
        like = value.like
        if like is None:
            # Plain tensors in this rank's files are invisible to the other ranks.
            return super().encode_file_tensor(value, name, level)
        if self._own_depth:
            raise _not_own(name, "DTensor")
        sharding = self._sharder.sharded(like, name)
        if sharding.is_held:
            check_local(sharding.boxes, like, value.shape, name)
        if len(sharding.boxes) > 1:
            raise UnsupportedStateError(
                f"{name}: this rank holds {len(sharding.boxes)} pieces of a tensor in one file: "
                f"the placements {like.placements} cannot be stored by a link; .redistribute(…) "
                "the parameter to Shard or Replicate first",
                key=name,
            )
        dtype, _ = type_of(value, name)
        node: dict[str, Any] = {"$": "tensor"}
        self._shared_files.append(_FileLeaf(name, node, value, dtype, sharding))
        return node

    # Completion of the nodes.

    def _check_pieces(self) -> None:
        """Refuses tensors in pieces that the parts of all ranks do not show to be wrong.

        These are one whose name on this rank is not that of the whole, and one without a piece
        here, of which no other rank need have any.
        """
        for name, value, nodes in self._boxed.values():
            if not value.pieces:
                raise UnsupportedStateError(
                    f"{name}: this rank gives no piece of it: leave it out of the state here",
                    key=name,
                )
            if nodes[0]["g"] != name:
                raise UnsupportedStateError(
                    f"{name}: two leaves have this name, and one is a tensor in pieces: rename a "
                    "key of one",
                    key=name,
                )

    def _name(
        self, balance: Balance, names: Mapping[int, str]
    ) -> tuple[list[_MemoryLeaf], list[tuple[_FileLeaf, Box]]]:
        """Completes the nodes of all tensors.

        Returns:
            The tensors in memory that several ranks may hold; and the tensors in files that this
                rank links, each with its box.
        """
        shared = [*self._shared, *self._shared_files]
        for leaf, name in zip(shared, unique_names([leaf.name for leaf in shared]), strict=True):
            if leaf.sharding is not None and name.startswith(f"{leaf.name}~"):
                # Another rank may see the two tensors in the other order.
                raise UnsupportedStateError(
                    f"{leaf.name}: two tensors have this name, and one of them is a DTensor: "
                    "rename a key of one",
                    key=leaf.name,
                )
            leaf.name = name
        groups = self._groups.among(names.values())
        ties: list[_Tie] = []
        bases = self._untie([leaf for leaf in self._shared if leaf.sharding is None], ties)
        of_mesh = [leaf for leaf in self._shared if leaf.sharding is not None]
        self._ask(bases)
        leaves = bases + _untie_sharded(of_mesh, ties)
        in_files = _untie_sharded(self._shared_files, ties)
        for leaf in (*leaves, *in_files):
            leaf.name_globally()
            if leaf.how.is_held:
                balance.add(leaf.global_name, leaf.dtype, leaf.how)
        _compare(leaves[len(bases) :], balance)
        _compare_files(in_files, balance)
        for leaf, base, window in [*((leaf, leaf, None) for leaf in (*leaves, *in_files)), *ties]:
            leaf.refer(base, window)
            if names and window is None and groups.group(names[id(leaf.node)]) is not None:
                self._grouped.add(id(base))
        rank = self._sharder.rank
        # A file is linked as a whole, so replicas have nothing to divide.
        return leaves, [
            (leaf, box)
            for leaf in in_files
            for box in leaf.how.boxes
            if leaf.how.replicas.leader == rank
        ]

    def _untie(self, plain: Sequence[_MemoryLeaf], found: list[_Tie]) -> list[_MemoryLeaf]:
        """Returns the plain tensors that are no parts of others, which other ranks may hold too."""
        first: dict[int, int] = {}
        same = [first.setdefault(id(leaf.value), index) for index, leaf in enumerate(plain)]
        memories = [leaf.memory for leaf in plain]
        tied = ties.find(memories)
        self.untied += [
            (plain[index].name, plain[other].name) for index, other in ties.apart(memories, tied)
        ]
        bases = []
        for index, leaf in enumerate(plain):
            base, window = tied.get(index, (same[index], None))
            if _is_generator_state(plain[base].memory):
                self.add_leaf(leaf.name, leaf.node, leaf.value, leaf.memory)
            elif base == index:
                bases.append(leaf)
            else:
                found.append((leaf, plain[base], window))
        return bases

    def _ask(self, bases: Sequence[_MemoryLeaf]) -> None:
        """Finds out which ranks hold the same plain tensors."""
        marks = fingerprints([(leaf.name, leaf.memory) for leaf in bases])
        for leaf, holders in zip(bases, self._holders(marks), strict=True):
            leaf.sharding = self._sharder.plain(leaf.memory.shape, holders)

    def _shares(self, leaves: Sequence[_MemoryLeaf]) -> list[WriteShare]:
        """Returns this rank's share of the tensors that several ranks hold."""
        common: dict[int, tuple[Members, list[HeldBox]]] = {}
        for index, leaf in enumerate(leaves):
            replicas = leaf.how.replicas
            _, held = common.setdefault(id(replicas), (replicas, []))
            held += [
                HeldBox(
                    index,
                    leaf.global_name,
                    box,
                    leaf.memory.item_bytes,
                    is_cut=not (box.shape == leaf.how.shape and id(leaf) in self._grouped),
                )
                for box in leaf.how.boxes
            ]
        rank = self._sharder.rank
        shares = [share_out(held, replicas, rank) for replicas, held in common.values()]
        return sorted(piece for share in shares for piece in share)


def _untie_sharded(leaves: Sequence[_OfMesh], found: list[_Tie]) -> list[_OfMesh]:
    """Returns each tensor of a mesh once."""
    first: dict[object, _OfMesh] = {}
    bases = []
    for leaf in leaves:
        base = first.setdefault(leaf.identity, leaf)
        if base is leaf:
            bases.append(leaf)
        else:
            found.append((leaf, base, None))
    return bases


def _not_own(name: str, what: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"{name}: a {what} is shared with other ranks and cannot be a rank's own: take it out of "
        "PerRank",
        key=name,
    )


def _compare(leaves: Sequence[_MemoryLeaf], balance: Balance) -> None:
    """Records the fingerprints of replicated elements for comparison: now, as they may change."""
    copies = [leaf for leaf in leaves if leaf.how.boxes and len(leaf.how.replicas.ranks) > 1]
    marks = fingerprints([(leaf.global_name, leaf.memory) for leaf in copies])
    for leaf, mark in zip(copies, marks, strict=True):
        device = leaf.memory.device.partition(":")[0]
        balance.add_copy(leaf.global_name, mark, device, leaf.how.replicas)


def _compare_files(leaves: Sequence[_FileLeaf], balance: Balance) -> None:
    """Records those of file tensors by their known digests, without reading."""
    for leaf in leaves:
        if leaf.how.boxes and len(leaf.how.replicas.ranks) > 1:
            mark = mark_of(leaf.value, leaf.global_name)
            balance.add_copy(leaf.global_name, mark, "file", leaf.how.replicas)


def _source(
    leaf: _MemoryLeaf, piece: WriteShare, name: str, places: CurrentStreams
) -> TensorSource:
    """Returns a piece in the form that the native module reads."""
    memory, box = leaf.memory, piece.box
    is_there = memory.device == CPU or places.of(memory) is not None
    narrowed = narrow(memory, box.at, box.shape) if is_there else memory
    if memory.device == CPU or (is_there and not is_scattered(narrowed)):
        memory = narrowed
    else:
        # Only the elements that this rank writes are copied to the host.
        part = memory.owner.detach()
        for dim, (at, size) in enumerate(zip(box.at, box.shape, strict=True)):
            part = part.narrow(dim, at, size)
        memory = of_tensor(part.to(CPU), name)
    source = to_source(memory, name, GlobalBox(leaf.global_name, leaf.how.shape, box.start), places)
    if source.owner is leaf.value:
        return source
    # PyTorch counts the changes of a `DTensor` on itself, not on its local tensor.
    return source._replace(owner=(source.owner, leaf.value))


def _is_generator_state(memory: Memory) -> bool:
    """Whether a memory looks like the state of `torch.get_rng_state`: a vector of bytes.

    Each rank has another generator state, so the ranks need not compare it.
    """
    is_vector = memory.dtype == "uint8" and len(memory.shape) == 1
    return is_vector and memory.device == CPU and memory.nbytes <= GENERATOR_BYTES_MAX
