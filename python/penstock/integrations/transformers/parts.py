"""The state of a trainer as a `penstock.Training`."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

import penstock
from penstock.checkpoint.saving.guard import guard_all
from penstock.checkpoint.state.tree.names import escaped
from penstock.errors import StateMismatchError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.integrations.transformers.settings import Settings


FILES = "files"
"""The member of a sealed checkpoint with the Trainer's small files, and of its note with names."""


def whole(
    trainer: Any, pickled: Collection[str], *, has_files: bool = False
) -> penstock.Training:
    """All of a trainer's tensors and random states, and room for its small files if wanted.

    For a model with PEFT adapters the weights are left out: PEFT has its own files for them.
    """
    optimizer = trainer.optimizer
    # Accelerate's wrapper only looks like an optimizer: hooks on it are not called.
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    found = {
        **weights(trainer.model),
        "optimizer": optimizer,
        "scheduler": trainer.lr_scheduler,
        "scaler": getattr(trainer.accelerator, "scaler", None),
    }
    parts = {name: part for name, part in found.items() if part is not None}
    for name in pickled:
        if name in parts:
            parts[name] = _Pickled(parts[name])
    if "optimizer" in pickled and isinstance(optimizer, torch.optim.Optimizer):
        # Wrapped, a lazy save does not find it, but its steps have to wait all the same.
        guard_all([optimizer])
    if has_files:
        parts[FILES] = {}
    return penstock.Training(**parts)


def restore(trainer: Any, path: str, settings: Settings) -> None:
    """Restores a trainer from a checkpoint."""
    keys = settings.keys.identities
    note = penstock.inspect(path, identities=keys).metadata.get("trainer", {})
    pickled = note.get("raw", [])
    if pickled and not settings.trust:
        raise UnsupportedStateError(
            f"{path}: {', '.join(pickled)} is stored as pickled bytes, which run whatever code "
            "they hold: set trust=True if you know who has written them",
            key=pickled[0],
        )
    # The small files were read before, for the Trainer.
    training = whole(trainer, pickled, has_files=FILES in note)
    penstock.load(path, into=training, options=settings.options, identities=keys)


def weights(model: Any) -> dict[str, Any]:
    """The model, unless it has adapters, whose weights Penstock does not save."""
    return {} if has_adapters(model) else {"model": model}


def has_adapters(model: Any) -> bool:
    """Whether PEFT saves and loads the weights that are trained."""
    # A model can be wrapped by PEFT only if PEFT was imported.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel)


def restore_weights(path: str, model: Any, settings: Settings) -> None:
    """Loads the weights of a checkpoint into a model."""
    training = penstock.Training(rng=False, model=model)
    keys = settings.keys.identities
    info = penstock.inspect(path, identities=keys)
    stored = {tensor.name for tensor in info.tensors} | info.aliases.keys() | info.values().keys()
    for name in training.state_dict()["model"]:
        if f"model.{escaped(name)}" not in stored:
            raise StateMismatchError(
                f"{path} does not fit the model, nothing was changed: {name} is in the model, not "
                "in the checkpoint; build the model as the run did that saved it",
                key=f"model.{name}",
                path=path,
            )
    penstock.load(
        path, into=training, keys="model.*", options=settings.options, identities=keys
    )


class _Pickled:
    """A part whose state is stored as pickled bytes."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def state_dict(self) -> dict[str, bytes]:
        """The part's state, pickled."""
        buffer = io.BytesIO()
        torch.save(self._part.state_dict(), buffer)
        return {"pickled": buffer.getvalue()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        """Restores a pickled state, which is trusted."""
        found = torch.load(io.BytesIO(state["pickled"]), map_location="cpu", weights_only=False)
        self._part.load_state_dict(found)
