"""Packs one rank's items of DCP's plan: tensors of its part, and nodes of the tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from penstock.checkpoint.state.composites import Parts, take_apart
from penstock.checkpoint.state.refusals import refusal
from penstock.errors import UnsupportedStateError
from penstock.plugin import (
    Flattener,
    GlobalBox,
    PerRank,
    of_tensor,
    to_source,
    unique_names,
)
from penstock.tensors import dtypes
from penstock.tensors.devices import CurrentStreams
from penstock.tensors.file_tensor import FileTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        SavePlanner,
        TensorWriteData,
        WriteItem,
    )

    from penstock.plugin import Memory, Node, TensorSource


@dataclass(frozen=True, slots=True)
class Packed:
    """The items of one rank.

    Attributes:
        tensors: Tensors that the rank writes.
        nodes: The node of each item; the same on every rank that has boxes of one tensor.
        raw: Names of values that are the planner's own bytes.
        results: DCP's result of each item.
    """

    tensors: list[TensorSource]
    nodes: dict[str, Node]
    raw: list[str]
    results: list[WriteResult]


def pack(plan: SavePlan, planner: SavePlanner, *, is_alone: bool) -> Packed:
    """Resolves the items of a plan.

    Args:
        plan: The items that this rank writes.
        planner: Holds their data.
        is_alone: Whether no other rank writes. Then a whole tensor is stored as such; any other is
            a box of a global tensor, to which every tree can refer.
    """
    packer = _Packer(planner, is_alone)
    results = []
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            nbytes = packer.add_value(item)
        else:
            nbytes = packer.add_tensor(item)
        results.append(WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=None))
    return Packed(packer.tensors(), packer.nodes, packer.raw, results)


def result_of_rank(report: object) -> WriteResult:
    """A rank's report to the coordinator, as the only type that DCP transmits."""
    return WriteResult(index=MetadataIndex("penstock"), size_in_bytes=0, storage_data=report)


def global_name(name: str) -> str:
    """Name of an item's tensor in all parts: never empty, without lone surrogates."""
    (unique,) = unique_names([name])
    return unique


@dataclass(slots=True)
class _Packer:
    planner: SavePlanner
    is_alone: bool
    nodes: dict[str, Node] = field(default_factory=dict)
    raw: list[str] = field(default_factory=list)
    _entries: list[tuple[str, Memory, GlobalBox | None]] = field(default_factory=list)

    def tensors(self) -> list[TensorSource]:
        """All tensors to write. Tensors on other devices are copied to the host here."""
        names = unique_names([name for name, _, _ in self._entries])
        places = CurrentStreams()
        return [
            to_source(memory, name, box, places)
            for (_, memory, box), name in zip(self._entries, names, strict=True)
        ]

    def add_tensor(self, item: WriteItem) -> int:
        """Adds a tensor, or a box of one; returns its bytes."""
        name, data = item.index.fqn, item.tensor_data
        tensor = self.planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor) or data is None:
            raise UnsupportedStateError(
                f"{name}: the planner gives {type(tensor).__name__} for a tensor", key=name
            )
        if (parts := take_apart(tensor, name)) is not None:
            return self._add_composite(name, tensor, parts, data)
        memory = of_tensor(tensor.detach(), name)
        chunk, shape = data.chunk, tuple(data.size)
        if memory.shape != chunk.sizes:
            raise UnsupportedStateError(
                f"{name}: the planner gives a tensor of {tuple(memory.shape)} where it has planned "
                f"{tuple(chunk.sizes)}: plan what resolve_data returns",
                key=name,
            )
        node = {"$": "tensor"}
        is_whole = chunk.sizes == data.size
        self._add(name, node, memory, shape, tuple(chunk.offsets), is_whole=is_whole)
        check_same(name, self.nodes.setdefault(name, node), node)
        return memory.nbytes

    def _add_composite(
        self, name: str, tensor: torch.Tensor, parts: Parts, data: TensorWriteData
    ) -> int:
        """Adds a composite tensor, which can be stored only as a whole."""
        if data.chunk.sizes != data.size or tensor.size() != data.size:
            raise UnsupportedStateError(
                f"{name}: a part of a {type(tensor).__name__} cannot be stored, which is made of "
                "other tensors: save it whole, on one rank or as a copy of each",
                key=name,
            )
        encoder = _WholeEncoder()
        node = encoder.encode(tensor, name, 1)
        nbytes = self._add_leaves(encoder)
        check_same(name, self.nodes.setdefault(name, node), node)
        return nbytes

    def add_value(self, item: WriteItem) -> int:
        """Adds any other value; returns its bytes, as far as they are known."""
        name = item.index.fqn
        planner = _plain(self.planner)
        if planner is not None:
            value = planner.lookup_object(item.index)
            _check_files(value, name)
            try:
                return self._encode(name, value)
            except UnsupportedStateError:
                # Store a refused value as the planner's pickle.
                pass
        data = self.planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            raise UnsupportedStateError(f"{name}: the planner gives a tensor for bytes", key=name)
        self.raw.append(name)
        return self._encode(name, data.getvalue())

    def _encode(self, name: str, value: Any) -> int:
        encoder = _ValueEncoder()
        node = encoder.encode(value, name, 1)
        nbytes = self._add_leaves(encoder)
        self.nodes[name] = node
        return nbytes

    def _add_leaves(self, encoder: _ValueEncoder) -> int:
        """Adds the tensors of a value; returns their bytes."""
        leaves = encoder.data(needs_torch_type=not self.is_alone)
        for leaf_name, leaf, memory in leaves:
            shape = tuple(memory.shape)
            self._add(leaf_name, leaf, memory, shape, (0,) * len(shape), is_whole=True)
        return sum(memory.nbytes for _, _, memory in leaves)

    def _add(
        self,
        name: str,
        node: dict[str, Any],
        memory: Memory,
        shape: tuple[int, ...],
        start: tuple[int, ...],
        *,
        is_whole: bool,
    ) -> None:
        """Adds a box of a tensor of this shape, and completes the node that refers to it."""
        box = None
        if self.is_alone and is_whole:
            node["i"] = len(self._entries)
        else:
            box = GlobalBox(global_name(name), shape, start)
            node |= {"g": box.tensor, "dtype": memory.dtype, "shape": list(shape)}
        self._entries.append((name, memory, box))


def check_same(name: str, known: Node, node: Node) -> None:
    """Raises `UnsupportedStateError` if two ranks describe one item differently."""
    if known != node:
        raise UnsupportedStateError(
            f"{name}: the planner gives one tensor with two types or shapes: {known}, {node}",
            key=name,
        )


def _check_files(value: Any, name: str) -> None:
    """Refuses parts of `DTensor`s in files: of a value DCP stores one rank's."""
    if isinstance(value, FileTensor) and value.like is not None:
        raise UnsupportedStateError(
            f"{name}: of a tensor in a file this rank has a part, which "
            "torch.distributed.checkpoint would take for all of it: save the state of this "
            "optimizer with penstock.save or penstock.CheckpointStore",
            key=name,
        )
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            _check_files(one, name)


def _plain(planner: SavePlanner) -> DefaultSavePlanner | None:
    """The planner, if it turns values into bytes by `torch.save` alone; else None."""
    if not isinstance(planner, DefaultSavePlanner):
        return None
    kind = type(planner)
    is_plain = (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )
    return planner if is_plain else None


class _ValueEncoder(Flattener):
    """Encodes a value, or refuses it if `torch.load` would give another one than `penstock.load`.

    In a state that `penstock.save` flattens, only the elements of tensors count. Here a tensor is
    inside a value, such as a tuple, and must keep all its properties.
    """

    def __init__(self) -> None:
        super().__init__()
        for kind in (np.memmap, torch.nn.Parameter, PerRank):
            self.handlers.pop(kind, None)

    def encode_tensor(self, value: Any, name: str, level: int) -> Node:
        if value.requires_grad or not value.is_cpu or vars(value):
            raise refusal(value, name)
        return super().encode_tensor(value, name, level)

    def encode_file_tensor(self, value: FileTensor, name: str, level: int) -> Node:
        # DCP asks for values, and cannot refer to a file.
        return self.encode_tensor(value.read(), name, level)

    def encode_unusual(self, value: Any, name: str) -> Node:
        if not isinstance(value, np.dtype | np.generic):
            # Arrays of other libraries would be loaded as NumPy arrays.
            raise refusal(value, name)
        return super().encode_unusual(value, name)

    def encode_composite(self, value: Any, name: str, level: int) -> Node:
        raise refusal(value, name)

    def data(self, *, needs_torch_type: bool) -> list[tuple[str, dict[str, Any], Memory]]:
        """Name, node and memory of every leaf that is stored outside the tree."""
        found = [(name, node, self.memories[index]) for name, node, index in self.leaves]
        _, aliases = self.finish()
        for name, node, memory in found:
            is_known = memory.dtype in dtypes.ITEM_BYTES or not needs_torch_type
            if aliases or not is_known:
                raise refusal(memory.owner, name)
            node.pop("i")
        return found


class _WholeEncoder(_ValueEncoder):
    """Encodes a composite tensor, of which only the elements count, as of any item."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers[torch.nn.Parameter] = self.handlers[torch.Tensor]

    def encode_tensor(self, value: Any, name: str, level: int) -> Node:
        return Flattener.encode_tensor(self, value.detach(), name, level)

    def encode_composite(self, value: Any, name: str, level: int) -> Node:
        return Flattener.encode_composite(self, value, name, level)
