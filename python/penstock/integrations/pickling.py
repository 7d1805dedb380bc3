"""Pickles values of a state that cannot be stored otherwise, by name; unpickles them if trusted."""

from __future__ import annotations

import copy
import fnmatch
import pickle
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.tree.names import labels, matcher
from penstock.errors import UnsupportedStateError
from penstock.plugin import flatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MARK = "penstock.pickle"
"""The only key of a dictionary that represents a pickled value."""

_MARKS = frozenset({_MARK, "penstock.pickled"})
"""All keys ever used for it: checkpoints of Lightning had their own."""


def packed(state: Any, name: str, patterns: Sequence[str], *, is_last_resort: bool = False) -> Any:
    """A state with the values of some names replaced by pickled bytes.

    Args:
        state: The state; it is not changed.
        name: Name of the state itself; empty if its values have no prefix.
        patterns: Names as `penstock.inspect` shows them, or patterns of `fnmatch` for names.
        is_last_resort: Whether values that can be stored otherwise are left unchanged.
    """
    if not patterns:
        return state
    # Escaped names first; patterns that match none of them are matched with unescaped keys.
    of_names = [(pattern, matcher(pattern)) for pattern in patterns]
    matching = {
        pattern
        for one, _ in _names(state, name, name)
        for pattern, matches in of_names
        if matches(one)
    }

    def is_chosen(one: str, written: str) -> bool:
        return any(
            matches(one) if pattern in matching else fnmatch.fnmatchcase(written, pattern)
            for pattern, matches in of_names
        )

    def walk(one: Any, name: str, written: str) -> Any:
        if name and is_chosen(name, written):
            is_kept = is_last_resort and is_storable(one)
            return one if is_kept else {_MARK: _pickled(one, name)}
        if not _is_container(one):
            return one
        items = {key: walk(inner, *below) for key, inner, below in _children(one, name, written)}
        return like(one, items) if isinstance(one, dict) else type(one)(items.values())

    return walk(state, name, name)


def _names(state: Any, name: str, written: str) -> Iterator[tuple[str, str]]:
    """Yields the names of a state and of everything in it, escaped and unescaped."""
    if name:
        yield name, written
    if _is_container(state):
        for _, inner, below in _children(state, name, written):
            yield from _names(inner, *below)


def _children(state: Any, name: str, written: str) -> Iterator[tuple[Any, Any, tuple[str, str]]]:
    """Yields each key and value of a container, and the value's two names."""
    keys = list(state) if isinstance(state, dict) else range(len(state))
    values = list(state.values()) if isinstance(state, dict) else state
    parts = labels(keys, lambda index: _is_container(values[index]) and bool(values[index]))
    for key, value, part in zip(keys, values, parts, strict=True):
        yield key, value, (_below(name, part), _below(written, key))


def _is_container(state: Any) -> bool:
    return isinstance(state, dict) or type(state) in (list, tuple)


def is_storable(state: Any) -> bool:
    """Whether a state can be stored without pickle."""
    try:
        flatten(state)
    except UnsupportedStateError:
        return False
    return True


def unpacked(state: Any, name: str, *, trust: bool, remedy: str) -> Any:
    """Inverts `packed`. ``trust``: whether pickled bytes, which can run any code, are unpickled."""

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
    """A dictionary of the same class with other values for its keys.

    It is a copy, which keeps all attributes: the factory of a ``defaultdict``, and the versions
    that PyTorch attaches to the state of a module. The save refuses classes that it cannot keep.
    """
    if type(state) is dict:
        return items
    found = copy.copy(state)
    for key, value in items.items():
        # One by one, as the `update` of a ``Counter`` adds.
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
