"""Folds tensors whose names differ only in numbers into one line: layers, experts, parameters.

A line uses the shell's notation: ``model.layers.{0..31}.mlp.weight`` stands for 32 names, and
``{0..93..3}`` for every third number. Long lists of irregular numbers are shortened: ``...``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

_LISTED_MAX = 6
"""Most irregular numbers in a list."""

_DIGITS_MAX = 18
"""Most digits of a number; longer ones are taken for text, as no layer has such a number."""

_Part: TypeAlias = "str | tuple[int, ...]"


class Folded(NamedTuple):
    """A line: one notation for all its names, and the indices of its tensors in the input."""

    name: str
    indices: list[int]


class _Line(NamedTuple):
    parts: tuple[_Part, ...]
    kind: Hashable
    indices: list[int]


def fold(named: Iterable[tuple[str, Hashable]]) -> list[Folded]:
    """Folds tensors into lines, in the order of the first tensor of each.

    Tensors on one line have equal values in ``named``.
    """
    lines = [
        _Line(tuple(map(_part, name.split("."))), kind, [index])
        for index, (name, kind) in enumerate(named)
    ]
    # From the last number to the first: folds experts before layers.
    for back in range(1, 1 + max((len(line.parts) for line in lines), default=0)):
        together: dict[Hashable, list[_Line]] = {}
        for line in lines:
            together.setdefault(_without(line, back), []).append(line)
        lines = [_joined(some, back) for some in together.values()]
    return [Folded(_name(line.parts), sorted(line.indices)) for line in lines]


def _part(text: str) -> _Part:
    # Leading zeros make it a name, not a number.
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return (int(text),) if is_number and text == str(int(text)) else text


def _without(line: _Line, back: int) -> Hashable:
    """The key by which lines are folded: all but the number at this place from the end, if any."""
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
