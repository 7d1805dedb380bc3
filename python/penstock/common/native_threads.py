"""Waits at exit for PyTorch's native threads, before the interpreter ends.

The workers of gloo, which connects ranks on CPUs, release a collective's tensors shortly after the
waiting thread continues, and need the GIL for it. If the interpreter has begun to end, CPython
before 3.14 ends a thread that wants the GIL in the middle of C++ code, and the process with it:
"terminate called without an active exception" (pytorch#190489). A thread that comes later finds no
interpreter, and the process ends with SIGSEGV. Destroying the process group does not help if a
mesh, and so any ``DTensor``, still holds it: its workers live on.

`rest_at_exit` therefore registers a wait at exit, while the interpreter is still whole, until these
threads have no work left. Penstock's threads need no wait: each ends before the call that started
it returns, or the interpreter itself waits for it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

_GLOO = "pt_gloo_runloop"
"""Thread name of gloo's workers. PyTorch versions before 2026 give them no name."""

_OURS = "penstock-writer"
"""Thread name of a background save in the native module, inherited by its threads. They never take
the GIL.
"""

_WORKING = frozenset("RDTt")
"""States of a thread with work to do: running or waiting for a processor, waiting for a disk, or
stopped. A worker without work sleeps (`proc_pid_stat(5)`).
"""

_LOOKS = 3
"""Number of consecutive checks that must find all threads asleep."""

_PAUSE_SECONDS = 0.002
"""Pause after each check. The GIL is released meanwhile, so threads that wait for it can run."""

_REST_SECONDS_MAX = 5.0
"""Longest wait: a collective that was never waited for may take longer than an exit should."""

_REST_SECONDS_MAX_UNNAMED = 1.0
"""Longest wait if any thread may be a worker: those of other libraries may never sleep."""


def rest_at_exit() -> None:
    """Registers a wait at exit until the native threads of PyTorch are idle.

    Call it early: functions that are registered later run before the wait.
    """
    atexit.register(_wait_for_rest)


def _wait_for_rest() -> None:
    began = time.monotonic()
    looks = 0
    while looks < _LOOKS:
        states, seconds_max = _native_states()
        if not states or time.monotonic() - began >= seconds_max:
            return
        looks = 0 if _WORKING.intersection(states) else looks + 1
        time.sleep(_PAUSE_SECONDS)


def _native_states() -> tuple[list[str], float]:
    """Returns the states of gloo's workers, or of all unknown native threads if none has the name.

    Returns:
        The states, and the longest wait for such threads, in seconds.
    """
    python = {thread.native_id for thread in threading.enumerate()}
    gloo, native = [], []
    try:
        numbers = os.listdir("/proc/self/task")
    except OSError:
        # Without /proc nothing can be checked, and an exception would be useless at exit.
        numbers = []
    for number in numbers:
        if int(number) in python:
            continue
        try:
            with open(f"/proc/self/task/{number}/stat", errors="replace") as file:
                text = file.read()
        except OSError:
            # The thread has ended.
            continue
        # The name is in parentheses, and may contain some itself.
        name, _, fields = text.partition("(")[2].rpartition(")")
        if name == _OURS:
            continue
        state = fields.split()[0]
        native.append(state)
        if name == _GLOO:
            gloo.append(state)
    return (gloo, _REST_SECONDS_MAX) if gloo else (native, _REST_SECONDS_MAX_UNNAMED)
