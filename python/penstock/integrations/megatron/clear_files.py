"""Refuses what Megatron-LM would write in the clear beside sealed checkpoints.

`megatron.training.checkpointing` writes checkpoints of other formats, and states of data loaders,
by itself. A program that asks for sealed checkpoints must not leave those on a disk unnoticed. A
function that each of its saves calls first, on all ranks, is replaced, as in `retention`.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockWarning
from penstock.integrations.megatron.retention import MODULE

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.plugin import SealingKeys

_FIRST = "maybe_save_dataloader_state"
"""The function that each save calls before it writes anything."""

_lock = threading.Lock()
_before: dict[str, Any] = {}
"""The replaced function."""


def patch(keys: SealingKeys) -> None:
    """Replaces the function, if keys seal, the module is imported and this has not been done."""
    module = sys.modules.get(MODULE)
    # A module that is being imported lacks it still.
    if keys.sealing is None or module is None or not hasattr(module, "save_checkpoint"):
        return
    with _lock:
        if _before:
            return
        theirs = vars(module).get(_FIRST)
        if not callable(theirs):
            warnings.warn(
                f"{MODULE} has no {_FIRST}: other formats than torch_dist, local checkpoints and "
                "states of data loaders are not refused, and stay clear",
                PenstockWarning,
                stacklevel=2,
            )
            return
        _before[_FIRST] = theirs
        setattr(module, _FIRST, _refusing(theirs, keys))


def take_back() -> None:
    """Gives the module its function again."""
    with _lock:
        while _before:
            name, value = _before.popitem()
            setattr(sys.modules[MODULE], name, value)


def _refusing(theirs: Callable[..., Any], keys: SealingKeys) -> Callable[..., Any]:
    @wraps(theirs)
    def refusing(*positional: Any, **named: Any) -> Any:
        settings = sys.modules[MODULE].get_args()
        found = refusal(settings)
        if found is not None:
            keys.refuse_sealing(os.fspath(getattr(settings, "save", None) or "."), found)
        return theirs(*positional, **named)

    return refusing


def refusal(settings: Any) -> str | None:
    """Names the clear files of a save with these arguments of Megatron-LM; None for none."""
    form = getattr(settings, "ckpt_format", "torch_dist")
    if form == "torch":
        return "--ckpt-format torch is written by Megatron-LM in the clear: use torch_dist"
    if form != "torch_dist":
        from penstock.integrations.dcp import defaults

        if defaults.keys().sealing is None:
            return (
                f"--ckpt-format {form} is written by PyTorch's DCP in the clear: use torch_dist, "
                "or penstock.integrations.dcp.enable(sealing=, file_system_writer=True) too"
            )
    if getattr(settings, "non_persistent_ckpt_type", None) == "local":
        return "local checkpoints (--non-persistent-ckpt-type local) stay clear: use global"
    if getattr(settings, "dataloader_save", None):
        return "the state of the data loader (--dataloader-save) stays clear"
    return None
