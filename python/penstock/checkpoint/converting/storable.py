"""Replaces values of trusted pickles that cannot be stored by pickled bytes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

from penstock.checkpoint.state.flatten import Flattener
from penstock.checkpoint.state.tree.scalars import label
from penstock.checkpoint.state.tree.tree import LEVELS_MAX
from penstock.errors import UnsupportedStateError


def with_pickles(state: Any, *, is_strict: bool) -> tuple[Any, list[str]]:
    """Returns the state with `bytes` in place of every value that the format does not support.

    If ``is_strict``, the first such value is an error instead.

    Returns:
        The state, and the dotted names of the replaced values. `pickle.loads` restores them.
    """
    pickled: list[str] = []
    return _walk(state, "", 0, pickled, is_strict), pickled


def _walk(value: Any, name: str, level: int, pickled: list[str], is_strict: bool) -> Any:
    prefix = f"{name}." if name else ""
    # A value that contains itself is refused below, as nested too deeply.
    kind = type(value) if level < LEVELS_MAX else None
    if kind is dict or kind is OrderedDict:
        pairs = {
            key: _walk(one, f"{prefix}{label(key)}", level + 1, pickled, is_strict)
            for key, one in value.items()
        }
        if kind is dict:
            return pairs
        made = OrderedDict(pairs)
        # The versions in a module's state_dict().
        vars(made).update(vars(value))
        return made
    if kind is list or kind is tuple:
        return kind(
            _walk(one, f"{prefix}{at}", level + 1, pickled, is_strict)
            for at, one in enumerate(value)
        )
    try:
        Flattener().encode(value, name or "value", level)
    except UnsupportedStateError:
        if is_strict or not name:
            raise
        pickled.append(name)
        return _dumped(value, name)
    return value


def _dumped(value: Any, name: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        # The value's class raises any error.
        raise UnsupportedStateError(
            f"{name}: a value of type {type(value).__name__} can be neither stored nor pickled "
            f"anew ({error}): save the checkpoint without it",
            key=name,
        ) from error
