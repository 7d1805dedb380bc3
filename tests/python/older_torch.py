"""Public names of PyTorch that tests use, and that its oldest versions have elsewhere.

Importing this module puts them where newer versions have them, for the tests alone: Penstock is
imported before, and `test_floors.py` checks all its names on the installed PyTorch.
"""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def _alias(name: str, theirs: ModuleType) -> None:
    """Registers a module under a second name, or adds its names to an existing package."""
    try:
        package = import_module(name)
    except ImportError:
        sys.modules[name] = theirs
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, theirs)
        return
    for key, value in vars(theirs).items():
        if not key.startswith("__") and not hasattr(package, key):
            setattr(package, key, value)


def _without_no_dist(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps DCP's `save` or `load`, which before 2.7 notice themselves that there are no ranks."""
    if "no_dist" in inspect.signature(function).parameters:
        return function

    @wraps(function)
    def call(*arguments: Any, no_dist: bool = False, **further: Any) -> Any:
        return function(*arguments, **further)

    return call


def complete() -> None:
    """Adds the missing names, if an older PyTorch is installed."""
    try:
        import torch.distributed.fsdp
        import torch.distributed.tensor
        from torch.distributed.checkpoint import state_dict_saver
    except ImportError:
        return
    tensor: Any = torch.distributed.tensor
    if not hasattr(tensor, "DTensor"):
        # Before 2.5.
        import penstock.checkpoint.layout.sharding
        import penstock.tensors.torch_names  # noqa: F401  found as without this

        _alias("torch.distributed.tensor", import_module("torch.distributed._tensor"))
        # Tests that need one are skipped.
        placements: Any = import_module("torch.distributed._tensor.placement_types")
        placements._StridedShard = None
        for child in ("_utils", "placement_types"):
            theirs = import_module(f"torch.distributed._tensor.{child}")
            _alias(f"torch.distributed.tensor.{child}", theirs)
    fsdp: Any = torch.distributed.fsdp
    if not hasattr(fsdp, "fully_shard"):
        # Before 2.6.
        fsdp.fully_shard = import_module("torch.distributed._composable.fsdp").fully_shard
    saver: Any = state_dict_saver
    if not hasattr(saver, "AsyncCheckpointerType"):
        # Before 2.7 there are threads only.
        saver.AsyncCheckpointerType = None
    dcp: Any = torch.distributed.checkpoint
    dcp.save, dcp.load = _without_no_dist(dcp.save), _without_no_dist(dcp.load)


complete()
