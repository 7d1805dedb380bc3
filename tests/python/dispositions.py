"""Signals do by default what they do in a terminal, however the tests were started.

A shell has processes in the background ignore SIGINT, and nohup SIGHUP; whatever these start
inherits it, and tests send signals to what they start.
"""

from __future__ import annotations

import signal

# SIGPIPE and SIGXFSZ are what the interpreter itself ignores, and gives back to its children.
for _number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
    if signal.getsignal(_number) is signal.SIG_IGN:
        # A handler is not inherited. Who protected the tests from SIGHUP still has done so.
        is_interrupt = _number == signal.SIGINT
        signal.signal(_number, signal.default_int_handler if is_interrupt else lambda *_: None)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
