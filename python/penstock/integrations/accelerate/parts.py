"""What an `Accelerator` has to save, as a `penstock.Training`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock import Training
from penstock.errors import UnsupportedStateError
from penstock.integrations import raw
from penstock.integrations.accelerate.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Sequence

REMEDY = "penstock.integrations.accelerate.enable(accelerator, trust=True)"


def training_of(
    accelerator: Any, models: Sequence[Any], pickled: Sequence[str], *, trust: bool
) -> Training:
    """All parts, by the names that Accelerate gives to their files.

    Args:
        accelerator: Whose.
        models: Those of its models that are not saved by a hook.
        pickled: Names of values that are stored as bytes of pickle.
        trust: Whether such are unpickled.
    """
    given = _numbered("model", {accelerator._models.index(one): one for one in models})
    # Without the wrapper: what saves lazily has to be called before each step.
    optimizers = [getattr(one, "optimizer", one) for one in accelerator._optimizers]
    given |= _numbered("optimizer", dict(enumerate(optimizers)))
    others = {
        **_numbered("scheduler", dict(enumerate(accelerator._schedulers))),
        **_numbered("dataloader", dict(enumerate(map(Loader, accelerator._dataloaders)))),
        **{f"custom_checkpoint_{i}": one for i, one in enumerate(accelerator._custom_objects)},
    }
    for name, value in others.items():
        # Modules, such as averages of weights, and optimizers are compared before all else.
        is_known = isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        given[name] = value if is_known else _Part(value, name, pickled, trust=trust)
    if accelerator.scaler is not None:
        given["scaler"] = accelerator.scaler
    values = {
        "step": accelerator.step,
        "iteration": accelerator.project_configuration.iteration,
    }
    return Training(**given, accelerator=values)


class _Part:
    """What has ``state_dict`` and ``load_state_dict``, with some values stored as pickle."""

    def __init__(self, value: Any, name: str, pickled: Sequence[str], *, trust: bool) -> None:
        self._value, self._name, self._pickled, self._trust = value, name, pickled, trust

    def state_dict(self) -> Any:
        state = raw.packed(self._value.state_dict(), self._name, self._pickled)
        if state is None:
            raise UnsupportedStateError(
                f"{self._name}: state_dict() of {type(self._value).__name__} returned None, from "
                "which nothing comes back: have it return a state",
                key=self._name,
            )
        return state

    def load_state_dict(self, state: Any) -> None:
        state = raw.unpacked(state, self._name, trust=self._trust, remedy=REMEDY)
        self._value.load_state_dict(state)


def _numbered(name: str, values: dict[int, Any]) -> dict[str, Any]:
    return {name if index == 0 else f"{name}_{index}": one for index, one in values.items()}
