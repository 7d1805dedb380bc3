"""`RunHistory`: records in a store what its saves and starts took.

The lines are for plans of how often to save; `penstock.planning.records.history` reads them. They
are not part of any checkpoint, so that a line that cannot be written is left out without an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from multiprocessing import parent_process, util
from typing import TYPE_CHECKING, Any

from penstock.common.paths import of_bucket
from penstock.planning.records import history

if TYPE_CHECKING:
    from penstock.reports import SaveReport


class RunHistory:
    """The history of one run: a process that saves, and the ranks that save with it.

    A run begins with its first save, so that programs that only load are none. It ends when the
    store is closed or the process exits; a run without an end, or one that an exception ended, has
    failed.

    Args:
        root: The store's directory. A store in a bucket has no history.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._is_kept = not of_bucket(root)
        self._process = os.getpid()
        self._began = time.time()
        self._restored: dict[str, Any] = {}
        self._end: weakref.finalize[..., RunHistory] | None = None

    def restored(self, step: int | None, seconds: float) -> None:
        """Remembers a load, for the start of the run."""
        self._restored = {"step": step, "load_seconds": round(seconds, 6)}

    def saving(self) -> None:
        """Records the start of the run, at its first save on the committing rank."""
        if not self._is_own or self._end is not None or not os.path.isdir(self._root):
            return
        start = {"time": round(self._began, 3), "kind": "start", "run": self._run}
        self._append({**start, **self._restored})
        self._end = weakref.finalize(self, _record_exit, self._root, self._run, self._process)
        if parent_process() is not None:
            # A `multiprocessing.Process` runs its own exit functions, and a forked one no others.
            util.Finalize(None, _record_end_of_child, args=(self._end,), exitpriority=0)

    def saved(self, report: SaveReport, stall_seconds: float, facts: dict[str, Any]) -> None:
        """Records a save that is on stable storage.

        Args:
            report: The report of the committing rank.
            stall_seconds: Time for which the call stopped training.
            facts: Further members of the line; None is left out.
        """
        if not self._is_own:
            return
        # The first save makes the directory.
        self.saving()
        entry = {
            "kind": "save",
            "run": self._run,
            "step": report.step,
            "stall_seconds": round(stall_seconds, 6),
            "seconds": round(max(report.seconds, stall_seconds), 6),
            "bytes": report.total_bytes,
            "ranks": report.world_size,
            "phases": {name: round(value, 6) for name, value in report.phases.items()},
        }
        self._append(entry | {name: one for name, one in facts.items() if one is not None})

    def close(self, error: BaseException | None = None) -> None:
        """Records the end of the run; a later save begins another one.

        Args:
            error: The exception that ends the run; None for a planned end.
        """
        if self._end is not None and self._end.detach() is not None:
            _record_end(self._root, self._run, self._process, error)
        self._end = None
        self._began, self._restored = time.time(), {}

    @property
    def _is_own(self) -> bool:
        """Whether lines are kept, and this process is no fork of the one that saves."""
        return self._is_kept and self._process == os.getpid()

    @property
    def _run(self) -> str:
        """Name of the run: two runs may use a store at the same time."""
        return f"{self._process}-{self._began:.6f}"

    def _append(self, entry: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            history.append(self._root, entry)


def _record_end_of_child(end: weakref.finalize[..., RunHistory]) -> None:
    """Records the end of a run at the end of a `multiprocessing.Process`, if it goes on."""
    pending = end.detach()
    if pending is not None:
        # An exception that ends the process is still on its way.
        root, run, process = pending[2]
        _record_end(root, run, process, sys.exc_info()[1])


def _record_exit(root: str, run: str, process: int) -> None:
    """Records the end of a run that nobody closed, at the exit of its process."""
    # Python keeps the exception that it printed before it exits.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    _record_end(root, run, process, error)


def _record_end(root: str, run: str, process: int, error: BaseException | None) -> None:
    """Records the end of a run, unless this process is a fork of the one that began it."""
    if process != os.getpid():
        return
    entry: dict[str, Any] = {"kind": "end", "run": run}
    if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        entry["error"] = type(error).__name__
    with contextlib.suppress(OSError):
        if os.path.isdir(root):
            history.append(root, entry)
