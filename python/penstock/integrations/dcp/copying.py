"""`copies_first`: what PyTorch before 2.7 lacks, a copy of the state for `async_save`.

There `async_save` moves tensors to the host and takes those that are there already as they are, so
that a save holds whatever training makes of them until it is written. A writer that can *stage* is
asked to copy instead.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint import state_dict_saver

if TYPE_CHECKING:
    Writer = TypeVar("Writer", bound=type)

_COPIES = ("DefaultStager", "_create_cpu_state_dict")
"""Names in the module of `async_save`, from PyTorch 2.9 and 2.7 on, by which it copies itself."""


def copies_first(writer: Writer) -> Writer:
    """Has writers of this class copy the state for `async_save`, where PyTorch does not."""
    if not any(hasattr(state_dict_saver, name) for name in _COPIES):
        kind: Any = writer
        kind.stage, kind.synchronize_staging = _stage, _synchronize_staging
        kind.should_synchronize_after_execute = kind._synchronize_after_execute = False
    return writer


def _stage(self: object, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of the state on the host."""
    copied: dict[str, Any] = _copied(state_dict, {})
    return copied


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """A copy of a value; of a tensor that occurs twice, one.

    Not by PyTorch's own functions of these versions, which leave a `DTensor` of the host as it is.

    Args:
        value: What is copied.
        known: The copies of tensors, by their ids.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            found = value.detach()
            known[id(value)] = found.clone() if found.device.type == "cpu" else found.cpu()
        return known[id(value)]
    if isinstance(value, dict):
        return {key: _copied(child, known) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(child, known) for child in value)
    return copy.deepcopy(value)


def _synchronize_staging(self: object) -> None:
    """Does nothing: `stage` returns when it is done."""
