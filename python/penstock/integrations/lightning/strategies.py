"""Strategies for models sharded over ranks: all ranks save and load one checkpoint.

For sharded models Lightning's own strategies do not use a `CheckpointIO`. They write tensors with
PyTorch's Distributed Checkpoint, and afterwards the rest as a pickle beside it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import penstock
from penstock.errors import PenstockWarning, StateMismatchError
from penstock.integrations.lightning import directories, loading, resume_position
from penstock.integrations.lightning.checkpoint_io import PenstockIO
from penstock.integrations.lightning.enable import enable
from penstock.plugin import NEW, LiveState, branches, is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.utilities.types import _PATH
    from torch.optim import Optimizer

    from penstock.plugin import Node, View

_MODEL = "state_dict"
_OPTIMIZERS = "optimizer_states"


class ShardedCheckpoints(ParallelStrategy):
    """Mix-in for strategies of `DTensor` models: every rank saves its part, in one commit.

    The state is that of `torch.distributed.checkpoint.state_dict`, with parameters by name, so a
    run can resume with another number of ranks or another layout. Checkpoints that Lightning wrote
    are loaded by Lightning.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the trainer makes its connectors.
        enable()
        super().__init__(*args, **kwargs)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plug-in that saves; `PenstockIO()` unless the trainer was given one."""
        if self._checkpoint_io is None:
            self._checkpoint_io = PenstockIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _io(self) -> PenstockIO:
        io = self.checkpoint_io
        if not isinstance(io, PenstockIO):
            raise TypeError(
                f"{type(self).__name__} saves through PenstockIO, not through a "
                f"{type(io).__name__}: pass plugins=[PenstockIO(…)], or none"
            )
        return io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the model."""
        return get_model_state_dict(self._sharded())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state."""
        inner: Any = getattr(optimizer, "_optimizer", optimizer)
        return get_optimizer_state_dict(self._sharded(), inner)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Saves with all ranks; see `PenstockIO.save_checkpoint`."""
        if storage_options is not None:
            raise TypeError("storage_options are none of PenstockIO's")
        module = self.lightning_module
        if module is not None and resume_position.is_alone(module.trainer):
            # Ranks that are still training would not take part, and this one would hang.
            warnings.warn(
                f"{filepath} is not saved: it takes all ranks, and this one is alone, with an "
                "exception or a signal of its own",
                PenstockWarning,
                stacklevel=1,
            )
            return
        # Names may change when the last save ends, so wait before looking at them.
        self._io().wait()
        # The first rank looks: others could see what it has begun already.
        path = self.broadcast(directories.absolute(filepath))
        where = self.broadcast(directories.place_for(path))
        self._io().save_as(checkpoint, where, path, is_together=True)

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads each rank's part with all ranks; Lightning's checkpoints as Lightning does."""
        io = self._io()
        io.wait()
        path = self.broadcast(directories.absolute(checkpoint_path))
        if not is_checkpoint(path):
            io.keys.refuse_clear(path, "no checkpoint of Penstock")
            return super().load_checkpoint(path, **loading.weights_only_of(weights_only))
        module = self.lightning_module
        assert module is not None
        model, options = self._sharded(), StateDictOptions(strict=module.strict_loading)
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if is_fitting else []
        filled = _Filled(
            get_model_state_dict(model),
            [get_optimizer_state_dict(model, one) for one in optimizers],
            is_strict=module.strict_loading,
        )
        penstock.load(path, into=filled, **io.keys.opening)
        rest = loading.unpacked(filled.rest, path, weights_only, trust=io.trust)
        set_model_state_dict(model, filled.model, options=options)
        for optimizer, state in zip(optimizers, filled.optimizers, strict=True):
            set_optimizer_state_dict(model, optimizer, state, options=options)
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: the model is filled already."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: the optimizers are filled already."""

    def teardown(self) -> None:
        """Waits for the save in progress, while the ranks can still communicate."""
        io = self._io()
        try:
            io.teardown()
        finally:
            super().teardown()

    def _sharded(self) -> Any:
        assert self.model is not None
        return self.model


class _Filled(LiveState):
    """A checkpoint of a sharded model: tensors are filled in place, other values are built."""

    def __init__(
        self, model: dict[str, Any], optimizers: list[dict[str, Any]], *, is_strict: bool
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.rest: dict[str, Any] = {}
        self._is_strict = is_strict

    def _requested_names(self) -> dict[str, Any]:
        return {_MODEL: self.model, _OPTIMIZERS: self.optimizers}

    def _targets(
        self, node: Node, seen: View, path: str, *, is_partial: bool, is_strict: bool
    ) -> tuple[Node, Any]:
        found = dict(branches(node) or ())
        asked = [_MODEL, _OPTIMIZERS] if self.optimizers else [_MODEL]
        for name in asked:
            if name not in found:
                raise StateMismatchError(
                    f"{path} holds no {name!r}: it was saved without, or not by Lightning; load "
                    "another one",
                    key=name,
                    path=path,
                )
        chosen = {
            name: child for name, child in found.items() if name in asked or name != _OPTIMIZERS
        }
        model = self.model
        if not self._is_strict:
            stored = dict(branches(found[_MODEL]) or ())
            model = {name: value for name, value in model.items() if name in stored}
            chosen[_MODEL] = {name: stored[name] for name in model}
        state = dict.fromkeys(chosen, NEW) | {_MODEL: model}
        return chosen, state | ({_OPTIMIZERS: self.optimizers} if self.optimizers else {})

    def _restore(
        self,
        state: Any,
        *,
        path: str | None = None,
        is_partial: bool = False,
        is_strict: bool = True,
    ) -> list[str]:
        self.model = state.pop(_MODEL)
        self.optimizers = state.pop(_OPTIMIZERS, [])
        self.rest = state
        return []


class PenstockModelParallelStrategy(ShardedCheckpoints, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallel) whose ranks save one Penstock checkpoint."""
