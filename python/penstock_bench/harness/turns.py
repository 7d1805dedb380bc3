"""Who comes first: in each round another one, so that nobody always finds what one other leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

_T = TypeVar("_T")


def rotated(items: Sequence[_T], number: int) -> list[_T]:
    """The items in the order of a round, from 0."""
    cut = number % len(items) if items else 0
    return [*items[cut:], *items[:cut]]
