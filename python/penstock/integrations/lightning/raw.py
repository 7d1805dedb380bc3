"""Values that only pickle can store: named, or stored raw where the user has chosen so."""

from __future__ import annotations

import fnmatch
import pickle
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedStateError
from penstock.state.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARK = "penstock.pickled"
"""The only key of a dictionary that stands for a pickled value."""


def wrap(checkpoint: dict[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """The checkpoint with chosen values pickled, where they cannot be stored otherwise.

    Args:
        checkpoint: What the framework has put together; it is not changed.
        patterns: Dotted names, or patterns of `fnmatch`, of values that may be pickled.
    """
    return {key: _wrap(value, str(key), patterns) for key, value in checkpoint.items()}


def choice(
    error: UnsupportedStateError, state: dict[str, Any], patterns: Sequence[str]
) -> UnsupportedStateError:
    """The error of a save, with the choice that there is, for all of what would be refused.

    Args:
        error: What the save raised.
        state: Where to look for what else would be refused.
        patterns: What the user has chosen already.
    """
    refused = [key for key, value in state.items() if not _is_storable(value)]
    refused = refused or [error.key.partition(".")[0]]
    return UnsupportedStateError(
        f"{error}; or store {', '.join(refused)} raw, as a pickle that is loaded with trust=True "
        f"only: PenstockIO(raw={[*patterns, *refused]!r})",
        key=error.key,
    )


def unwrap(state: Any, path: str, *, trust: bool) -> Any:
    """The state with pickled values as they were.

    Args:
        state: What a checkpoint holds.
        path: The checkpoint's directory.
        trust: Whether to unpickle, which runs whatever code is in there.

    Raises:
        UnsupportedStateError: It has a pickled value, and is not trusted.
    """
    return _unwrap(state, "", path, trust)


def _wrap(value: Any, name: str, patterns: Sequence[str]) -> Any:
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return value if _is_storable(value) else {_MARK: pickle.dumps(value)}
    if type(value) is dict:
        return {key: _wrap(item, f"{name}.{key}", patterns) for key, item in value.items()}
    if type(value) is list:
        return [_wrap(item, f"{name}.{index}", patterns) for index, item in enumerate(value)]
    return value


def _unwrap(value: Any, name: str, path: str, trust: bool) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and _MARK in value:
            if not trust:
                raise UnsupportedStateError(
                    f"{path}: {name} was stored raw, as a pickle, which can run any code when it "
                    "is loaded: if you trust whoever saved it, PenstockIO(trust=True) loads it, "
                    "and so does weights_only=False",
                    key=name,
                )
            return pickle.loads(value[_MARK])
        for key in value:
            value[key] = _unwrap(value[key], _below(name, key), path, trust)
    elif type(value) is list:
        value[:] = [_unwrap(item, _below(name, i), path, trust) for i, item in enumerate(value)]
    elif type(value) is tuple:
        return tuple(_unwrap(item, _below(name, i), path, trust) for i, item in enumerate(value))
    return value


def _is_storable(value: Any) -> bool:
    try:
        flatten(value)
    except UnsupportedStateError:
        return False
    return True


def _below(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
