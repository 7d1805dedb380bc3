"""Refuses what Megatron-LM would write in the clear beside sealed checkpoints.

`megatron.training.checkpointing` writes checkpoints of other formats, and states of data loaders,
by itself. A program that asks for sealed checkpoints must not leave those on a disk unnoticed. So
two functions of the module are replaced: the one that saves, and the one that it calls first on all
ranks, for modules that have imported the other by its name. Most programs import the module after
`enable`: then that is done at the end of the import.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from penstock.integrations.megatron.retention import MODULE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from penstock.plugin import SealingKeys

_NAMES = ("save_checkpoint", "maybe_save_dataloader_state")

_lock = threading.RLock()
_before: dict[str, Any] = {}
"""The replaced functions, by name."""


class _Finder(MetaPathFinder):
    """Replaces the functions of the module once it has been imported."""

    keys: SealingKeys | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds the module by the other finders."""
        if fullname != MODULE:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    execute = partial(self._execute, spec.loader.exec_module)
                    spec.loader.exec_module = execute
                return spec  # type: ignore[no-any-return]
        return None

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        if self.keys is not None:
            _replace(module, self.keys)


_finder = _Finder()


def patch(keys: SealingKeys) -> None:
    """Replaces the functions, now or when the module is imported, if keys seal."""
    if keys.sealing is None:
        return
    with _lock:
        _finder.keys = keys
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        module = sys.modules.get(MODULE)
        # A module that is being imported lacks them still.
        if module is not None and hasattr(module, "save_checkpoint"):
            _replace(module, keys)


def take_back() -> None:
    """Gives the module its functions again."""
    with _lock:
        _finder.keys = None
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        while _before:
            name, value = _before.popitem()
            if MODULE in sys.modules:
                setattr(sys.modules[MODULE], name, value)


def _replace(module: ModuleType, keys: SealingKeys) -> None:
    with _lock:
        for name in _NAMES:
            theirs = vars(module).get(name)
            if callable(theirs) and name not in _before:
                _before[name] = theirs
                setattr(module, name, _refusing(theirs, keys))


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
