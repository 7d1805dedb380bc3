"""Remedies for values that cannot be stored."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import pathlib
import random
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import UnsupportedStateError


def refusal(value: Any, name: str) -> UnsupportedStateError:
    """Returns the error for a leaf of a type that the format does not support."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return UnsupportedStateError(
        f"{name}: a value of type {kind} cannot be stored: {_remedy(value)}", key=name
    )


def _remedy(value: Any) -> str:
    for check in (_remedy_for_torch, _remedy_for_subclass, _remedy_for_object):
        remedy = check(value)
        if remedy is not None:
            return remedy
    return (
        "penstock.register_type(cls, flatten, unflatten) has it stored; or save its fields as "
        "plain values (numbers, text, lists, dicts, tensors)"
    )


def _remedy_for_torch(value: Any) -> str | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.Tensor):
        return _remedy_for_tensor(type(value))
    if isinstance(value, torch.Generator):
        return "save .get_state() instead"
    return None


def _remedy_for_tensor(kind: type) -> str:
    remedy = "tensor subclasses carry more than their elements; save a plain torch.Tensor of it"
    if kind.__module__.startswith(("torch.", "penstock.")):
        return remedy
    if hasattr(kind, "__tensor_flatten__"):
        return f"penstock.register_type({kind.__qualname__}) has it stored"
    return f"{remedy}, or give penstock.register_type a flatten and an unflatten for it"


def _remedy_for_subclass(value: Any) -> str | None:
    kind = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return f"penstock.register_type({kind}) has it stored; or save .value or .name"
    if isinstance(value, np.ndarray):
        return "array subclasses carry more than their elements; save np.asarray(value)"
    if isinstance(value, np.generic):
        return "save its fields as plain values instead"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return f"penstock.register_type({kind}) has it stored; or save tuple(value)"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"penstock.register_type({kind}) has it stored; or save its fields as a dict"
    if isinstance(value, Mapping | types.MappingProxyType):
        return "save dict(value) instead"
    for base in (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset):
        if isinstance(value, base):
            return f"subclasses come back as their base at best; save {base.__name__}(value)"
    return None


def _remedy_for_object(value: Any) -> str | None:
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return "save its .state_dict() instead"
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return "code is never stored; leave it out and create it anew after loading"
    if isinstance(value, type | types.ModuleType):
        return "code is never stored; save its name as text instead"
    if isinstance(value, np.random.Generator):
        return "save .bit_generator.state instead"
    if isinstance(value, random.Random):
        return "save .getstate() instead"
    if isinstance(value, collections.deque):
        return "save collections.deque(value) instead"
    if hasattr(value, "__next__"):
        return "save list(value) instead"
    if isinstance(value, pathlib.PurePath):
        return "save str(value) instead"
    if isinstance(value, dt.tzinfo):
        return "use datetime.timezone or a zoneinfo.ZoneInfo of a key instead"
    if isinstance(value, dt.date | dt.time):
        return "save .isoformat() instead"
    return None
