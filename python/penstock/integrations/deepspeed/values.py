"""Converts objects of DeepSpeed's own classes to plain values, and back."""

from __future__ import annotations

import enum
import importlib
from typing import Any

from penstock.errors import CorruptCheckpointError
from penstock.integrations import pickling

_MARK = "deepspeed.class"

_MODULES = {
    "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "ZeroStageEnum": "deepspeed.runtime.zero.config",
    "fragment_address": "deepspeed.utils.tensor_fragment",
}
"""Classes that are converted; an object consists of its attributes alone."""


def plain(value: Any) -> Any:
    """A state with objects of these classes replaced by plain values."""
    kind = type(value)
    if _MODULES.get(kind.__name__) == kind.__module__:
        fields = {"value": value.value} if isinstance(value, enum.Enum) else vars(value)
        return {_MARK: kind.__name__, "fields": plain(dict(fields))}
    if isinstance(value, dict):
        items = {key: plain(one) for key, one in value.items()}
        return pickling.like(value, items)
    if kind in (list, tuple):
        return kind(map(plain, value))
    return value


def built(value: Any, path: str) -> Any:
    """Inverts `plain`."""
    if isinstance(value, dict):
        if value.keys() == {_MARK, "fields"}:
            return _object(value[_MARK], built(value["fields"], path), path)
        items = {key: built(one, path) for key, one in value.items()}
        return pickling.like(value, items)
    if type(value) in (list, tuple):
        return type(value)(built(one, path) for one in value)
    return value


def _object(name: Any, fields: dict[str, Any], path: str) -> Any:
    if name not in _MODULES:
        raise CorruptCheckpointError(f"{path}: no class of DeepSpeed is called {name!r}", path=path)
    kind = getattr(importlib.import_module(_MODULES[name]), name)
    if issubclass(kind, enum.Enum):
        return kind(fields["value"])
    found = kind.__new__(kind)
    found.__dict__.update(fields)
    return found
