"""Values of a state that only pickle can store: packed into bytes by choice, unpacked by trust."""

from __future__ import annotations

import copy
import fnmatch
import pickle
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.flatten import flatten
from penstock.errors import UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARK = "penstock.pickle"
"""The only key of a dictionary that stands for a pickled value."""

_MARKS = frozenset({_MARK, "penstock.pickled"})
"""All that have stood for one: checkpoints of Lightning had one of their own."""


def packed(state: Any, name: str, patterns: Sequence[str], *, is_last_resort: bool = False) -> Any:
    """A state whose values of some names are bytes of pickle; everything else is as it was.

    Args:
        state: The state; it is not changed.
        name: What it is called itself; empty where its values go by their own names.
        patterns: Dotted names, or patterns of `fnmatch` over them.
        is_last_resort: Whether to leave as it is what can be stored otherwise.

    Raises:
        UnsupportedStateError: Such a value cannot be pickled.
    """

    def below(key: Any, one: Any) -> Any:
        return packed(one, _below(name, key), patterns, is_last_resort=is_last_resort)

    if name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        is_kept = is_last_resort and is_storable(state)
        return state if is_kept else {_MARK: _pickled(state, name)}
    if isinstance(state, dict):
        return like(state, {key: below(key, one) for key, one in state.items()})
    if type(state) in (list, tuple):
        return type(state)(below(index, one) for index, one in enumerate(state))
    return state


def is_storable(state: Any) -> bool:
    """Whether a state can be stored without pickle."""
    try:
        flatten(state)
    except UnsupportedStateError:
        return False
    return True


def unpacked(state: Any, name: str, *, trust: bool, remedy: str) -> Any:
    """What was given to `packed`.

    Args:
        state: What was stored.
        name: What it is called, as for `packed`.
        trust: Whether bytes of pickle, which can run any code, are unpickled.
        remedy: What to do for them to be.

    Raises:
        UnsupportedStateError: There are some, and ``trust`` is False.
    """

    def below(key: Any, one: Any) -> Any:
        return unpacked(one, _below(name, key), trust=trust, remedy=remedy)

    if isinstance(state, dict):
        if len(state) == 1 and (mark := next(iter(state))) in _MARKS:
            if not trust:
                raise UnsupportedStateError(
                    f"{name}: stored as bytes of pickle, which can run any code: {remedy} if you "
                    "trust whoever wrote them",
                    key=name,
                )
            return pickle.loads(state[mark])
        return like(state, {key: below(key, one) for key, one in state.items()})
    if type(state) in (list, tuple):
        return type(state)(below(index, one) for index, one in enumerate(state))
    return state


def like(state: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Other values for the keys of a dictionary, in one of its class.

    A copy is what keeps all that it is: the factory of a ``defaultdict``, and the versions of its
    parts that PyTorch hangs on the state of a module. The save refuses classes that it cannot keep.
    """
    if type(state) is dict:
        return items
    found = copy.copy(state)
    for key, value in items.items():
        # The `update` of a ``Counter`` adds.
        found[key] = value
    return found


def _below(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _pickled(state: Any, name: str) -> bytes:
    try:
        return pickle.dumps(state)
    except Exception as error:
        raise UnsupportedStateError(
            f"{name}: cannot be pickled either: {error}: leave it out", key=name
        ) from error
