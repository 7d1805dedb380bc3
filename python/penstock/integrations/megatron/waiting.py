"""`EndMark`: the end of a save that runs in this process, for the queue that waits for it.

The queues of Megatron-Core and of `nvidia-resiliency-ext` run the work of an `AsyncRequest` in
another process, forked or spawned, and take the save for done when that work returns. A fork for
that would wait for this process, and cost it more than the copy of the state: until the save ends,
each page that the training or the next copy writes is copied first. So `wait_here` puts the mark
into the place of the forked process.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import sys
import tempfile
import threading
import time
from functools import wraps
from typing import TYPE_CHECKING, Any

from penstock.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

_WAITS_HERE = "_penstock_waits_here"
_SCHEDULES_BY = {"Process", "process", "start_time"}
"""Names in the method that forks, which show that it keeps the process as expected."""


class EndMark:
    """A file that this process keeps locked until the save has ended.

    The lock is of the kind that a fork does not inherit, and that ends with the process. In this
    process the mark is asked what a queue asks of a process: `is_alive`, `join` and `kill`.

    Attributes:
        path: The file, for `wait_for_end`.

    Raises:
        StorageError: The directory of temporary files cannot be written, or has no locks.
    """

    def __init__(self) -> None:
        try:
            self._file, self.path = _locked_file()
        except OSError as error:
            where = error.filename or os.environ.get("TMPDIR", "/tmp")
            raise StorageError(
                f"{where}: {error.strerror}: an asynchronous save needs a small temporary file: "
                "set TMPDIR to a directory that can be written",
                path=str(where),
                errno=error.errno,
            ) from error
        self._process = os.getpid()
        self._ended = threading.Event()
        _marks[self.path] = self

    def release(self) -> None:
        """Ends the waits."""
        _marks.pop(self.path, None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._file.close()
        self._ended.set()

    @staticmethod
    def of_this_process(path: str) -> EndMark | None:
        """The mark of a save that runs in this process, by its file; None for any other."""
        mark = _marks.get(path)
        return mark if mark is not None and mark._process == os.getpid() else None

    def is_alive(self) -> bool:
        """Whether the save has not ended."""
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the save, for so many seconds at most."""
        self._ended.wait(timeout)

    def kill(self) -> None:
        """Does nothing: a queue that is aborted leaves the save to itself."""


def _locked_file() -> tuple[BinaryIO, str]:
    descriptor, path = tempfile.mkstemp(prefix="penstock-save-")
    file = os.fdopen(descriptor, "wb")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError:
        file.close()
        os.unlink(path)
        raise
    return file, path


_marks: dict[str, EndMark] = {}
"""The marks of saves that have not ended, by their files; a fork inherits those of its parent."""


def wait_for_end(path: str) -> None:
    """Waits until a save has ended, successfully or not.

    Args:
        path: The file of its `EndMark`.
    """
    mark = EndMark.of_this_process(path)
    if mark is not None:
        # The process that has the lock would get it at once.
        mark.join()
        return
    try:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return


def wait_here(request: type) -> None:
    """Makes queues wait for our saves in this process, instead of forking one that waits.

    Requests of others, persistent workers, and queues of an unknown shape stay as they are.

    Args:
        request: The class of the queue's requests; the class that forks is beside it.
    """
    caller = getattr(sys.modules[request.__module__], "TemporalAsyncCaller", None)
    schedule = getattr(caller, "schedule_async_call", None)
    if caller is None or schedule is None or hasattr(schedule, _WAITS_HERE):
        return
    code = getattr(inspect.unwrap(schedule), "__code__", None)
    if code is not None and {*code.co_names} >= _SCHEDULES_BY:
        caller.schedule_async_call = _waiting_here(schedule)


def _waiting_here(schedule: Callable[..., None]) -> Callable[..., None]:
    @wraps(schedule)
    def schedule_async_call(self: Any, async_req: Any, *further: Any, **settings: Any) -> None:
        if async_req.async_fn is not wait_for_end:
            schedule(self, async_req, *further, **settings)
            return
        # Without a process, as after the end, the work counts as done.
        self.process = EndMark.of_this_process(*async_req.async_fn_args)
        self.start_time = time.time()

    setattr(schedule_async_call, _WAITS_HERE, True)
    return schedule_async_call
