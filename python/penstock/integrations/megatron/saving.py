"""Saves what Megatron-Core's `save` hands to a strategy, as one Penstock checkpoint of all ranks.

A `ShardedTensor` says which box of which global tensor it is, and whether this rank stores it. So
no rank plans for the others: each writes its boxes, and the ranks exchange votes of fixed size. The
state is a dictionary of two: ``"tensors"`` by their keys, and under ``"objects"`` the bytes that
Megatron-Core would write of each `ShardedObject`.
"""

from __future__ import annotations

import contextlib
import errno
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
from penstock.errors import StorageError, UnsupportedStateError
from penstock.integrations.dcp import directory, layout
from penstock.integrations.dcp.directory import NO_KEYS
from penstock.integrations.megatron import agreement, common_state
from penstock.integrations.megatron.pieces import pieces_of
from penstock.integrations.megatron.waiting import EndMark, wait_for_end, wait_here
from penstock.plugin import Boxes, LiveState, SealingKeys, durable

if TYPE_CHECKING:
    from penstock.options import Options

TENSORS, OBJECTS = "tensors", "objects"
"""The members of the state."""

COMMON_FILE = "common.pt"
"""The common state as Megatron-Core before 0.19 stores it."""

_CONFIG = json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()
"""The content of the file that makes a directory a checkpoint for Megatron-Core."""


class Writer:
    """Saves one checkpoint after the other, and keeps its staging memory for the next.

    Args:
        options: Settings of the I/O; None for ``Options()``.
        keys: The keys that seal and sign it.
    """

    def __init__(self, options: Options | None = None, keys: SealingKeys = NO_KEYS) -> None:
        self._saver = penstock.Saver(options=options, **keys.closing)
        self._is_sealed, self._is_signed = keys.sealing is not None, keys.signing is not None
        common_state.expect_kept(keys)

    def save(self, sharded_state: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Saves, and returns on every rank once the checkpoint is durable."""
        path, state, further = self._begin(sharded_state, checkpoint_dir)
        self._saver.save(path, state, overwrite=True, **further)
        self._end(path)

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
        path, state, further = self._begin(sharded_state, checkpoint_dir)
        begun: SimpleQueue[penstock.PendingSave | None] = SimpleQueue()
        try:
            mark = _mark_of_end(path, begun)
        except StorageError as error:
            # The other ranks enter this save, so it has to raise the error on all of them.
            state = _State(sharded_state, error)
            self._saver.save_async(path, state, overwrite=True, **further)
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
            self._end(path)

        return request(wait_for_end, (mark.path,), [finish])

    def _begin(
        self, sharded_state: Any, checkpoint_dir: str | os.PathLike[str]
    ) -> tuple[str, _State, dict[str, Any]]:
        """Returns the directory, the state, and the files and the note of the checkpoint."""
        path = os.path.abspath(checkpoint_dir)
        if dist.get_rank() != 0:
            return path, _State(sharded_state), {}
        try:
            further: dict[str, Any] = {"metadata": _note(path)}
            if not self._is_sealed:
                further["files"] = _files(sharded_state, path, is_signed=self._is_signed)
        except Exception as error:
            return path, _State(sharded_state, error), {}
        return path, _State(sharded_state, is_sealed=self._is_sealed), further

    def _end(self, path: str) -> None:
        """Removes the files of a checkpoint of Megatron-Core's own that was replaced."""
        with agreement.together(f"the end of the save of {os.path.basename(path)}"):
            if dist.get_rank() == 0:
                directory.mark(path)
                if self._is_sealed:
                    _finish_sealed(path)


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
        is_sealed: Whether the common state is an object of the checkpoint.
    """

    def __init__(
        self, sharded_state: Any, error: Exception | None = None, *, is_sealed: bool = False
    ) -> None:
        self._sharded_state, self._error = sharded_state, error
        self._common = common_state.held_object() if is_sealed else None

    def state_dict(self) -> dict[str, Any]:
        """This rank's boxes and objects.

        Raises:
            UnsupportedStateError: Something cannot be stored.
        """
        if self._error is not None:
            raise self._error
        state = _state_of(self._sharded_state)
        if self._common is not None:
            state[OBJECTS][common_state.UNIQUE_KEY] = _bytes(self._common)
        return state


def _files(sharded_state: Any, path: str, *, is_signed: bool) -> dict[str, bytes]:
    files = {CONFIG_FNAME: _CONFIG}
    common = _common_of(sharded_state, path, is_signed=is_signed)
    if common is not None:
        files[COMMON_FILE] = common
    return files


def _note(path: str) -> dict[str, Any]:
    replaced = directory.dcp_digest(path)
    return {} if replaced is None else {layout.NOTE: {directory.REPLACED: replaced}}


def _finish_sealed(path: str) -> None:
    """Writes the file that Megatron-Core looks for, and removes a common state in the clear.

    A sealed checkpoint has no small files of its own. The clear state is that of a checkpoint of
    Megatron-Core's that was replaced.
    """
    where = os.path.join(path, CONFIG_FNAME)
    try:
        durable.replace(where, _CONFIG)
        with contextlib.suppress(FileNotFoundError):
            where = os.path.join(path, COMMON_FILE)
            os.unlink(where)
            durable.sync(path)
    except OSError as error:
        raise StorageError(
            f"{where}: {error.strerror}: the checkpoint is complete, and Megatron-Core does not "
            "find it: save again",
            path=where,
            errno=error.errno,
        ) from error


def _common_of(sharded_state: Any, path: str, *, is_signed: bool) -> bytes | None:
    """The common state as Megatron-Core before 0.19 stores it, which all versions read.

    A save that signs takes no bytes from the storage.
    """
    for one in nested_values(sharded_state):
        if isinstance(one, ShardedObject) and one.key == common_state.KEY:
            return common_state.pickled(one.data)
    if is_signed:
        return common_state.held()
    try:
        with open(os.path.join(path, COMMON_FILE), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


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
        OBJECTS: {key: _bytes(common_state.pickled(data)) for key, data in objects.items()},
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


def _bytes(data: bytes) -> Boxes:
    elements = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Boxes((len(data),), torch.uint8, [((0,), elements)])
