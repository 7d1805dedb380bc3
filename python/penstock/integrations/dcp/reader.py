"""`StorageReader`: reads a checkpoint for `dcp.load`.

DCP asks for the metadata, plans, and lets every rank read its share; each byte of it is verified
before `dcp.load` returns.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import StorageMeta

from penstock.errors import RankError
from penstock.integrations.dcp.opened import Opened
from penstock.integrations.dcp.paths import is_ours
from penstock.plugin import SealingKeys, decode_path, to_native

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.futures import Future

    from penstock.options import Options
    from penstock.sealing import Identities, Key
    from penstock.signing import SignatureKey, Signers


class StorageReader(storage.StorageReader):
    """Makes `torch.distributed.checkpoint` load from a Penstock checkpoint.

    It reads checkpoints by `StorageWriter` and by `penstock.save`, on any number of ranks and in
    any layout. Tensors and values of the latter have the names that DCP would give them.

    Args:
        path: The checkpoint's directory. ``checkpoint_id=`` of `dcp.load` replaces it.
        options: Settings of the I/O; None for ``Options()``.
        allow_partial: Load what a checkpoint by `penstock.salvage` has. Missing items are unknown
            to
            DCP then, and its planner decides about them:
            ``DefaultLoadPlanner(allow_partial_load=True)`` leaves them unchanged in the state.
        identities: Keys that open a sealed checkpoint; see `penstock.load`. A clear one is then
            refused.
        signed_by: Public keys of which one must have signed the checkpoint; see `penstock.load`.

    Attributes:
        path: The checkpoint's directory.
        load_id: Identifies this load for planners; a new one after each `reset`.

    Raises:
        CheckpointNotFoundError: There is nothing at the path. `dcp.load` raises this and all errors
            below inside DCP's `CheckpointException`; for errors while reading the metadata, PyTorch
            2.9 and later keep only the message.
        IncompleteCheckpointError: The save there never finished.
        PartialCheckpointError: It was salvaged from a damaged one and lacks items, and
            ``allow_partial`` is False.
        CorruptCheckpointError: The checkpoint is damaged, or not Penstock's.
        TamperedError: Somebody without the key has changed a sealed checkpoint.
        SealedError: The checkpoint is sealed, and there are no identities.
        NotSealedError: ``identities`` are given and the checkpoint is clear.
        SignatureError: None of ``signed_by`` has signed the checkpoint.
        StateMismatchError: An item that the planner wants is not there.
        RankError: The checkpoint was replaced between one rank's first access and another's.
        StorageError: The operating system failed an operation.
    """

    use_collectives = True
    """As for DCP's readers: the coordinator reads the metadata for all ranks."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: Options | None = None,
        allow_partial: bool = False,
        identities: Identities | Key | Iterable[Key] | None = None,
        signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
    ) -> None:
        super().__init__()
        self._keys = SealingKeys.of(None, identities, signed_by=signed_by)
        self.path = decode_path(path)
        self._options = to_native(options)
        self._allow_partial = bool(allow_partial)
        self.load_id = uuid4().hex
        self._opened: Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's directory."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path of the local file system, or a URL of a bucket."""
        return is_ours(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another load, from another path if one is given."""
        if checkpoint_id:
            self.path = decode_path(checkpoint_id)
        self.load_id = uuid4().hex
        self._close()

    # In the order in which DCP calls them.

    # Takes no `kwargs`: DCP would then assume that each rank has its own metadata, ask again after
    # an error, and report two.
    def read_metadata(self) -> Metadata:
        """The checkpoint's contents, in DCP's terms."""
        self._close()
        opened = self._opened = self._new()
        with opened.reading():
            return opened.metadata(StorageMeta(checkpoint_id=self.path, load_id=self.load_id))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begins a load."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Records which checkpoint this rank sees."""
        return dataclasses.replace(plan, storage_data=self._open().id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks see the same checkpoint; on the coordinator only."""
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                raise RankError(
                    f"{self.path}: rank {rank} sees checkpoint {plan.storage_data}, rank 0 "
                    f"{plans[0].storage_data}: it was replaced just now, or they have different "
                    "directories there; load again",
                    rank=rank,
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's tensors and gives it the plain values."""
        opened = self._open()
        try:
            with opened.reading():
                opened.read_values(plan, planner, self._options)
                opened.read_tensors(plan, planner, self._options)
        finally:
            self._close()
        future: Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _new(self) -> Opened:
        return Opened(self.path, allow_partial=self._allow_partial, unsealing=self._keys.unsealing)

    def _open(self) -> Opened:
        if self._opened is None:
            self._opened = self._new()
        return self._opened

    def _close(self) -> None:
        """Allows the files to be removed."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.release()
