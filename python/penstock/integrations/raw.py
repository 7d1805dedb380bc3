"""Values of a state that only pickle can store: packed into bytes by choice, unpacked by trust."""

from __future__ import annotations

import copy
import fnmatch
import pickle
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARK = "penstock.pickle"


def packed(state: Any, name: str, patterns: Sequence[str]) -> Any:
    """A state whose values of some names are bytes of pickle; everything else is as it was.

    Args:
        state: The state.
        name: What it is called itself.
        patterns: Dotted names, or patterns of `fnmatch` over them.

    Raises:
        UnsupportedStateError: Such a value cannot be pickled.
    """
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return {_MARK: _pickled(state, name)}
    if isinstance(state, dict):
        items = {key: packed(one, f"{name}.{key}", patterns) for key, one in state.items()}
        return like(state, items)
    if type(state) in (list, tuple):
        return type(state)(packed(one, f"{name}.{i}", patterns) for i, one in enumerate(state))
    return state


def unpacked(state: Any, name: str, *, trust: bool, remedy: str) -> Any:
    """What was given to `packed`.

    Args:
        state: What was stored.
        name: What it is called.
        trust: Whether bytes of pickle, which can run any code, are unpickled.
        remedy: What to do for them to be.

    Raises:
        UnsupportedStateError: There are some, and ``trust`` is False.
    """
    if isinstance(state, dict):
        if state.keys() == {_MARK}:
            if not trust:
                raise UnsupportedStateError(
                    f"{name}: stored as bytes of pickle, which can run any code: {remedy} if you "
                    "trust whoever wrote them",
                    key=name,
                )
            return pickle.loads(state[_MARK])
        items = {
            key: unpacked(one, f"{name}.{key}", trust=trust, remedy=remedy)
            for key, one in state.items()
        }
        return like(state, items)
    if type(state) in (list, tuple):
        every = enumerate(state)
        return type(state)(
            unpacked(one, f"{name}.{index}", trust=trust, remedy=remedy) for index, one in every
        )
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


def _pickled(state: Any, name: str) -> bytes:
    try:
        return pickle.dumps(state)
    except Exception as error:
        raise UnsupportedStateError(
            f"{name}: cannot be pickled either: {error}: leave it out", key=name
        ) from error
