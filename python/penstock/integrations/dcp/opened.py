"""`Opened`: a checkpoint in DCP's terms; reads its items.

Tensors are read box by box, directly into those of the state that is loaded if these are on the
host and of the stored type; others go through bounce buffers of bounded size.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

from penstock.checkpoint.state.tree.references import is_composite
from penstock.checkpoint.state.tree.scalars import integers, member
from penstock.checkpoint.view.partial import is_missing
from penstock.errors import PartialCheckpointError, StateMismatchError
from penstock.integrations.dcp import layout
from penstock.integrations.dcp.overlaps import FilledTargets
from penstock.plugin import CPU, BoxRead, OpenCheckpoint, TreeError, leaves, of_tensor
from penstock.tensors import dtypes
from penstock.tensors.copying import bump_versions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from penstock.plugin import Memory, Node, StoredTensor, Unsealing

BOUNCE_BYTES_MAX = 1 << 30
"""Memory for bounce buffers; a single tensor may take more."""


@dataclass(slots=True)
class _Read:
    """One of the planner's requests.

    Attributes:
        item: The request.
        target: The tensor to fill.
        memory: Its memory, if it can be filled in place.
        source: The stored tensor.
        dtype: Type of the stored tensor.
        start: Begin of the requested box in it.
        host: A bounce buffer, if the target is not filled directly.
    """

    item: ReadItem
    target: torch.Tensor
    memory: Memory | None
    source: StoredTensor
    dtype: torch.dtype
    start: tuple[int, ...]
    host: torch.Tensor | None = None

    def bounce(self) -> int:
        """Gives the request a bounce buffer; returns its bytes."""
        of_what = self.source.shape if self.source.window else self.target.shape
        self.host = torch.empty(of_what, dtype=self.dtype, device="cpu")
        return self.host.numel() * self.host.element_size()

    @property
    def name(self) -> str:
        """The tensor's name in the state."""
        return str(self.item.dest_index.fqn)

    def request(self) -> BoxRead:
        """The box to read and the memory to fill."""
        source, host, start = self.source, self.host, self.start
        memory = self.memory if host is None else of_tensor(host, self.item.storage_index.fqn)
        if memory is None:
            raise AssertionError("neither the target nor other memory can be filled")
        if host is not None and source.window is not None:
            start = (0,) * host.dim()
        return BoxRead(source, start, memory)

    def copy_out(self) -> None:
        """Copies a bounce buffer to the target."""
        if self.host is None:
            return
        found, window = self.host, self.source.window
        if window is not None:
            found = found.as_strided(*window)
            for dim, (first, size) in enumerate(zip(self.start, self.target.shape, strict=True)):
                found = found.narrow(dim, first, size)
        self.target.copy_(found)


class Opened:
    """An open checkpoint and its items."""

    def __init__(self, path: str, *, allow_partial: bool, unsealing: Unsealing) -> None:
        self._checkpoint = OpenCheckpoint(path, unsealing=unsealing)
        self.id = self._checkpoint.id
        try:
            with self.reading():
                note = self._checkpoint.metadata().get(layout.NOTE)
                # A checkpoint by DCP has one tree; in others each rank has its own values.
                checkpoint, rank = self._checkpoint, 0 if note is not None else _rank()
                is_left_out = checkpoint.view_as(rank, allow_partial=allow_partial)
                # From the whole tree: DCP would take a list without its tensors for a value.
                found = layout.read(checkpoint.root, note, checkpoint.tree_chars)
                self._layout = _without_missing(found) if is_left_out else found
        except PartialCheckpointError as error:
            self.release()
            if allow_partial:
                raise
            remedy = "for DCP, StorageReader(…, allow_partial=True) does"
            raise PartialCheckpointError(
                f"{error}; {remedy}", path=error.path, missing=error.missing
            ) from None
        except BaseException:
            self.release()
            raise

    def reading(self) -> AbstractContextManager[None]:
        """Raises malformed trees as damage of the checkpoint."""
        return self._checkpoint.reading()

    def release(self) -> None:
        """Allows the files to be removed."""
        self._checkpoint.release()

    # Metadata.

    def metadata(self, meta: StorageMeta) -> Metadata:
        """DCP's description of the checkpoint."""
        chunks = self._chunks()
        found: dict[str, Any] = {}
        for name, node in self._layout.nodes.items():
            if is_composite(node) and "shape" in node:
                found[name] = self._whole(node)
                continue
            if not _is_tensor(node):
                found[name] = BytesStorageMetadata()
                continue
            source, dtype = self._source(node)
            shape = source.shape if source.window is None else source.window[0]
            whole = ChunkStorageMetadata(torch.Size((0,) * len(shape)), torch.Size(shape))
            found[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype),
                size=torch.Size(shape),
                chunks=[whole] if source.window else chunks.get(source.of, [whole]),
            )
        return Metadata(
            state_dict_metadata=found,
            planner_data=self._layout.planner_data,
            storage_data={},
            storage_meta=meta,
        )

    def _whole(self, node: dict[str, Node]) -> TensorStorageMetadata:
        """The description of a composite tensor, stored as one piece."""
        try:
            size = torch.Size(integers({**node, "v": node["shape"]}))
            if "dtype" in node:
                dtype = dtypes.torch_dtype(member(node, "dtype", str))
            else:
                _, dtype = self._source(member(member(node, "v", dict), "values", dict))
        except (ValueError, RuntimeError, OverflowError) as error:
            raise TreeError(str(error)) from None
        whole = ChunkStorageMetadata(torch.Size((0,) * len(size)), size)
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=size, chunks=[whole]
        )

    def _chunks(self) -> dict[str | int, list[ChunkStorageMetadata]]:
        """The stored boxes of tensors that are stored in boxes."""
        chunks: dict[str | int, list[ChunkStorageMetadata]] = {}
        for name, start, shape in self._checkpoint.boxes():
            chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
            chunks.setdefault(name, []).append(chunk)
        return chunks

    def _source(self, node: dict[str, Node]) -> tuple[StoredTensor, torch.dtype]:
        source = self._checkpoint.tensor(node)
        try:
            return source, dtypes.torch_dtype(source.dtype)
        except ValueError as error:
            raise TreeError(str(error)) from None

    def _node(self, item: ReadItem) -> Node:
        name = item.storage_index.fqn
        if name not in self._layout.nodes:
            path = self._checkpoint.path
            raise StateMismatchError(f"{path}: there is no {name!r}", key=name, path=path)
        return self._layout.nodes[name]

    # Plain values.

    def read_values(self, plan: LoadPlan, planner: LoadPlanner, options: dict[str, Any]) -> None:
        """Gives the planner its plain values, as bytes of `torch.save`."""
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        nodes = [self._node(item) for item in items]
        for item, value in zip(items, self._checkpoint.values(nodes, options), strict=True):
            data = io.BytesIO()
            if item.storage_index.fqn in self._layout.raw:
                if type(value) is not bytes:
                    raise TreeError(f"{item.storage_index.fqn!r:.80} is not bytes")
                data.write(value)
            else:
                torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)

    # Tensors.

    def read_tensors(self, plan: LoadPlan, planner: LoadPlanner, options: dict[str, Any]) -> None:
        """Fills the planner's tensors."""
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        for item in items:
            if is_composite(self._node(item)):
                self._copy_whole(item, planner, options)
        items = [item for item in items if not is_composite(self._node(item))]
        filled = FilledTargets()
        for batch in self._batches(items, planner, filled):
            self._checkpoint.read([read.request() for read in batch], options)
            for read in batch:
                if read.host is None:
                    filled.add(read.name, read.target)
            for read in batch:
                if read.host is not None:
                    with filled.kept(read.name, read.target):
                        read.copy_out()
                    filled.add(read.name, read.target)
                # Autograd does not notice direct reads.
                bump_versions([read.target])
                planner.commit_tensor(read.item, read.target)

    def _copy_whole(self, item: ReadItem, planner: LoadPlanner, options: dict[str, Any]) -> None:
        """Fills a composite tensor, by the copy of its class."""
        name, path = item.storage_index.fqn, self._checkpoint.path
        (value,) = self._checkpoint.values([self._node(item)], options)
        target = planner.resolve_tensor(item)
        if any(item.storage_offsets) or item.lengths != value.shape:
            raise StateMismatchError(
                f"{path}: {name!r} is a {type(value).__name__} that is made of other tensors, of "
                f"which the planner wants a part: {tuple(item.lengths)} of {tuple(value.shape)}",
                key=name,
                path=path,
            )
        try:
            # Not detached, as the copy may give a sparse tensor new indices.
            with torch.no_grad():
                target.copy_(value)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise StateMismatchError(
                f"{path}: {name!r} is a {type(value).__name__}, which the {type(target).__name__} "
                f"in the state does not take: {error}; build the state as that of the save was",
                key=name,
                path=path,
            ) from error
        planner.commit_tensor(item, target)

    def _batches(
        self, items: list[ReadItem], planner: LoadPlanner, filled: FilledTargets
    ) -> Iterator[list[_Read]]:
        """The requests in batches whose bounce buffers have a bounded size."""
        batch: list[_Read] = []
        bounced_bytes = 0
        for item in items:
            read = self._read(item, planner)
            if read.memory is None or filled.sharing(read.name, read.target):
                bounced_bytes += read.bounce()
            batch.append(read)
            if bounced_bytes >= BOUNCE_BYTES_MAX:
                yield _untangled(batch)
                batch, bounced_bytes = [], 0
        yield _untangled(batch)

    def _read(self, item: ReadItem, planner: LoadPlanner) -> _Read:
        name, path = item.storage_index.fqn, self._checkpoint.path
        node = self._node(item)
        if not _is_tensor(node):
            raise StateMismatchError(f"{path}: {name!r} is no tensor", key=name, path=path)
        target = planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise StateMismatchError(
                f"{name}: the planner gives {tuple(target.shape)} for a box of "
                f"{tuple(item.lengths)}",
                key=name,
                path=path,
            )
        source, dtype = self._source(node)
        origin = item.storage_index.offset or (0,) * len(item.storage_offsets)
        start = tuple(map(sum, zip(origin, item.storage_offsets, strict=True)))
        return _Read(item, target, _memory(target, source, dtype, name), source, dtype, start)


def _memory(
    target: torch.Tensor, source: StoredTensor, dtype: torch.dtype, name: str
) -> Memory | None:
    """The memory of a tensor that can be filled with the stored bytes directly; else None."""
    is_same = target.dtype == dtype and source.window is None
    if not is_same or not target.is_cpu or target.is_conj() or target.is_neg():
        return None
    memory = of_tensor(target, name)
    return memory if memory.device == CPU else None


def _untangled(batch: list[_Read]) -> list[_Read]:
    """Gives bounce buffers to all but one of the tensors that share memory.

    Boxes of one tensor do not overlap, though the memory between their ends may.
    """
    spans = sorted(
        (read.memory.low, read.memory.high, index)
        for index, read in enumerate(batch)
        if read.memory is not None and read.memory.high > read.memory.low
    )
    reached, owner = 0, None
    for low, high, index in spans:
        read = batch[index]
        dest = (read.item.dest_index.fqn, read.item.dest_index.offset)
        if low < reached and dest != owner:
            read.bounce()
        elif high > reached:
            reached, owner = high, dest
    return batch


def _without_missing(found: layout.Layout) -> layout.Layout:
    """The items without missing parts."""
    nodes = {
        name: node
        for name, node in found.nodes.items()
        if not any(is_missing(leaf) for _, leaf in leaves(node))
    }
    return found._replace(nodes=nodes)


def _is_tensor(node: Node) -> bool:
    return type(node) is dict and node.get("$") == "tensor"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
