"""Traces: a timeline of saves and loads, for Perfetto and `penstock trace summary`.

The native module records and writes a trace (`crates/io/src/trace.rs`); this module begins and ends
it, and adds spans of Python code. The rows "stall" and "background" show the calls that their
caller waited for and those in the background, the other rows the work of each thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import warnings
from typing import TYPE_CHECKING, Literal

from penstock import _native
from penstock.common.paths import local
from penstock.errors import PenstockError, PenstockWarning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

FORMAT_VERSION = 1

_LAST = -100
"""Lower than the priorities of other exit work, which may save."""

_running: str | None = None
"""The path of this process's trace."""

_changing = threading.Lock()
"""Held while a trace begins or ends."""


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records Penstock's activity in a ``with`` block, in all threads of the process.

    The file is JSON that https://ui.perfetto.dev and chrome://tracing open, and that ``penstock
    trace summary`` summarizes. The environment variable ``PENSTOCK_TRACE=path`` records a whole
    process; the file is then created with the first recorded event.

    Args:
        path: The file, which is replaced. Among several ranks, each writes a file of its own, with
            ``rank3`` before the suffix. In a directory, each process writes a file.

    Raises:
        PenstockError: Another trace of this process is active.
        StorageError: The file cannot be written. A later write failure ends the trace, and is
            raised at the end of the block, or added as a note to the error that ends it.

    Example:
        >>> import json, numpy as np, penstock, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with penstock.trace(directory + "/trace.json"):
        ...     report = penstock.save(directory + "/step-1", {"w": np.ones(3)})
        >>> events = json.load(open(directory + "/trace.json"))
        >>> {"plan", "digest", "write", "commit"} <= {event["name"] for event in events}
        True
    """
    global _running
    where = _file(path)
    with _changing:
        if _running is not None:
            raise PenstockError(
                f"a trace of this process is being written to {_running}: there can be one at a "
                "time"
            )
        _start(where, is_shared=False)
        _running = where
    try:
        yield
    except BaseException as error:
        try:
            _stop()
        except PenstockError as failure:
            error.add_note(f"and the trace ends early: {failure}")
        raise
    _stop()


def _stop() -> None:
    global _running
    with _changing:
        try:
            _native.trace_stop()
        finally:
            _running = None


class _Span:
    """A timed span of the current thread."""

    __slots__ = ("_began_ns", "_detail", "_name", "_role")

    def __init__(self, name: str, detail: str | None, role: str | None) -> None:
        self._name = name
        self._detail = detail
        self._role = role

    def __enter__(self) -> None:
        self._began_ns = _native.trace_begin()
        if self._role is not None:
            _calls.is_inside = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._role is not None:
            _calls.is_inside = False
        detail = self._detail
        if kind is not None:
            detail = f"{detail or ''} ({kind.__name__})".strip()
        # A trace only observes: an error in it must not fail a save.
        with contextlib.suppress(Exception):
            _native.trace_span(self._name, self._began_ns, detail)
            if self._role is not None:
                _native.trace_overlapping(self._role, self._name, self._began_ns, detail)


class _Nothing:
    """A span that is not recorded."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NOTHING = _Nothing()


class _Calls(threading.local):
    """Whether the thread is already inside a call."""

    is_inside = False


_calls = _Calls()


def span(name: str, detail: str | None = None) -> _Span | _Nothing:
    """Returns a span for a ``with`` block, shown in the row of the calling thread."""
    return _Span(name, detail, None) if _native.trace_is_on() else _NOTHING


def call(
    role: Literal["stall", "background"], name: str, detail: str | None = None
) -> _Span | _Nothing:
    """Returns the span of a whole operation, also shown in the row "stall" or "background".

    An operation inside another one is not shown separately.
    """
    if not _native.trace_is_on() or _calls.is_inside:
        return _NOTHING
    return _Span(name, detail, role)


def past(
    name: str,
    begun: float,
    ended: float,
    detail: str | None = None,
    *,
    role: Literal["stall", "background"] | None = None,
) -> None:
    """Records a span after its end, in the row of the calling thread or in a common row.

    ``begun`` and ``ended`` are of `time.perf_counter`.
    """
    if not _native.trace_is_on():
        return
    now, now_ns = _both_clocks()
    begun_ns, ended_ns = (max(0, now_ns - round((now - at) * 1e9)) for at in (begun, ended))
    # A trace only observes: an error in it must not fail a save.
    with contextlib.suppress(Exception):
        if role is None:
            _native.trace_span(name, begun_ns, detail, ended_ns)
        else:
            _native.trace_overlapping(role, name, begun_ns, detail, ended_ns)


def _both_clocks() -> tuple[float, int]:
    """Returns the time by `time.perf_counter` and in nanoseconds of the trace.

    The thread may lose its core between the two readings, so the closest of three pairs counts.
    """
    pairs = []
    for _ in range(3):
        before = time.perf_counter()
        now_ns = _native.trace_now()
        pairs.append((time.perf_counter() - before, before, now_ns))
    _, now, now_ns = min(pairs)
    return now, now_ns


def _file(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path of this process's trace file."""
    where = os.path.abspath(local(os.fsdecode(path)))
    rank = _rank()
    if os.path.isdir(where):
        own = f"process{os.getpid()}" if rank is None else f"rank{rank}"
        return os.path.join(where, f"penstock-{own}.json")
    if rank is None:
        return where
    root, suffix = os.path.splitext(where)
    return f"{root}.rank{rank}{suffix}"


def _start(path: str, *, is_shared: bool) -> None:
    rank, host, process = _rank(), socket.gethostname(), os.getpid()
    own = f"process {process}" if rank is None else f"rank {rank}, process {process}"
    about = {
        "version": FORMAT_VERSION,
        "host": host,
        "process": process,
        "rank": rank,
        "penstock": _version(),
    }
    _native.trace_start(
        path,
        order=rank or 0,
        name=f"{own} on {host}",
        about=json.dumps(about),
        is_shared=is_shared,
    )


def _version() -> str:
    from importlib.metadata import version

    return version("penstock")


def _rank() -> int | None:
    """Returns the rank of this process among several; None if it is alone."""
    from penstock.common.process import own_rank, placement

    rank = own_rank()
    if rank is not None:
        return rank
    placed = placement()
    return None if placed is None else placed.rank


def start_from_environment() -> None:
    """Begins the trace that ``PENSTOCK_TRACE`` requests, if any.

    Warns:
        PenstockWarning: The trace cannot begin; a training run must not end because of its trace.
    """
    global _running
    path = os.environ.get("PENSTOCK_TRACE", "").strip()
    if not path or _running is not None:
        return
    try:
        where = _file(path)
    except PenstockError as error:
        warnings.warn(f"PENSTOCK_TRACE: {error}", PenstockWarning, stacklevel=2)
        return
    directory = os.path.dirname(where)
    if not os.access(directory, os.W_OK):
        # Reported now rather than at the end of the run.
        warnings.warn(
            f"PENSTOCK_TRACE: {directory} is no directory that can be written to: there will be "
            "no trace",
            PenstockWarning,
            stacklevel=2,
        )
        return
    try:
        _start(where, is_shared=True)
    except PenstockError as error:
        warnings.warn(f"PENSTOCK_TRACE: {error}", PenstockWarning, stacklevel=2)
        return
    _running = where
    from multiprocessing.util import Finalize

    # Unlike `atexit`, this also runs in children of multiprocessing, such as ranks that PyTorch
    # spawned.
    Finalize(None, _stop_at_exit, exitpriority=_LAST)


def _stop_at_exit() -> None:
    try:
        _stop()
    except PenstockError as error:
        warnings.warn(f"PENSTOCK_TRACE: {error}", PenstockWarning, stacklevel=1)


def _forget_in_child() -> None:
    global _running, _changing
    _running, _changing = None, threading.Lock()
    _native.trace_forget()


os.register_at_fork(after_in_child=_forget_in_child)
