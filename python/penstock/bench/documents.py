"""Whether a JSON document has the shape of a dataclass: fields by name, values of their types."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any


def checked(cls: type[Any], document: Any) -> dict[str, Any]:
    """The document, if it can be handed to the class as its fields.

    Args:
        cls: A dataclass whose fields are plain values, others like it, lists and dictionaries.
        document: What JSON holds in its place.

    Raises:
        ValueError: It is no object, lacks a field, has one too many, or one of another type. Of
            numbers only those that are finite and not negative count.
    """
    if not isinstance(document, dict):
        raise ValueError(f"{_short(document)} in place of an object")
    kinds = typing.get_type_hints(cls)
    fields = {one.name: one for one in dataclasses.fields(cls)}
    for name in document:
        if name not in fields:
            raise ValueError(f"unknown: {_short(name)}")
    for name, one in fields.items():
        if name in document:
            if not _is(document[name], kinds[name]):
                raise ValueError(f"{name}: {_short(document[name])}")
        elif one.default is one.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    return document


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
        return is_number and math.isfinite(value) and value >= 0
    return isinstance(value, kind)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
