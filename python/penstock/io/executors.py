"""Worker threads that move bytes, shared within a process by all users with equal settings."""

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
    "extent_bytes": Number(_PAGE_BYTES, 1 << 30, "bytes", multiple_of=_PAGE_BYTES),
    "queue_depth": Number(1, 4096, "requests"),
    "io_threads": Number(1, 1024, "threads"),
    "staging_bytes": Number(4 * _MIB, 1 << 50, "bytes"),
}
_STAGING_BYTES = 64 * _MIB
_SMALL_TIMES = 4
"""In-flight small requests per in-flight large one. 128 requests per worker saturate a drive with a
latency of 1 ms and 100,000 requests a second, and do not overload a faster one.
"""


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Settings of an executor's workers.

    Attributes:
        engine: ``"auto"``, ``"uring"`` or ``"threads"``.
        io_threads: Number of threads.
        queue_depth: Operations in flight per worker.
        in_flight_bytes: Largest number of bytes in flight per worker.
        extent_bytes: Largest size of one operation, in bytes.
        staging_bytes: Memory for transfers that need an intermediate copy, in bytes.
    """

    engine: str
    io_threads: int
    queue_depth: int
    in_flight_bytes: int
    extent_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Requested `ExecutorSettings`; the device determines those that are None.

    Attributes:
        is_for_rows: Whether the executor reads many small rows straight to their destination. This
            needs little processor time for copies, and each worker is matched with a core of the
            caller.
    """

    engine: str
    io_threads: int | None
    queue_depth: int | None
    extent_bytes: int | None
    staging_bytes: int | None
    is_for_rows: bool = False

    @classmethod
    def of(cls, engine: str | None, **numbers: int | None) -> Choice:
        """Combines the given settings with those of the environment."""
        for name, value in numbers.items():
            _NUMBERS[name].check(name, value)
        options = Options() if engine is None else Options(engine=engine)
        said = {
            "queue_depth": options.queue_depth,
            "io_threads": options.io_threads,
            "staging_bytes": options.staging_bytes,
            "extent_bytes": options.extent_bytes,
        }
        chosen: dict[str, Any] = {name: numbers.get(name) or said[name] for name in said}
        if chosen["extent_bytes"] and numbers.get("staging_bytes"):
            # The staging memory must hold a block of each of two workers.
            least = Number(2 * chosen["extent_bytes"], 1 << 50, "bytes")
            least.check("staging_bytes", numbers["staging_bytes"])
        return cls(engine=options.engine, **chosen)

    def settings(self, file: _native.DataFile | None) -> ExecutorSettings:
        """Returns all settings, completed to suit the device of a file; None for no file."""
        extent_bytes, blocks, io_threads = file.suited if file else (_MIB, 32, 1)
        staging_bytes = self.staging_bytes or _STAGING_BYTES
        if self.is_for_rows and file and file.direct:
            io_threads = min(io_threads, max(1, len(os.sched_getaffinity(0)) // 2))
        if self.extent_bytes:
            extent_bytes = self.extent_bytes
            staging_bytes = max(staging_bytes, 2 * extent_bytes)
        extent_bytes = min(extent_bytes, staging_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES)
        return ExecutorSettings(
            engine=self.engine,
            io_threads=self.io_threads or io_threads,
            queue_depth=self.queue_depth or _SMALL_TIMES * blocks,
            in_flight_bytes=(self.queue_depth or blocks) * extent_bytes,
            extent_bytes=extent_bytes,
            staging_bytes=staging_bytes,
        )


_lock = threading.RLock()  # Re-entrant: garbage collection may call `release` meanwhile.
_shared: dict[ExecutorSettings, _native.Executor] = {}
_users: Counter[ExecutorSettings] = Counter()
_process = os.getpid()


def hold(settings: ExecutorSettings) -> _native.Executor:
    """Returns the executor with these settings, shared by all its holders in this process."""
    global _process
    with _lock:
        if _process != os.getpid():
            # These executors belong to the parent of this fork.
            _shared.clear()
            _users.clear()
            _process = os.getpid()
        executor = _shared.get(settings)
        if executor is None:
            executor = _shared[settings] = _native.Executor(
                engine=settings.engine,
                workers=settings.io_threads,
                queue_depth=settings.queue_depth,
                in_flight_bytes=settings.in_flight_bytes,
                block_bytes=settings.extent_bytes,
                staging_bytes=settings.staging_bytes,
            )
        _users[settings] += 1
        return executor


def release(settings: ExecutorSettings, *, is_idle: bool) -> None:
    """Gives up a hold on an executor, and closes one without holders.

    If a transfer of the caller is running, the executor stays until the end of the program, which
    waits for it.
    """
    with _lock:
        _users[settings] -= 1
        if is_idle and _users[settings] == 0:
            _shared.pop(settings).close()
            del _users[settings]


@atexit.register
def _close_at_exit() -> None:
    """Finishes running transfers: native threads are killed when the process ends."""
    if _process == os.getpid():
        for executor in list(_shared.values()):
            executor.close()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
