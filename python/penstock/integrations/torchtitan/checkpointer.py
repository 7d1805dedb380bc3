"""`Checkpointer`: torchtitan's checkpoint manager, on a `penstock.CheckpointStore`."""

from __future__ import annotations

import copy
import os
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torchtitan.components.checkpointer import (
    DATALOADER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    CheckpointManager,
)
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

import penstock
from penstock.checkpoint.loading.dcp_files import METADATA, is_marked
from penstock.errors import PenstockError, StateMismatchError, UnsupportedStateError
from penstock.integrations.dcp import StorageReader
from penstock.integrations.torchtitan import fitting
from penstock.integrations.torchtitan.states import RANDOM, RandomStates, States
from penstock.plugin import SealingKeys, check_stateful, decode_local_path, is_checkpoint

if TYPE_CHECKING:
    from penstock import PendingSave

_STEP = "step"
_NAME = re.compile(rf"{_STEP}-(0|[1-9]\d*)")
"""Names of directories by torchtitan's own manager; those of a store are ``step-0000…``."""


class Checkpointer(CheckpointManager):  # type: ignore[misc]
    """Saves and restores a torchtitan run, with all of its state in one commit.

    Set it as ``checkpoint=Checkpointer.Config(…)`` in the function that makes the config. Its
    folder is a `penstock.CheckpointStore`. A run resumes from the newest step that is complete and
    good; torchtitan itself reads what it has saved in the folder before, and checkpoints in Hugging
    Face's format.

    It also keeps the random states of every rank, as ``"rng"``, which ``exclude_from_loading``
    accepts, too.

    Args:
        config: What to save, and when; see torchtitan.
        dataloader: The data loader; None if there is none.
        model_parts: The model, one part for each pipeline stage of this rank.
        optimizers: Their optimizers.
        lr_schedulers: The schedulers of these.
        states: Other objects with a state, by name: ``train_state`` is the trainer.
        sd_adapter: Converts to the names of Hugging Face.
        base_folder: The directory to which ``config.folder`` is relative.

    Raises:
        UnsupportedPathError: The folder is a URL.
        UnsupportedStateError: A state has the name of the random states, or holds values that no
            save can store.
    """

    save_future: PendingSave | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The fields of torchtitan's ``CheckpointManager.Config``, and one more."""

        trust: bool = False
        """Pickle the position in the data if it cannot be stored otherwise, and unpickle it: only
        for checkpoints whose origin you trust."""

        sealing: list[str] = field(default_factory=list)
        """Recipients for whom checkpoints are sealed: public keys, URIs or paths of their files;
        see `penstock.sealing`. No secret keys, as configs are logged. Empty for clear ones."""

        identities: list[str] = field(default_factory=list)
        """Paths of files with the keys that open sealed checkpoints, or URIs. Empty for the file
        that ``PENSTOCK_IDENTITIES`` names. With either list, clear checkpoints are refused."""

        sign: list[str] = field(default_factory=list)
        """Paths of files with private keys that sign checkpoints; see `penstock.signing`."""

        signed_by: list[str] = field(default_factory=list)
        """Public keys, or paths of their files, of which one must have signed a checkpoint. Empty
        to look at no signature."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self._keys = SealingKeys.of_lists(
            config.sealing, config.identities, config.signed_by, config.sign
        )
        if config.enable:
            # torchtitan inspects directories with functions of its own.
            folder = decode_local_path(filesystem.join(base_folder, config.folder))
            if config.last_save_in_hf:
                what = "the last step in Hugging Face's format (last_save_in_hf) stays clear"
                self._keys.refuse_sealing(folder, what)
                self._keys.refuse_signing(folder, "the last step (last_save_in_hf) is not signed")
            self._store = penstock.CheckpointStore(
                folder,
                keep_last=config.keep_latest_k or None,
                **self._keys.opening,
                **self._keys.closing,
            )
        # Turns off its process group for background saves, and its thread that deletes.
        plain = copy.copy(config)
        plain.async_mode, plain.keep_latest_k = AsyncMode.DISABLED.value, 0
        super().__init__(
            plain,
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            sd_adapter=sd_adapter,
            base_folder=base_folder,
        )
        if not self.enable:
            return
        self.async_mode = AsyncMode(config.async_mode)
        self.keep_latest_k = config.keep_latest_k
        if not isinstance(states.get(RANDOM), RandomStates | None):
            raise UnsupportedStateError(
                f"{RANDOM}: a state of the trainer has the name of the random states: rename it",
                key=RANDOM,
            )
        self.states[RANDOM] = RandomStates()
        self._trust = config.trust
        for name, value in self.states.items():
            # Those are large, or start to work when asked for their state.
            if name not in (MODEL, OPTIMIZER, DATALOADER) and hasattr(value, "state_dict"):
                check_stateful(name, value)

    # Saving.

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        structured_logger.add_step_tag("checkpoint_save")
        self.maybe_wait_for_saving()
        fitting.try_out(Checkpointer, self.folder, self._device())
        with structured_logger.log_trace_span("checkpoint_save"):
            if last_step and self.last_save_model_only:
                self._save_model(curr_step)
            else:
                is_async = not last_step and self.async_mode != AsyncMode.DISABLED
                self._save_all(curr_step, is_async=is_async)
        return True

    def _device(self) -> torch.device:
        """The device of the model."""
        tensors = self.states[MODEL].state_dict().values()
        found = next((one for one in tensors if isinstance(one, torch.Tensor)), None)
        return torch.device("cpu") if found is None else found.device

    def _save_all(self, step: int, *, is_async: bool) -> None:
        """Saves the run's whole state; overwrites a step that the run has gone back before."""
        states = self._live(self.states)
        if is_async:
            is_lazy = self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            self.save_future = self._store.save_async(step, states, lazy=is_lazy, overwrite=True)
        else:
            logger.info("%s", self._store.save(step, states, overwrite=True))

    def _save_model(self, step: int) -> None:
        """Saves the model alone, in the type to export, in Penstock's format or Hugging Face's."""
        model = {
            name: value.to(self.export_dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self.states[MODEL].state_dict().items()
        }
        if self.last_save_in_hf:
            # Hugging Face's format and code: it has no commit.
            folder = self._create_checkpoint_id(step)
            self.dcp_save(model, folder, AsyncMode.DISABLED, to_hf=True)
        else:
            logger.info("%s", self._store.save(step, model, overwrite=True))

    def _maybe_wait_for_staging(self) -> None:
        """Copies tensors that a lazy save has not copied, before the optimizer changes them."""
        if self.save_future is not None:
            self.save_future.stage()

    def _wait_for_saving(self) -> None:
        # Forgotten first: its error is raised once, and the next save can go on.
        pending, self.save_future = self.save_future, None
        if pending is not None:
            pending.result()

    def _close(self) -> None:
        ending = sys.exception()
        try:
            self._store.close()
        except PenstockError as failed:
            if ending is None:
                raise
            # The error that ended training must reach the user.
            ending.add_note(f"and a save in the background failed: {failed}")

    # Loading.

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        newest = self._store.latest()
        if step == -1 and self._find_load_step() > (-1 if newest is None else newest):
            return self._load_otherwise(step)
        if step == -1 and newest != 0:
            # Goes back to an older step if the newest proves to be damaged. A store resumes any
            # object with a live state; its users pass a `Training`.
            run: Any = self._live(self._not_excluded())
            resumed = self._store.resume(run)
            return resumed is not None or self._load_otherwise(step)
        asked = max(step, 0)
        if not os.path.isdir(self._store.path(asked)):
            return self._load_otherwise(step)
        # Step 0 is a seed checkpoint, from which torchtitan takes only the model.
        states = self._not_excluded() if asked else {MODEL: self.states[MODEL]}
        self._store.load(asked, into=self._live(states))
        return True

    def _load_otherwise(self, step: int) -> bool:
        """Lets torchtitan load its own checkpoint, its initial one, or nothing."""
        return bool(super()._load(step))

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Loads from a directory of torchtitan, Hugging Face or Penstock."""
        if not from_hf and not filesystem.isfile(filesystem.join(checkpoint_id, METADATA)):
            names = {MODEL, *state_dict}
            states = {name: value for name, value in self.states.items() if name in names}
            penstock.load(checkpoint_id, into=self._live(states), **self._keys.opening)
            return
        if state_dict.pop(RANDOM, None) is not None:
            logger.warning("%s holds no random states: they stay as they are", checkpoint_id)
        if from_hf or not is_marked(checkpoint_id):
            if not from_hf:
                self._keys.refuse_clear(checkpoint_id, "a checkpoint of torchtitan's own")
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        # Saved by torchtitan's manager under `penstock.integrations.dcp.enable`, which may be off
        # now.
        reader = StorageReader(checkpoint_id, **self._keys.opening)
        load_dcp(state_dict, storage_reader=reader)
        self.states[MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that torchtitan itself has saved completely; -1 if there is none.

        A last step in Hugging Face's format does not count, as a run cannot resume from it.
        """
        folder = folder or self.folder
        names = os.listdir(folder) if os.path.isdir(folder) else []
        found = [one for name in names if (one := _NAME.fullmatch(name)) is not None]
        steps = [int(one[1]) for one in found if _is_saved(os.path.join(folder, one[0]))]
        return max(steps, default=-1)

    def _not_excluded(self) -> dict[str, Any]:
        for name in self.exclude_from_loading:
            if name not in self.states:
                raise StateMismatchError(
                    f"exclude_from_loading: there is no {name!r} in this run: it has "
                    f"{', '.join(self.states)}",
                    key=name,
                )
        excluded = self.exclude_from_loading
        return {name: value for name, value in self.states.items() if name not in excluded}

    def _live(self, states: dict[str, Any]) -> States:
        known = self.states.keys() - {MODEL}
        return States(states, known=known, is_trusted=self._trust, keys=self._keys)


def _is_saved(path: str) -> bool:
    """Whether a directory has the file written last; a mark also needs its checkpoint."""
    return os.path.isfile(os.path.join(path, METADATA)) and (
        not is_marked(path) or is_checkpoint(path)
    )
