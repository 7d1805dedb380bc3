"""Tensors whose names differ in numbers alone, in one line: layers, experts, parameters.

A line is read as a shell reads it: ``model.layers.{0..31}.mlp.weight`` stands for 32 names, and
``{0..93..3}`` for every third number. Of many numbers without a rule some are left out: ``...``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

_LISTED_MAX = 6
"""Of numbers without a rule."""

_DIGITS_MAX = 18
"""What a layer has at most; longer ones may come from anywhere, and are text."""

_Part: TypeAlias = "str | tuple[int, ...]"


class Folded(NamedTuple):
    """A line.

    Attributes:
        name: What stands for all names.
        indices: Which of the tensors, by their place in the list.
    """

    name: str
    indices: list[int]


class _Line(NamedTuple):
    parts: tuple[_Part, ...]
    kind: Hashable
    indices: list[int]


def fold(named: Iterable[tuple[str, Hashable]]) -> list[Folded]:
    """Lines for tensors, in the order of the first of each.

    Args:
        named: The name of each, and what has to be equal for two to be in one line.
    """
    lines = [
        _Line(tuple(map(_part, name.split("."))), kind, [index])
        for index, (name, kind) in enumerate(named)
    ]
    # From the last number to the first, so that experts are together before layers are.
    for back in range(1, 1 + max((len(line.parts) for line in lines), default=0)):
        together: dict[Hashable, list[_Line]] = {}
        for line in lines:
            together.setdefault(_without(line, back), []).append(line)
        lines = [_joined(some, back) for some in together.values()]
    return [Folded(_name(line.parts), sorted(line.indices)) for line in lines]


def _part(text: str) -> _Part:
    # Leading zeros are part of a name.
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return (int(text),) if is_number and text == str(int(text)) else text


def _without(line: _Line, back: int) -> Hashable:
    """What lines have in common that differ in the number in this place from the end, if any."""
    at = len(line.parts) - back
    if at < 0 or isinstance(line.parts[at], str):
        return line.parts, line.kind
    return line.parts[:at], line.parts[at + 1 :], line.kind


def _joined(lines: list[_Line], back: int) -> _Line:
    if len(lines) == 1:
        return lines[0]
    parts, kind, _ = lines[0]
    at = len(parts) - back
    numbers = {number for line in lines for number in line.parts[at] if isinstance(number, int)}
    indices = [index for line in lines for index in line.indices]
    return _Line((*parts[:at], tuple(sorted(numbers)), *parts[at + 1 :]), kind, indices)


def _name(parts: tuple[_Part, ...]) -> str:
    return ".".join(part if isinstance(part, str) else _numbers(part) for part in parts)


def _numbers(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    first, last, step = numbers[0], numbers[-1], numbers[1] - numbers[0]
    if len(numbers) > 2 and numbers == tuple(range(first, last + 1, step)):
        return f"{{{first}..{last}}}" if step == 1 else f"{{{first}..{last}..{step}}}"
    listed = list(map(str, numbers))
    if len(listed) > _LISTED_MAX:
        listed = [*listed[: _LISTED_MAX - 1], "...", listed[-1]]
    return f"{{{','.join(listed)}}}"
