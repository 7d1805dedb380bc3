"""States of random generators: those shared by the process, and those of a user."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEVICES = ("cuda", "xpu", "mtia", "hpu", "npu")
"""Modules of PyTorch with generators of their own, one per device."""


def capture() -> dict[str, Any]:
    """Captures the generators that a whole process shares: Python, NumPy, PyTorch, devices.

    Devices are included only if this process has used one: the query wakes no driver.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        for kind in _DEVICES:
            module = getattr(torch, kind, None)
            if module is not None and _is_used(module):
                count = range(module.device_count())
                state[kind] = [module.get_rng_state(index) for index in count]
    return state


def restore(state: dict[str, Any]) -> list[str]:
    """Restores the generators.

    Returns:
        Warnings for the user: states without a device, devices without a state.
    """
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "torch" not in state:
        return []
    import torch

    torch.set_rng_state(state["torch"])
    told = []
    for kind in _DEVICES:
        module: Any = getattr(torch, kind, None)
        stored = state.get(kind, [])
        is_here = module is not None and bool(stored) and module.is_available()
        count = module.device_count() if is_here else 0
        for index, one in enumerate(stored[:count]):
            module.set_rng_state(one, index)
        if count != len(stored):
            told.append(
                f"it has random states of {len(stored)} {kind} devices, and there are {count} "
                "here: the others keep what they have, and draw other numbers than they would have"
            )
    return told


def _is_used(module: Any) -> bool:
    is_initialized = getattr(module, "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


class Generator:
    """A generator of a user, from Python, NumPy or PyTorch."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @staticmethod
    def is_one(value: Any) -> bool:
        """Whether a value is a generator with a readable state."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Generator):
            return True
        if isinstance(value, random.SystemRandom):
            return False
        return isinstance(value, random.Random | np.random.Generator | np.random.RandomState)

    def capture(self) -> Any:
        """Returns the generator's state."""
        value = self._value
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return value.bit_generator.state
        if isinstance(value, np.random.RandomState):
            return value.get_state(legacy=False)
        return value.get_state()

    def mismatches(self, state: Any) -> Iterator[str]:
        """Yields the reason why the generator cannot take over a state, if any."""
        kind = "bit_generator"
        if isinstance(self._value, np.random.Generator | np.random.RandomState):
            own, other = self.capture()[kind], state.get(kind) if type(state) is dict else None
            if own != other:
                yield f"the state of {_a_generator(other)} in the checkpoint, {own} in the training"
        elif type(state) is not type(self.capture()):
            yield "no state of such a generator in the checkpoint"

    def restore(self, state: Any) -> None:
        """Sets the generator's state."""
        value = self._value
        if isinstance(value, random.Random):
            value.setstate(state)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = state
        else:
            # NumPy and PyTorch use the same name.
            getattr(value, "set_state")(state)  # noqa: B009


def _a_generator(name: Any) -> str:
    return name if isinstance(name, str) else "no generator"
