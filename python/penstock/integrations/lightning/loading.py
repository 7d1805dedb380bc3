"""Reads a Lightning checkpoint, saved by Penstock or by Lightning."""

from __future__ import annotations

import inspect
import os
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load

import penstock
from penstock.errors import CorruptCheckpointError
from penstock.integrations import pickling
from penstock.plugin import SealingKeys

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_KEYS = SealingKeys()
_HAS_CHOICE = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters
_OR_CHOSEN = ", or with weights_only=False," if _HAS_CHOICE else ""


def read(
    path: str | os.PathLike[str],
    map_location: Any = None,
    weights_only: bool | None = None,
    *,
    trust: bool = False,
    keys: SealingKeys = _NO_KEYS,
) -> dict[str, Any]:
    """Reads a checkpoint: a directory with Penstock, a file with PyTorch.

    Args:
        path: A directory saved by Penstock, or a file or URL saved by Lightning.
        map_location: Where to put tensors, as for `torch.load`.
        weights_only: As for `torch.load`; False also means that pickled values are trusted.
        trust: Whether to unpickle values that were pickled.
        keys: The keys that open a sealed checkpoint.
    """
    where = os.path.expanduser(os.fspath(path).removeprefix("file://"))
    if "://" not in where and not os.path.isfile(where):
        state = unpacked(penstock.load(where, **keys.opening), where, weights_only, trust=trust)
        moved: dict[str, Any] = _moved(state, _mover(map_location))
        return moved
    keys.refuse_clear(where, "a file of Lightning's own")
    check_whole(where)
    if weights_only is None:
        return TorchCheckpointIO().load_checkpoint(where, map_location)
    # Lightning's own plug-in passes the choice on since 2.6.
    return _load(where, map_location, weights_only)  # type: ignore[no-any-return]


def weights_only_of(chosen: bool | None) -> dict[str, bool]:
    """The argument ``weights_only``, if it was chosen: most of Lightning takes it since 2.6."""
    return {} if chosen is None else {"weights_only": chosen}


def unpacked(state: Any, path: str, weights_only: bool | None, *, trust: bool) -> dict[str, Any]:
    """A loaded state with its pickled values unpickled."""
    found: dict[str, Any] = pickling.unpacked(
        state,
        "",
        trust=trust or weights_only is False,
        remedy=f"load {path} with PenstockIO(trust=True){_OR_CHOSEN}",
    )
    return found


def check_whole(path: str) -> None:
    """Raises `CorruptCheckpointError` for the cut-off file of a killed `torch.save`."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        start = file.read(4)
    if not start or (start == b"PK\3\4" and not zipfile.is_zipfile(path)):
        raise CorruptCheckpointError(
            f"{path} is a file of torch.save that was never finished, its end is missing: load an "
            "earlier one",
            path=path,
        )


def _mover(map_location: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that moves host tensors as requested; None if they may stay."""
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if map_location is None:
        return None
    if not callable(map_location):
        device = torch.device(map_location)
        return None if device.type == "cpu" else lambda tensor: tensor.to(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        storage = map_location(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)

    return move


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    if move is None:
        return value
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], move)
    elif type(value) is list:
        value[:] = [_moved(item, move) for item in value]
    elif type(value) is tuple:
        return tuple(_moved(item, move) for item in value)
    return value
