"""The workers that move bytes: one set in a process for all who ask for the same settings."""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

from penstock import _native
from penstock.common.option_kinds import Number
from penstock.options import Options

_MIB, _PAGE_BYTES = 1 << 20, 4096

_NUMBERS = {
    "block_bytes": Number(_PAGE_BYTES, 1 << 30, "bytes", multiple_of=_PAGE_BYTES),
    "queue_depth": Number(1, 4096, "requests"),
    "workers": Number(1, 1024, "threads"),
    "staging_bytes": Number(4 * _MIB, 1 << 50, "bytes"),
}
_STAGING_BYTES = 64 * _MIB
_SMALL_TIMES = 4
"""So many times as many small requests are in flight as large ones: 128 of a worker keep a drive
busy that answers 100,000 a second after a millisecond, and are no burden to one that is faster."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What workers are started with.

    Attributes:
        engine: ``"auto"``, ``"uring"`` or ``"threads"``.
        workers: Threads.
        queue_depth: Operations in flight of each.
        in_flight_bytes: What those move at most, all together.
        block_bytes: What one operation moves at most.
        staging_bytes: Memory for what cannot go straight.
    """

    engine: str
    workers: int
    queue_depth: int
    in_flight_bytes: int
    block_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What of the `Settings` is given; the rest is left to the device.

    Attributes:
        is_for_rows: Whether it is for small reads that go straight to where they are needed, which
            leave little to do for the processor: a caller has a core for each worker then.
    """

    engine: str
    workers: int | None
    queue_depth: int | None
    block_bytes: int | None
    staging_bytes: int | None
    is_for_rows: bool = False

    @classmethod
    def of(cls, engine: str | None, **numbers: int | None) -> Choice:
        """What is given, else what the environment says.

        Raises:
            ValueError: A value is out of range.
            TypeError: A value has the wrong type.
        """
        for name, value in numbers.items():
            _NUMBERS[name].check(name, value)
        options = Options() if engine is None else Options(engine=engine)
        said = {
            "queue_depth": options.queue_depth,
            "workers": options.io_threads,
            "staging_bytes": options.staging_bytes,
            "block_bytes": options.extent_bytes,
        }
        chosen: dict[str, Any] = {name: numbers.get(name) or said[name] for name in said}
        if chosen["block_bytes"] and numbers.get("staging_bytes"):
            # A piece of each of two workers has to find room.
            least = Number(2 * chosen["block_bytes"], 1 << 50, "bytes")
            least.check("staging_bytes", numbers["staging_bytes"])
        return cls(engine=options.engine, **chosen)

    def settings(self, file: _native.DataFile | None) -> Settings:
        """All of them, as they suit the device that holds a file.

        Args:
            file: None where there is none: a transfer of nothing.
        """
        block_bytes, blocks, workers = file.suited if file else (_MIB, 32, 1)
        staging_bytes = self.staging_bytes or _STAGING_BYTES
        if self.is_for_rows and file and file.direct:
            workers = min(workers, max(1, len(os.sched_getaffinity(0)) // 2))
        if self.block_bytes:
            block_bytes = self.block_bytes
            staging_bytes = max(staging_bytes, 2 * block_bytes)
        block_bytes = min(block_bytes, staging_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES)
        return Settings(
            engine=self.engine,
            workers=self.workers or workers,
            queue_depth=self.queue_depth or _SMALL_TIMES * blocks,
            in_flight_bytes=(self.queue_depth or blocks) * block_bytes,
            block_bytes=block_bytes,
            staging_bytes=staging_bytes,
        )


_lock = threading.RLock()  # Garbage may be collected while it is held, and release.
_shared: dict[Settings, _native.Executor] = {}
_users: Counter[Settings] = Counter()
_process = os.getpid()


def hold(settings: Settings) -> _native.Executor:
    """The workers with these settings, which all in this process share who hold them.

    Raises:
        StorageError: The engine that was asked for cannot run here.
    """
    global _process
    with _lock:
        if _process != os.getpid():
            # Those of the process that this one is a fork of.
            _shared.clear()
            _users.clear()
            _process = os.getpid()
        executor = _shared.get(settings)
        if executor is None:
            executor = _shared[settings] = _native.Executor(
                engine=settings.engine,
                workers=settings.workers,
                queue_depth=settings.queue_depth,
                in_flight_bytes=settings.in_flight_bytes,
                block_bytes=settings.block_bytes,
                staging_bytes=settings.staging_bytes,
            )
        _users[settings] += 1
        return executor


def release(settings: Settings, *, is_idle: bool) -> None:
    """Has workers go that nobody holds any more.

    Args:
        settings: As they were held with.
        is_idle: Whether nothing is under way of whoever releases; else they stay until the end of
            the program, which waits for that.
    """
    with _lock:
        _users[settings] -= 1
        if is_idle and _users[settings] == 0:
            _shared.pop(settings).close()
            del _users[settings]


@atexit.register
def _close_at_exit() -> None:
    """Finishes what was handed over: threads of ours end with the process, wherever they are."""
    if _process == os.getpid():
        for executor in list(_shared.values()):
            executor.close()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
