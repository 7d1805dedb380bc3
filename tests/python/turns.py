"""Exclusive turns: test workers run in parallel, but some tests need the machine alone.

A test marked `alone` waits until no other worker runs a test, and the others wait for it. File
locks implement that, as the kernel releases the locks of a worker that dies.
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
    """The locks that all workers share.

    Args:
        directory: Directory of the lock files.
    """

    def __init__(self, directory: Path) -> None:
        # A waiting worker holds the door; without it, workers that share the machine could pass
        # turns to each other for ever.
        self._door = os.open(directory / "door.lock", os.O_CREAT | os.O_RDWR)
        self._machine = os.open(directory / "machine.lock", os.O_CREAT | os.O_RDWR)

    def take(self, is_alone: bool) -> None:
        """Waits for a turn."""
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._machine, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)

    def end(self) -> None:
        """Ends the turn."""
        fcntl.flock(self._machine, fcntl.LOCK_UN)


_turns: list[Turns] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Opens the locks, if there are other workers."""
    if hasattr(session.config, "workerinput"):
        _turns.append(Turns(session.config._tmp_path_factory.getbasetemp().parent))


# Before the timer of the test, which must not include the wait.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Runs one test within a turn."""
    for turns in _turns:
        turns.take(item.get_closest_marker("alone") is not None)
    try:
        return (yield)
    finally:
        for turns in _turns:
            turns.end()
