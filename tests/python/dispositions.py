"""Signals have their default actions of a terminal, however the tests were started.

A shell makes background processes ignore SIGINT, and nohup SIGHUP. Their children inherit that, and
tests send signals to their children.
"""

from __future__ import annotations

import signal

# The interpreter itself ignores SIGPIPE and SIGXFSZ, and restores them in its children.
for _number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
    if signal.getsignal(_number) is signal.SIG_IGN:
        # Handlers are not inherited, so tests that nohup protects from SIGHUP stay protected.
        is_interrupt = _number == signal.SIGINT
        signal.signal(_number, signal.default_int_handler if is_interrupt else lambda *_: None)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
