"""Recognizes the state of another optimizer by its settings and moments.

`torch.optim.Optimizer.load_state_dict` accepts any state: missing values are noticed only by the
next step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)
"""Keys that PyTorch's schedulers add to the groups of an optimizer."""

_OF_OPTIMIZERS = frozenset(
    [
        "alpha",
        "beta2_decay",
        "betas",
        "d",
        "dampening",
        "eps",
        "etas",
        "history_size",
        "lambd",
        "line_search_fn",
        "lr_decay",
        "max_eval",
        "max_iter",
        "momentum",
        "momentum_decay",
        "ns_coefficients",
        "ns_steps",
        "rho",
        "step_sizes",
        "t0",
        "tolerance_change",
        "tolerance_grad",
        "weight_decay",
    ]
)
"""Names of numeric settings of PyTorch's optimizers; a class's fresh groups contain all of its."""

_MOMENTS = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "acc_delta",
        "grad_avg",
        "sum",
        "exp_inf",
        "ax",
        "prev",
        "variance",
    ]
)
"""Names of moments that PyTorch's optimizers keep in the shape of a parameter."""


def settings_differences(optimizer: Any, index: int, group: Any, own: Any) -> Iterator[str]:
    """Yields the settings that show that an optimizer of another class saved a group.

    New PyTorch versions add switches and None values only. Schedulers, training loops and steps add
    numbers of their own to groups, which fresh groups do not have.
    """
    missing = [
        key
        for key, value in own.items()
        if _is_number(value) and key not in group and key not in _OF_SCHEDULERS
    ]
    surplus = [key for key in group if key in _OF_OPTIMIZERS and key not in own]
    if not missing and not surplus:
        return
    kind = type(optimizer).__name__
    texts = [f"no {', '.join(map(repr, missing))}"] if missing else []
    texts += [f"{', '.join(map(repr, surplus))}, which {kind} has not,"] if surplus else []
    yield (
        f"group {index} has {' and '.join(texts)} in the checkpoint: an optimizer of another class "
        f"than {kind} seems to have saved it"
    )


def moments_differences(
    optimizer: Any, state: Any, named: Callable[[], dict[str, Any]]
) -> Iterator[str]:
    """Yields the moments whose shape differs from their parameter's, if this is invalid.

    Optimizers of other packages may keep projections under the same names.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    torch = sys.modules["torch"]
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        by_name = named() if any(type(key) is str for key in group["params"]) else {}
        for key, parameter in zip(group["params"], own["params"], strict=False):
            moments = state["state"].get(key)
            shape = list(by_name.get(key, parameter).shape)
            for moment, value in moments.items() if isinstance(moments, dict) else ():
                if moment not in _MOMENTS or not isinstance(value, torch.Tensor):
                    continue
                if list(value.shape) != shape:
                    yield (
                        f"{moment} of {key!r} has shape {list(value.shape)} in the checkpoint, the "
                        f"parameter {shape} in the training"
                    )


def _is_number(value: Any) -> bool:
    """Whether a setting is a number or several, and not a switch."""
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    torch = sys.modules["torch"]
    return isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
