"""Rounds that are given up where what is done in them fails, so that no rank waits in vain."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.checkpoint.ranks.round import Round


@contextlib.contextmanager
def entered(enter: Callable[[], Round]) -> Iterator[Round]:
    """The round that a function enters; given up where what is done under this fails.

    Nothing is to come between the two, where a Ctrl-C would leave the others waiting.
    """
    one = None
    try:
        one = enter()
        yield one
    except BaseException as error:
        if one is not None:
            one.give_up(error)
        raise


@contextlib.contextmanager
def or_give_up(one: Round | None) -> Iterator[None]:
    """Gives a round up, if there is one, where what is done under this fails."""
    try:
        yield
    except BaseException as error:
        if one is not None:
            one.give_up(error)
        raise
