"""`copies_first`: what PyTorch before 2.7 lacks, a copy of the state for `async_save`.

There `async_save` moves tensors to the host and takes those that are there already as they are, so
that a save holds whatever training makes of them until it is written. A writer that can *stage* is
asked to copy instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

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
    # Only here: they are private, and where PyTorch copies itself nobody needs them.
    from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

    copy = _create_cpu_state_dict(state_dict)
    _copy_state_dict(state_dict, copy, type_check=False)
    return copy


def _synchronize_staging(self: object) -> None:
    """Does nothing: `stage` returns when it is done."""
