"""Saves what Megatron-Core's `save` hands to a strategy, as one Penstock checkpoint of all ranks.

A `ShardedTensor` says which box of which global tensor it is, and whether this rank stores it. So
no rank plans for the others: each writes its boxes, and the ranks exchange votes of fixed size. The
state is a dictionary of two: ``"tensors"`` by their keys, and under ``"objects"`` the bytes that
Megatron-Core would write of each `ShardedObject`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from dataclasses import asdict
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)

import penstock

# The first save would import it otherwise, and take that much longer than the next ones.
import penstock.checkpoint.saving.sharded
from penstock.errors import CannotSealError, StorageError, UnsupportedStateError
from penstock.integrations.dcp import directory, layout
from penstock.integrations.megatron import agreement
from penstock.integrations.megatron.pieces import pieces_of
from penstock.integrations.megatron.waiting import EndMark, wait_for_end, wait_here
from penstock.plugin import Boxes, LiveState, SealingKeys

if TYPE_CHECKING:
    from penstock.options import Options

TENSORS, OBJECTS = "tensors", "objects"
"""The members of the state."""

COMMON_KEY = "common_state"
"""Key of the object that holds the common state, from Megatron-Core 0.19 on."""

COMMON_FILE = "common.pt"
"""The common state as Megatron-Core before 0.19 stores it."""


def refuse_sealing(sealing: object) -> None:
    """Refuses keys, before anything is written.

    Raises:
        CannotSealError: Keys are given, or ``PENSTOCK_RECIPIENTS`` names some.
    """
    if sealing is None and SealingKeys.of_environment().sealing is None:
        return
    raise CannotSealError(
        f"checkpoints of Megatron-Core are not sealed yet: it writes {COMMON_FILE} in the clear, "
        "and pieces of tensors are compared in clear parts; leave sealing= out, or save with "
        "penstock.integrations.dcp",
        path="",
    )


class Writer:
    """Saves one checkpoint after the other, and keeps its staging memory for the next.

    Args:
        options: Settings of the I/O; None for ``Options()``.
    """

    def __init__(self, options: Options | None = None) -> None:
        refuse_sealing(None)
        self._saver = penstock.Saver(options=options)

    def save(self, sharded_state: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Saves, and returns on every rank once the checkpoint is durable."""
        path, state, further = _begin(sharded_state, checkpoint_dir)
        self._saver.save(path, state, overwrite=True, **further)
        _end(path)

    def save_async(
        self, sharded_state: Any, checkpoint_dir: str | os.PathLike[str], request: Any
    ) -> Any:
        """Copies the state, and saves it in the background.

        Args:
            sharded_state: The state.
            checkpoint_dir: The checkpoint's directory.
            request: The class of the request to return.

        Returns:
            A request whose work waits for the end, and whose finalizer raises the save's error.
        """
        wait_here(request)
        path, state, further = _begin(sharded_state, checkpoint_dir)
        begun: SimpleQueue[penstock.PendingSave | None] = SimpleQueue()
        try:
            mark = _mark_of_end(path, begun)
        except StorageError as error:
            # The other ranks enter this save, so it has to raise the error on all of them.
            self._saver.save_async(path, _State(sharded_state, error), overwrite=True, **further)
            raise
        try:
            pending = self._saver.save_async(path, state, overwrite=True, **further)
        except BaseException:
            begun.put(None)
            mark.join()
            raise
        begun.put(pending)

        def finish() -> None:
            pending.result()
            _end(path)

        return request(wait_for_end, (mark.path,), [finish])


def _mark_of_end(path: str, begun: SimpleQueue[penstock.PendingSave | None]) -> EndMark:
    """A mark that a thread releases when the save of a directory has ended.

    Args:
        path: The directory.
        begun: Where the thread gets the save; None if it could not begin.

    Raises:
        StorageError: There can be no mark, or no thread.
    """
    mark = EndMark()

    def release() -> None:
        pending = begun.get()
        while pending is not None and not pending.wait_ended(60):
            pass
        mark.release()

    try:
        threading.Thread(target=release, name="penstock-megatron").start()
    except RuntimeError as error:
        mark.release()
        raise StorageError(
            f"{path}: {error}: an asynchronous save needs threads: raise the limit of threads"
            " (ulimit -u, or that of the container)",
            path=path,
            errno=errno.EAGAIN,
        ) from error
    return mark


class _State(LiveState):
    """The state of a save, made once the ranks have begun it, so that an error reaches all of them.

    Args:
        sharded_state: What Megatron-Core hands over.
        error: An error from before.
    """

    def __init__(self, sharded_state: Any, error: Exception | None) -> None:
        self._sharded_state, self._error = sharded_state, error

    def state_dict(self) -> dict[str, Any]:
        """This rank's boxes and objects.

        Raises:
            UnsupportedStateError: Something cannot be stored.
        """
        if self._error is not None:
            raise self._error
        return _state_of(self._sharded_state)


def _begin(
    sharded_state: Any, checkpoint_dir: str | os.PathLike[str]
) -> tuple[str, _State, dict[str, Any]]:
    """Returns the directory, the state, and the files and the note of the checkpoint."""
    path = os.path.abspath(checkpoint_dir)
    if dist.get_rank() != 0:
        return path, _State(sharded_state, None), {}
    try:
        further = _further(sharded_state, path)
    except Exception as error:
        return path, _State(sharded_state, error), {}
    return path, _State(sharded_state, None), further


def _further(sharded_state: Any, path: str) -> dict[str, Any]:
    files = {CONFIG_FNAME: json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()}
    common = _common_of(sharded_state, path)
    if common is not None:
        files[COMMON_FILE] = common
    replaced = directory.dcp_digest(path)
    note = {} if replaced is None else {layout.NOTE: {directory.REPLACED: replaced}}
    return {"files": files, "metadata": note}


def _common_of(sharded_state: Any, path: str) -> bytes | None:
    """The common state as Megatron-Core before 0.19 stores it, which all versions read."""
    for one in nested_values(sharded_state):
        if isinstance(one, ShardedObject) and one.key == COMMON_KEY:
            return _pickled(one.data)
    try:
        with open(os.path.join(path, COMMON_FILE), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _end(path: str) -> None:
    """Removes the files of a checkpoint of Megatron-Core's own that was replaced."""
    with agreement.together(f"the end of the save of {os.path.basename(path)}"):
        if dist.get_rank() == 0:
            directory.mark(path)


def _state_of(sharded_state: Any) -> dict[str, Any]:
    """This rank's boxes and objects."""
    tensors: dict[str, list[Any]] = {}
    objects: dict[str, list[Any]] = {}
    for one in nested_values(sharded_state):
        if not is_main_replica(one.replica_id):
            continue
        if isinstance(one, ShardedObject):
            objects.setdefault(one.unique_key, []).append(one.data)
        elif isinstance(one, ShardedTensor):
            tensors.setdefault(one.key, []).append(one)
        else:
            raise UnsupportedStateError(
                f"{one.key}: a {type(one).__name__} cannot be stored: apply its factory first, as "
                "megatron.core.dist_checkpointing.save does",
                key=one.key,
            )
    return {
        TENSORS: {key: _boxes(key, found) for key, found in tensors.items()},
        OBJECTS: {key: _bytes(_pickled(data)) for key, data in objects.items()},
    }


def _boxes(key: str, found: list[Any]) -> Boxes:
    first = found[0]
    pieces = []
    for one in found:
        if one.data is None:
            raise UnsupportedStateError(
                f"{key}: this ShardedTensor has no data: give it the tensor before the save",
                key=key,
            )
        if (one.data.dtype, one.global_shape) != (first.data.dtype, first.global_shape):
            raise UnsupportedStateError(
                f"{key}: two tensors of one key: {tuple(first.global_shape)} of {first.data.dtype} "
                f"and {tuple(one.global_shape)} of {one.data.dtype}: give them keys of their own",
                key=key,
            )
        pieces += pieces_of(one)
    return Boxes(tuple(map(int, first.global_shape)), first.data.dtype, pieces)


def _pickled(value: Any) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def _bytes(data: bytes) -> Boxes:
    elements = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Boxes((len(data),), torch.uint8, [((0,), elements)])
