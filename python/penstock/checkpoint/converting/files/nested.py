"""Builds the nested state described by the paths of flat names, as DCP stores them.

A number in a path is a position in a list, text is a key of a dict. Paths come from a file: they
are checked before they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Nest: TypeAlias = "dict[str | int, Nest | str]"
"""A dict, or a list by its positions; flat names represent values."""

_DEPTH_MAX = 200
"""More than the depth of real states; each level is a call of `filled`."""

_PLACES_MAX = 1 << 20
"""Largest number of empty list positions, such as those of empty containers."""


def nested(paths: Mapping[str, Any]) -> Nest:
    """Returns the position of each flat name, given its path: one or more keys."""
    root: Nest = {}
    nests = [root]
    for name, path in paths.items():
        keys = _checked(name, path)
        within = root
        for key in keys[:-1]:
            if key not in within:
                nests.append({})
                within[key] = nests[-1]
            found = within[key]
            if isinstance(found, str):
                raise ValueError(f"{found!r:.80} and {name!r:.80} cannot both be in one state")
            within = found
        if keys[-1] in within:
            raise ValueError(f"{name!r:.80} has the place of another value")
        within[keys[-1]] = name
    _check_lists(nests)
    return root


def filled(nest: Nest, value_of: Callable[[str], Any]) -> Any:
    """Returns a nested state with the value of each flat name at its position.

    List positions without a path are None.
    """
    found = {
        key: value_of(one) if isinstance(one, str) else filled(one, value_of)
        for key, one in nest.items()
    }
    if not any(type(key) is int for key in found):
        return found
    return [found.get(place) for place in range(1 + _last(nest))]


def _checked(name: str, path: Any) -> tuple[str | int, ...]:
    if not isinstance(path, tuple | list) or not 0 < len(path) <= _DEPTH_MAX:
        raise ValueError(f"the path of {name!r:.80} is {path!r:.80}")
    for key in path:
        if type(key) is not str and (type(key) is not int or key < 0):
            raise TypeError(f"the path of {name!r:.80} has {key!r:.80}")
    if type(path[0]) is not str:
        raise ValueError(f"the path of {name!r:.80} begins with a place in a list")
    return tuple(path)


def _check_lists(nests: list[Nest]) -> None:
    empty = 0
    for nest in nests:
        kinds = {type(key) for key in nest}
        if len(kinds) > 1:
            raise ValueError(f"{list(nest)!r:.80} are keys of a dict and places in a list")
        if kinds == {int}:
            empty += 1 + _last(nest) - len(nest)
    if empty > _PLACES_MAX:
        raise ValueError(f"its lists have {empty} empty places")


def _last(nest: Nest) -> int:
    return max(key for key in nest if isinstance(key, int))
