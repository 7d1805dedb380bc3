"""Rounds that fail on all ranks if the code inside them fails on one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.checkpoint.ranks.round import Round


@contextlib.contextmanager
def entered_round(enter: Callable[[], Round]) -> Iterator[Round]:
    """Enters a round, and fails it on all ranks if the block raises.

    No code may run between entering and the block: a Ctrl-C there would leave the other ranks
    waiting.
    """
    one = None
    try:
        one = enter()
        yield one
    except BaseException as error:
        if one is not None:
            one.abort(error)
        raise


@contextlib.contextmanager
def abort_on_error(one: Round | None) -> Iterator[None]:
    """Fails a round on all ranks, if there is one, if the block raises."""
    try:
        yield
    except BaseException as error:
        if one is not None:
            one.abort(error)
        raise
