"""Writes a checkpoint of Megatron-Core that Penstock has stored as a directory of ``torch_dist``.

Megatron-Core loads that directory without Penstock. Tensors are copied in boxes of bounded size, as
DCP stores them: each is a ``torch.save`` file within a file. ``.metadata`` is written last, so that
a directory that was not finished counts as none.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.checkpoint.converting.distributed.megatron import (
    COMMON,
    COMMON_OBJECT,
    CONFIG,
    OBJECTS,
    TENSORS,
    only_element,
)
from penstock.checkpoint.loading.dcp_files import METADATA
from penstock.checkpoint.loading.opened import BoxRead, OpenCheckpoint
from penstock.checkpoint.state.tree.scalars import TreeError
from penstock.checkpoint.state.tree.tree import branches
from penstock.errors import CheckpointExistsError, CorruptCheckpointError, UnsupportedStateError
from penstock.io.files import durable
from penstock.sealing.unsealing import CLEAR, Unsealing
from penstock.tensors import dtypes
from penstock.tensors.memory import of_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOX_BYTES_MAX = 64 << 20
"""Largest box, and so the memory that a conversion takes."""

FILE_BYTES_MAX = 8 << 30
"""Size from which on the next item begins a new file."""

_NAME = "__0_{}.distcp"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The start and the shape of a part of a tensor."""


class Written(NamedTuple):
    """The result.

    Attributes:
        checkpoint_id: Identity of the checkpoint that was read.
        step: Its step.
        tensors: Number of tensors.
        tensor_bytes: Bytes of their data.
        bytes: Bytes of all files written.
    """

    checkpoint_id: str
    step: int | None
    tensors: int
    tensor_bytes: int
    bytes: int


def write_torch_dist(
    source: str,
    path: str,
    options: dict[str, Any],
    progress: Callable[[int, int], object] | None = None,
    unsealing: Unsealing = CLEAR,
) -> Written:
    """Writes a directory of ``torch_dist``.

    Args:
        source: A checkpoint that `penstock.integrations.megatron` or `convert` has saved.
        path: The new directory, which may exist and be empty.
        options: How bytes are read.
        progress: Called with the bytes done and the bytes in all.
        unsealing: How a sealed checkpoint is opened.
    """
    if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise CheckpointExistsError(
            f"{path} is not empty: choose another directory for the checkpoint of Megatron-Core",
            path=path,
        )
    opened = OpenCheckpoint(source, unsealing=unsealing)
    try:
        opened.view_as(0)
        with opened.reading():
            return _write(opened, path, options, progress)
    finally:
        opened.release()


def _write(
    opened: OpenCheckpoint,
    path: str,
    options: dict[str, Any],
    progress: Callable[[int, int], object] | None,
) -> Written:
    tensors, objects = _members(opened)
    if opened.is_sealed:
        files = _of_sealed(opened, objects, options)
    else:
        files = {name: _small_file(opened, name) for name in (CONFIG, COMMON)}
    stored = {name: opened.tensor(node) for name, node in tensors.items()}
    kinds = {name: _dtype(one.dtype) for name, one in stored.items()}
    total = sum(kinds[name].itemsize * _count(one.shape) for name, one in stored.items())
    os.makedirs(path, exist_ok=True)
    done = 0
    with _Files(path) as data:
        for name, one in stored.items():
            dtype = kinds[name]
            chunks: list[ChunkStorageMetadata] = []
            for start, sizes in boxes(one.shape, dtype.itemsize):
                elements = torch.empty(sizes, dtype=dtype)
                opened.read([BoxRead(one, start, of_tensor(elements, name))], options)
                index = MetadataIndex(name, torch.Size(start), len(chunks))
                chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)))
                data.add(index, partial(torch.save, elements))
                done += elements.nbytes
                if progress is not None:
                    progress(done, total)
            data.entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(one.shape), chunks
            )
        for name, node in objects.items():
            (content,) = opened.values([node], options)
            data.add(MetadataIndex(name), partial(_put, content))
            data.entries[name] = BytesStorageMetadata()
        data.finish(files)
    return Written(opened.id, opened.native.step, len(stored), total, data.bytes)


def _members(opened: OpenCheckpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    members = dict(branches(opened.root) or ())
    if members.keys() != {TENSORS, OBJECTS}:
        raise UnsupportedStateError(
            f"{opened.path}: it holds no checkpoint of Megatron-Core: only those that were saved "
            "by penstock.integrations.megatron, or converted from one, can be written as one",
            key=TENSORS,
        )
    tensors, objects = (dict(branches(members[name]) or ()) for name in (TENSORS, OBJECTS))
    return tensors, objects


def _of_sealed(
    opened: OpenCheckpoint, objects: dict[str, Any], options: dict[str, Any]
) -> dict[str, bytes]:
    """Returns the small files for a sealed checkpoint, which has the common state as an object.

    The object is taken out: before 0.19 Megatron-Core would miss it in the state to load.
    """
    node = objects.pop(COMMON_OBJECT, None)
    if node is None:
        raise UnsupportedStateError(
            f"{opened.path}: it was saved without a common state, which Megatron-Core takes to "
            "load it",
            key=COMMON_OBJECT,
        )
    (data,) = opened.values([node], options)
    config = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = only_element(data, f"{opened.path} (common)")
    return {CONFIG: json.dumps(config).encode(), COMMON: common}


def _small_file(opened: OpenCheckpoint, name: str) -> bytes:
    """Returns a file beside the shards, once both of its copies say the same."""
    copies: list[bytes | None] = []
    for copy in (name, f"beside.{opened.id}.{name}"):
        try:
            with open(os.path.join(opened.path, copy), "rb") as file:
                copies.append(file.read())
        except FileNotFoundError:
            copies.append(None)
    found, kept = copies
    if kept is None:
        raise UnsupportedStateError(
            f"{opened.path}: it was saved without {name}, which Megatron-Core takes to load it",
            key=name,
        )
    if found != kept:
        raise CorruptCheckpointError(
            f"{opened.path}: {name} is not the one that was saved with the tensors: copy "
            f"beside.{opened.id}.{name} over it",
            path=opened.path,
            file=name,
        )
    return kept


def _put(content: Any, file: _Output) -> None:
    file.write(content.numpy())


def _dtype(name: str) -> torch.dtype:
    try:
        return dtypes.torch_dtype(name)
    except ValueError as error:
        raise TreeError(str(error)) from None


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def boxes(
    shape: tuple[int, ...], item_bytes: int, box_bytes_max: int = BOX_BYTES_MAX
) -> Iterator[Box]:
    """Cuts a tensor into boxes of bounded size, along the first dimensions.

    Example:
        >>> list(boxes((3, 4), 1, 8))
        [((0, 0), (2, 4)), ((2, 0), (1, 4))]
        >>> list(boxes((2, 5), 1, 3))
        [((0, 0), (1, 3)), ((0, 3), (1, 2)), ((1, 0), (1, 3)), ((1, 3), (1, 2))]
    """
    if not shape or _count(shape) * item_bytes <= box_bytes_max:
        yield (0,) * len(shape), shape
        return
    count = box_bytes_max // (_count(shape[1:]) * item_bytes)
    for first in range(0, shape[0], max(count, 1)):
        if count:
            yield (first, *(0,) * (len(shape) - 1)), (min(count, shape[0] - first), *shape[1:])
            continue
        for start, sizes in boxes(shape[1:], item_bytes, box_bytes_max):
            yield (first, *start), (1, *sizes)


class _Files:
    """The files of a directory, written one after another, and all removed after a failure.

    Attributes:
        entries: DCP's descriptions of the items, by name.
        places: Their places.
        bytes: Bytes written so far.
    """

    def __init__(self, path: str) -> None:
        self.entries: dict[str, Any] = {}
        self.places: dict[MetadataIndex, _StorageInfo] = {}
        self.bytes = 0
        self._path = path
        self._names: list[str] = []
        self._file: _Output | None = None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            return
        # The error of the failed operation counts, not those that follow from it.
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        for name in reversed(self._names):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._path, name))

    def add(self, index: MetadataIndex, write: Callable[[_Output], object]) -> None:
        """Adds an item, by a function that writes it."""
        if self._file is not None and self._file.tell() >= FILE_BYTES_MAX:
            self._close()
        if self._file is None:
            name = _NAME.format(len(self._names))
            self._file = _Output(os.path.join(self._path, name))
            self._names.append(name)
        begin = self._file.tell()
        self._file.put(write)
        length = self._file.tell() - begin
        self.places[index] = _StorageInfo(self._names[-1], begin, length)
        self.bytes += length

    def finish(self, files: dict[str, bytes]) -> None:
        """Writes the small files, and `METADATA`, once the data is durable."""
        self._close()
        record = pickle.dumps(Metadata(self.entries, None, self.places))
        for name, content in {**files, METADATA: record}.items():
            self._names.append(name)
            durable.replace(os.path.join(self._path, name), content)
            self.bytes += len(content)
        durable.sync(os.path.dirname(os.path.abspath(self._path)))

    def _close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None


class _Output(io.BufferedWriter):
    """A new file that ``torch.save`` can write to.

    PyTorch may raise a RuntimeError of its own after a failed write, so the error of the operating
    system is kept.
    """

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path, "x"))
        self._error: OSError | None = None

    def put(self, write: Callable[[_Output], object]) -> None:
        """Calls a function that writes; raises the operating system's error if that failed."""
        try:
            write(self)
        except RuntimeError:
            if self._error is not None:
                raise self._error from None
            raise

    def write(self, content: Any) -> int:
        """Appends bytes."""
        try:
            return super().write(content)
        except OSError as error:
            self._error = error
            raise

    def sync(self) -> None:
        """Makes the bytes durable."""
        self.flush()
        os.fsync(self.fileno())
