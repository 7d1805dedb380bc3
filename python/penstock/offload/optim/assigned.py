"""Entries of ``optimizer.state`` that a caller has changed: step counts and assigned moments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import StateMismatchError
from penstock.offload.optim.load_state import MASTER, local_of
from penstock.tensors.file_tensor import FileTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.offload.optim.layout import ParameterEntry
    from penstock.offload.optim.shares import SteppedParameter

STEP = "step"


def steps_made(number: int, state: Mapping[str, Any]) -> float | None:
    """The number of steps that a parameter has made; None while it has no state."""
    step = state.get(STEP)
    if step is None:
        return None
    try:
        made = float(step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateMismatchError(
            f"the step of parameter {number} is no number ({error})", key=f"{number}.{STEP}"
        ) from error
    if not (math.isfinite(made) and made >= 0):
        raise StateMismatchError(
            f"the step of parameter {number} is {made}: it counts steps", key=f"{number}.{STEP}"
        )
    return made


def assigned_moments(
    entry: ParameterEntry, state: Mapping[str, Any], *, is_kept: bool
) -> dict[str, Any]:
    """Moments that a caller has assigned in the state of a parameter.

    Moments are kept in files, so ``optimizer.state`` holds none of them unless the caller assigns
    one.

    Args:
        entry: The parameter.
        state: Its entry of ``optimizer.state``.
        is_kept: Whether files have its moments, so that not all need be assigned.

    Returns:
        The values on this rank, by the names of the moments.

    Raises:
        StateMismatchError: A value is no moment of the optimizer, or has another shape or type; or
            a moment is missing.
    """
    found = {}
    for name, value in state.items():
        if name == STEP:
            continue
        key = f"{entry.number}.{name}"
        if name not in entry.moments:
            raise StateMismatchError(
                f"the state of parameter {entry.number} has {name!r}, which this optimizer does"
                f" not store (it stores {', '.join(entry.moments)}): keep it elsewhere",
                key=key,
            )
        if not isinstance(value, torch.Tensor | FileTensor):
            raise StateMismatchError(
                f"{name!r} of parameter {entry.number} is {type(value).__name__}, no tensor: to"
                " begin anew, remove the parameter from optimizer.state",
                key=key,
            )
        values = value.read() if isinstance(value, FileTensor) else local_of(value)
        if tuple(values.shape) != entry.shape or values.dtype != entry.dtype:
            raise StateMismatchError(
                f"{name!r} of parameter {entry.number} is {list(values.shape)}, {values.dtype}; the"
                f" optimizer keeps {list(entry.shape)}, {entry.dtype}",
                key=key,
            )
        found[name] = values
    if STEP in state and not is_kept:
        for moment in entry.moments:
            if moment != MASTER and moment not in found:
                raise StateMismatchError(
                    f"the state of parameter {entry.number} has {STEP!r} and no {moment!r}: assign"
                    " all moments, or remove the parameter from optimizer.state",
                    key=f"{entry.number}.{moment}",
                )
    return found


def count_step(live: Iterable[SteppedParameter]) -> None:
    """Counts a step of each parameter that made one, and drops assigned moments, now in files."""
    counted = []
    for one in live:
        made = one.made or 0.0
        step = one.state.get(STEP)
        if one.gradient is not None and isinstance(step, torch.Tensor):
            counted.append(step)
        elif step is None or one.gradient is not None:
            one.state[STEP] = count(made if one.gradient is None else made + 1)
        for name in one.assigned:
            one.state.pop(name, None)
    if counted:
        torch._foreach_add_(counted, 1)


def count(steps: Any) -> Any:
    """A count of steps as the fused kernels take it: float32 on the CPU, whatever the defaults."""
    return torch.as_tensor(steps, dtype=torch.float32, device="cpu").clone()
