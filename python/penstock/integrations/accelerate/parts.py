"""The state of an `Accelerator` as a `penstock.Training`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock import Training
from penstock.errors import UnsupportedStateError
from penstock.integrations import pickling
from penstock.integrations.accelerate.loader import PreparedLoader
from penstock.plugin import check_stateful

if TYPE_CHECKING:
    from collections.abc import Sequence

REMEDY = "penstock.integrations.accelerate.attach(accelerator, trust=True)"


def training_of(
    accelerator: Any, models: Sequence[Any], pickled: Sequence[str], *, trust: bool
) -> Training:
    """All parts, named as Accelerate names their files."""
    given = _numbered("model", {accelerator._models.index(one): one for one in models})
    # Without Accelerate's wrapper: a lazy save has to be called before each step.
    optimizers = [getattr(one, "optimizer", one) for one in accelerator._optimizers]
    given |= _numbered("optimizer", dict(enumerate(optimizers)))
    others = {
        **_numbered("scheduler", dict(enumerate(accelerator._schedulers))),
        **_numbered("dataloader", dict(enumerate(map(PreparedLoader, accelerator._dataloaders)))),
        **_custom(accelerator),
    }
    for name, value in others.items():
        # Penstock compares modules, such as averages of weights, and optimizers before it loads.
        is_known = isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        given[name] = value if is_known else _PickledPart(value, name, pickled, trust=trust)
    if accelerator.scaler is not None:
        given["scaler"] = accelerator.scaler
    values = {
        "step": accelerator.step,
        "iteration": accelerator.project_configuration.iteration,
    }
    return Training(**given, accelerator=values)


def check(accelerator: Any, pickled: Sequence[str]) -> None:
    """Raises if a part of an accelerator's present state cannot be saved.

    Models are not checked, as those of several ranks may be gathered, nor are loaders, which may
    start to read.
    """
    optimizers = _numbered("optimizer", dict(enumerate(accelerator._optimizers)))
    schedulers = _numbered("scheduler", dict(enumerate(accelerator._schedulers)))
    for name, value in optimizers.items():
        check_stateful(name, value)
    for name, value in {**schedulers, **_custom(accelerator)}.items():
        if not isinstance(value, torch.nn.Module):
            check_stateful(name, _PickledPart(value, name, pickled, trust=False))


def _custom(accelerator: Any) -> dict[str, Any]:
    return {f"custom_checkpoint_{i}": one for i, one in enumerate(accelerator._custom_objects)}


class _PickledPart:
    """An object with ``state_dict`` and ``load_state_dict``, some values of which are pickled."""

    def __init__(self, value: Any, name: str, pickled: Sequence[str], *, trust: bool) -> None:
        self._value, self._name, self._pickled, self._trust = value, name, pickled, trust

    def state_dict(self) -> Any:
        state = pickling.packed(self._value.state_dict(), self._name, self._pickled)
        if state is None:
            raise UnsupportedStateError(
                f"{self._name}: state_dict() of {type(self._value).__name__} returned None, from "
                "which nothing comes back: have it return a state",
                key=self._name,
            )
        return state

    def load_state_dict(self, state: Any) -> None:
        state = pickling.unpacked(state, self._name, trust=self._trust, remedy=REMEDY)
        self._value.load_state_dict(state)


def _numbered(name: str, values: dict[int, Any]) -> dict[str, Any]:
    return {name if index == 0 else f"{name}_{index}": one for index, one in values.items()}
