"""Whose turn it is: workers test side by side, but some tests have the machine for themselves.

A test marked `alone` waits until no other worker tests, and the others wait for it. Locks do that,
as the kernel takes them from a worker that dies.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Turns:
    """The locks of all workers.

    Args:
        directory: That they share.
    """

    def __init__(self, directory: Path) -> None:
        # Whoever waits for its turn keeps the door, or those who share the machine would pass on
        # their turns to each other for ever.
        self._door = os.open(directory / "door.lock", os.O_CREAT | os.O_RDWR)
        self._machine = os.open(directory / "machine.lock", os.O_CREAT | os.O_RDWR)

    def take(self, is_alone: bool) -> None:
        """Waits for a turn."""
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._machine, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)

    def end(self) -> None:
        """The next one, please."""
        fcntl.flock(self._machine, fcntl.LOCK_UN)


_turns: list[Turns] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Meets the other workers, if there are any."""
    if hasattr(session.config, "workerinput"):
        _turns.append(Turns(session.config._tmp_path_factory.getbasetemp().parent))


# Before the timer of the test, which a wait is no part of.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One test."""
    for turns in _turns:
        turns.take(item.get_closest_marker("alone") is not None)
    try:
        return (yield)
    finally:
        for turns in _turns:
            turns.end()
