"""Loads what Megatron-Core's `load` asks of a strategy from a Penstock checkpoint.

Each rank reads the boxes that its `ShardedTensor`s are, whatever ranks wrote them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import utils
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
)
from penstock.integrations.dcp import directory
from penstock.integrations.dcp.directory import NO_KEYS
from penstock.integrations.megatron import common_state
from penstock.integrations.megatron.pieces import pieces_of
from penstock.integrations.megatron.saving import COMMON_FILE, OBJECTS, TENSORS
from penstock.plugin import (
    MANIFEST,
    BoxRead,
    OpenCheckpoint,
    TreeError,
    branches,
    is_checkpoint,
    of_tensor,
    to_native,
)
from penstock.tensors import dtypes
from penstock.tensors.copying import bump_versions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.options import Options
    from penstock.plugin import Node, SealingKeys, StoredTensor

BOUNCE_BYTES_MAX = 256 << 20
"""Memory for tensors that are not read in place; a single one may take more."""


class ShardedStateMismatchError(StateMismatchError, CheckpointingException):  # type: ignore[misc]
    """The checkpoint has other tensors or objects than the state to load.

    It is an error of Penstock and of Megatron-Core, for programs that expect either.
    """


class _Read(NamedTuple):
    """A box to read.

    Attributes:
        key: The tensor's key.
        source: The stored tensor.
        dtype: Its type.
        start: Index of the box's first element.
        target: The memory to fill, of the box's shape.
    """

    key: str
    source: StoredTensor
    dtype: torch.dtype
    start: tuple[int, ...]
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Size of the box as it is stored."""
        return self.target.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the stored bytes can be read into the target."""
        target = self.target
        is_plain = type(target) in (torch.Tensor, torch.nn.Parameter)
        return is_plain and target.is_cpu and target.dtype == self.dtype


class Reader:
    """An open checkpoint, seen by this rank.

    Args:
        checkpoint_dir: Its directory.
        options: Settings of the I/O; None for ``Options()``.
        keys: The keys that open and check it.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        options: Options | None = None,
        keys: SealingKeys = NO_KEYS,
    ) -> None:
        self.path = os.fspath(checkpoint_dir)
        self._options = to_native(options)
        self._checkpoint = OpenCheckpoint(self.path, unsealing=keys.unsealing)
        try:
            common_state.expect_one(self.path, self._checkpoint.id)
            _check_common(self.path)
            self._checkpoint.view_as(dist.get_rank() if dist.is_initialized() else 0)
            with self._checkpoint.reading():
                members = dict(branches(self._checkpoint.root) or ())
                self._nodes = {
                    name: dict(branches(members.get(name)) or ()) for name in (TENSORS, OBJECTS)
                }
        except BaseException:
            self._checkpoint.release()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoint.release()

    def load(self, sharded_state: Any) -> Any:
        """Returns the state with tensors and objects in the place of their descriptions.

        Raises:
            ShardedStateMismatchError: A tensor or object is not there, or has another shape.
            CorruptCheckpointError: Bytes are damaged.
        """
        # Megatron-Core before 0.16 has no such function, and from 0.19 on does not call it first.
        getattr(utils, "force_all_tensors_to_non_fp8", lambda _: None)(sharded_state)
        with self._checkpoint.reading():
            reads: list[_Read] = []
            keys: list[str] = []
            for one in nested_values(sharded_state):
                if isinstance(one, ShardedTensor):
                    reads += self._reads(one)
                else:
                    keys.append(one.unique_key)
            self._fill(reads)
            objects = dict(zip(keys, self._objects(keys), strict=True))
        taken: dict[str, int] = {}

        def found(one: Any) -> Any:
            if isinstance(one, ShardedTensor):
                return one.data
            index = taken[one.unique_key] = taken.get(one.unique_key, -1) + 1
            values = objects[one.unique_key]
            return values[min(index, len(values) - 1)]

        return dict_list_map_outplace(found, sharded_state)

    def tensors_metadata(self) -> dict[str, Any]:
        """Describes the stored tensors, by key."""
        found = {}
        with self._checkpoint.reading():
            for key, node in self._nodes[TENSORS].items():
                source, dtype = self._source(node)
                whole = torch.empty(source.shape, dtype=dtype, device="meta")
                found[key] = ShardedTensor.from_rank_offsets(key, whole).without_data()
        return found

    def metadata(self) -> dict[str, Any]:
        """Describes the stored objects and tensors, by key.

        Without the common state, which is an object from Megatron-Core 0.19 on: it is loaded for
        itself, and before 0.19 strict loads would take it for an object that the state lacks.
        """
        objects = map(ShardedObject.empty_from_unique_key, self._nodes[OBJECTS])
        wanted = {one.unique_key: one for one in objects if one.key != common_state.KEY}
        return wanted | self.tensors_metadata()

    def common(self) -> Any:
        """The common state, which is an object, or a small file of the checkpoint.

        Raises:
            ShardedStateMismatchError: There is none.
            CorruptCheckpointError: It is damaged.
        """
        key = common_state.UNIQUE_KEY
        with self._checkpoint.reading():
            if key in self._nodes[OBJECTS]:
                (data,) = self._checkpoint.values([self._nodes[OBJECTS][key]], self._options)
                return _unpickled_common(self.path, data.numpy())[0]
        small = self._checkpoint.small_file(COMMON_FILE)
        if small is None:
            raise ShardedStateMismatchError(
                f"{self.path} has no common state: save it by megatron.core.dist_checkpointing",
                key=key,
                path=self.path,
            )
        return _unpickled_common(self.path, small)

    # Tensors.

    def _source(self, node: Node) -> tuple[StoredTensor, torch.dtype]:
        source = self._checkpoint.tensor(node)
        try:
            return source, dtypes.torch_dtype(source.dtype)
        except ValueError as error:
            raise TreeError(str(error)) from None

    def _reads(self, sharded: Any) -> Iterator[_Read]:
        """Yields the boxes of a tensor to load; makes its memory."""
        key = sharded.key
        source, dtype = self._source(self._node(TENSORS, key))
        is_flexible = sharded.allow_shape_mismatch
        wanted = tuple(sharded.global_shape)
        if len(source.shape) != len(wanted) or (source.shape != wanted and not is_flexible):
            raise ShardedStateMismatchError(
                f"{self.path}: {key} has the global shape {source.shape}, and the model wants "
                f"{wanted}: build the model as the run did that saved it",
                key=key,
                path=self.path,
            )
        if sharded.data is None:
            sharded.init_data("cpu", torch.zeros if is_flexible else torch.empty)
        elif is_flexible:
            sharded.data.detach().zero_()
        for start, elements in pieces_of(sharded):
            target = elements
            for dim, (first, end) in enumerate(zip(start, source.shape, strict=True)):
                target = target.narrow(dim, 0, max(0, min(target.shape[dim], end - first)))
            if target.numel():
                yield _Read(key, source, dtype, start, target)

    def _fill(self, reads: list[_Read]) -> None:
        """Reads boxes in place where the memory is the host's, and the others in batches."""
        direct, bounced = _apart(reads)
        self._read([(one, one.target) for one in direct])
        # Autograd does not notice direct reads.
        bump_versions([one.target for one in direct])
        batch: list[_Read] = []
        nbytes = 0
        for one in bounced:
            if batch and nbytes + one.nbytes > BOUNCE_BYTES_MAX:
                self._bounce(batch)
                batch, nbytes = [], 0
            batch.append(one)
            nbytes += one.nbytes
        self._bounce(batch)

    def _bounce(self, batch: list[_Read]) -> None:
        hosts = [torch.empty(one.target.shape, dtype=one.dtype) for one in batch]
        self._read(list(zip(batch, hosts, strict=True)))
        for one, host in zip(batch, hosts, strict=True):
            one.target.copy_(host)

    def _read(self, reads: list[tuple[_Read, torch.Tensor]]) -> None:
        boxes = [BoxRead(one.source, one.start, of_tensor(into, one.key)) for one, into in reads]
        self._checkpoint.read(boxes, self._options)

    # Objects.

    def _objects(self, keys: list[str]) -> Iterator[list[Any]]:
        nodes = [self._node(OBJECTS, key) for key in keys]
        for key, data in zip(keys, self._checkpoint.values(nodes, self._options), strict=True):
            try:
                # Any code can be in it, as in a checkpoint of Megatron-Core's own.
                yield torch.load(io.BytesIO(data.numpy()), weights_only=False)
            except Exception as error:
                raise CorruptCheckpointError(
                    f"{self.path}: the object {key} is what was saved, and cannot be unpickled: "
                    f"{error}: load it with the programs that saved it",
                    path=self.path,
                    tensor=key,
                ) from error

    def _node(self, kind: str, key: str) -> Node:
        with contextlib.suppress(KeyError):
            return self._nodes[kind][key]
        raise ShardedStateMismatchError(
            f"{self.path} holds no {kind[:-1]} {key!r}: build the model as the run did that saved "
            "it, or pass strict='log_all' (--dist-ckpt-strictness log_all) to go on without it",
            key=key,
            path=self.path,
        )


def load_common(path: str, keys: SealingKeys) -> Any:
    """Returns the common state of a sealed or signed checkpoint.

    Args:
        path: The directory.
        keys: The keys that open and check it.

    Returns:
        The state; `NotImplemented` if Megatron-Core is to read it from the file.

    Raises:
        NotSealedError: It is clear, and a sealed one is demanded.
        SignatureError: No accepted key has signed it.
    """
    if not is_checkpoint(path):
        keys.refuse_clear(path, "a checkpoint of Megatron-Core's own")
        return NotImplemented
    if not keys.refuses_others and (not _is_sealed(path) or directory.holds_dcp(path, keys)):
        return NotImplemented
    with Reader(path, keys=keys) as opened:
        return opened.common()


def _unpickled_common(path: str, data: Any) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu")
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path}: the common state is what was saved, and cannot be unpickled: {error}: load "
            "it with the programs that saved it",
            path=path,
        ) from error


def check_backend(path: str) -> None:
    """Refuses a checkpoint of another format of Megatron-Core, of which it has no reader any more.

    Raises:
        CheckpointNotFoundError: It is of another format than ``torch_dist``.
    """
    if is_checkpoint(path):
        return
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(path, CONFIG_FNAME), encoding="utf-8") as file:
            backend = json.load(file).get("sharded_backend", "torch_dist")
        if backend != "torch_dist":
            raise CheckpointNotFoundError(
                f"{path} is a checkpoint of Megatron-Core's format {backend!r}, which this version "
                "of it does not read: load it with the version that wrote it, and save it anew as "
                "torch_dist",
                path=path,
            )


def _is_sealed(path: str) -> bool:
    return "sealing" in _manifest(path)


def _manifest(path: str) -> Any:
    # Nothing follows from it before the checkpoint has been opened.
    with (
        contextlib.suppress(ValueError),
        open(os.path.join(path, MANIFEST), encoding="utf-8") as file,
    ):
        return json.load(file)
    return {}


def _check_common(path: str) -> None:
    """Refuses a common state of another save than the tensors.

    Megatron-Core before 0.19 writes it in place before a save begins, which may then fail.
    """
    kept = {one["name"]: one["file"] for one in _manifest(path).get("beside", ())}
    if COMMON_FILE not in kept:
        return
    contents = []
    for name in (COMMON_FILE, kept[COMMON_FILE]):
        try:
            with open(os.path.join(path, name), "rb") as file:
                contents.append(file.read())
        except FileNotFoundError:
            contents.append(b"")
    if contents[0] != contents[1]:
        raise CorruptCheckpointError(
            f"{path}: {COMMON_FILE} is not of the save that wrote the tensors: a later save into "
            f"this directory did not complete: copy {kept[COMMON_FILE]} over {COMMON_FILE} to load "
            "the one before",
            path=path,
            file=COMMON_FILE,
        )


def _apart(reads: list[_Read]) -> tuple[list[_Read], list[_Read]]:
    """The boxes to read in place, whose memories do not overlap, and the others."""
    direct: list[_Read] = []
    bounced: list[_Read] = []
    spans = []
    for index, one in enumerate(reads):
        if one.is_direct:
            memory = of_tensor(one.target, one.key)
            spans.append((memory.low, memory.high, index))
        else:
            bounced.append(one)
    reached = 0
    for low, high, index in sorted(spans):
        (direct if low >= reached else bounced).append(reads[index])
        reached = max(reached, high)
    return direct, bounced
