"""Whether a JSON document has the shape of a dataclass: fields by name, values of their types."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

_NUMBER_MAX = 1e30
"""More than anything that is counted or timed; what is derived from numbers stays finite."""


def checked(cls: Any, document: Any) -> dict[str, Any]:
    """The fields of a class that a document has, without what a later release wrote beside them.

    Fields of the class are plain values, others like it, lists and dictionaries.

    Raises:
        ValueError: It is no object, lacks a field, or has one of another type. Of numbers only
            those that are finite and not negative count.
    """
    if not isinstance(document, dict):
        raise ValueError(f"{_short(document)} in place of an object")
    found = {}
    for name, (kind, is_needed) in _fields(cls).items():
        if name in document:
            if not _is(document[name], kind):
                raise ValueError(f"{name}: {_short(document[name])}")
            found[name] = document[name]
        elif is_needed:
            raise ValueError(f"{name} is missing")
    return found


@functools.lru_cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether it has no default."""
    kinds = typing.get_type_hints(cls)
    return {
        one.name: (kinds[one.name], one.default is one.default_factory is dataclasses.MISSING)
        for one in dataclasses.fields(cls)
    }


def _is(value: Any, kind: Any) -> bool:
    arguments = typing.get_args(kind)
    container = typing.get_origin(kind)
    if container is types.UnionType:
        return any(_is(value, one) for one in arguments)
    if container is list:
        return isinstance(value, list) and all(_is(one, arguments[0]) for one in value)
    if container is dict:
        return isinstance(value, dict) and all(_is(one, arguments[1]) for one in value.values())
    if kind is Any:
        return True
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        checked(kind, value)
        return True
    if kind in (int, float):
        # For JSON a number without a fraction is one of either kind; for Python a boolean is one.
        numbers = (int, float) if kind is float else int
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        return is_number and 0 <= value <= _NUMBER_MAX
    return isinstance(value, kind)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
