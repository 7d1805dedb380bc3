"""Native threads of PyTorch, which have to rest before the interpreter ends.

The workers of gloo, through which ranks talk on CPUs, let go of a collective's tensors a little
after whoever waited for it goes on, and need the GIL for that. CPython before 3.14 ends a thread
that wants the GIL when the interpreter has begun to end, in the middle of C++, and the process
with it: "terminate called without an active exception" (pytorch#190489). One that comes later still
finds the interpreter gone, and the process ends with SIGSEGV. That a script destroys its group
does not help where a mesh, and so any ``DTensor``, still holds it: its workers live on.

At exit, while the interpreter is still whole, `rest_at_exit` therefore has them waited for until
they have nothing left to do. Threads of Penstock need no such thing: each has ended when the call
that started it returns, or is one that the interpreter itself waits for.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

_GLOO = "pt_gloo_runloop"
"""What PyTorch calls the workers. Those of versions before 2026 have no name of their own."""

_OURS = "penstock-writer"
"""What the native module calls the thread of a save in the background, and so those that it starts.
None of them ever wants the GIL."""

_WORKING = frozenset("RDTt")
"""States of a thread that has something to do: it runs or waits for a processor, waits for a disk,
or is stopped. A worker without work sleeps (`proc_pid_stat(5)`)."""

_LOOKS = 3
"""So many looks in a row have to find them resting."""

_PAUSE_SECONDS = 0.002
"""After each look. This thread does not hold the GIL meanwhile: whoever waits for it goes on."""

_REST_SECONDS_MAX = 5.0
"""A collective that nobody has waited for may take longer than an exit should."""

_REST_SECONDS_MAX_UNNAMED = 1.0
"""The same where any thread may be a worker: one of another library need not rest ever."""


def rest_at_exit() -> None:
    """Has the end of this process wait until these threads rest.

    What is registered first is done last: the sooner this is called, the better.
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
    """The state of each worker of gloo; where none has the name, of all but Python's and ours.

    Returns:
        The states, and for how long to wait for such threads.
    """
    python = {thread.native_id for thread in threading.enumerate()}
    gloo, native = [], []
    try:
        numbers = os.listdir("/proc/self/task")
    except OSError:
        # Without /proc there is nothing to look at, and no use in raising at this time.
        numbers = []
    for number in numbers:
        if int(number) in python:
            continue
        try:
            with open(f"/proc/self/task/{number}/stat", errors="replace") as file:
                text = file.read()
        except OSError:
            # It has ended.
            continue
        # The name stands in parentheses, and may have some itself.
        name, _, fields = text.partition("(")[2].rpartition(")")
        if name == _OURS:
            continue
        state = fields.split()[0]
        native.append(state)
        if name == _GLOO:
            gloo.append(state)
    return (gloo, _REST_SECONDS_MAX) if gloo else (native, _REST_SECONDS_MAX_UNNAMED)
