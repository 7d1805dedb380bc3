"""`copies_first`: copies the state for `async_save` on PyTorch before 2.7, which does not.

There `async_save` moves tensors to the host, but takes host tensors as they are, so that a save
would store later changes by training. A writer that can *stage* is asked to copy instead.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint import state_dict_saver

if TYPE_CHECKING:
    Writer = TypeVar("Writer", bound=type)

_COPIES = ("DefaultStager", "_create_cpu_state_dict")
"""Names in the module of `async_save`, from PyTorch 2.9 and 2.7 on, with which it copies itself."""


def copies_first(writer: Writer) -> Writer:
    """Makes writers of this class copy the state for `async_save`, if PyTorch does not."""
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
    """A copy of a value; a tensor that occurs twice is copied once.

    PyTorch's own functions of these versions do not copy a `DTensor` on the host.

    Args:
        value: The value to copy.
        known: The copies of tensors, by the ids of the originals.
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
