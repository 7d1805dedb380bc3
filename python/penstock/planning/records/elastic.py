"""Failures from the log of torchrun (torchelastic).

By default torchrun writes only warnings and errors, so that a log begins at the first failure; with
``LOGLEVEL=INFO`` it also says when the run began, and on how many nodes.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.planning.records.counts import Counts

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOGGER = re.compile(
    r"torch[./]distributed[./](?:elastic|launcher|run)"
    # Before PyTorch 1.10.
    r"|^(?:\s*\d{1,7}: )?\[[A-Z]+\] [\d-]+ [\d:,]+ (?:run|api|launch|local_elastic_agent): "
)

_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+")
_GROUP_FAILED = re.compile(r"Worker group (?:WorkerState\.)?FAILED\b")
_CHANGED = re.compile(r"Detected \d+ new nodes from group_rank")
_STOPPED = re.compile(r"Received (?:Signals\.)?\w+ death signal|Got termination signal")
_BEGUN = re.compile(
    r"Starting elastic_operator with launch configs|starting workers for entrypoint"
)
_FINISHED = re.compile(r"worker group successfully finished|ChildFailedError")
_NODES = re.compile(r"(?:^|\s)group_world_size=(\d+)")

_GLOG = re.compile(
    r"(?:\s*\d{1,7}: )?(?:\[[^\]]*\]:?\s*)?[IWEF](\d\d)(\d\d) (\d\d:\d\d:\d\d)\.\d+ "
)
"""The prefix since PyTorch 2.3, which has no year, after the number of the task of ``srun -l``."""

_DATED = re.compile(r".{0,40}?\b(\d{4})-(\d\d)-(\d\d)[ T](\d\d:\d\d:\d\d)")
"""A time in the prefix of earlier versions, or in a prefix that the user chose."""

_SAME_SECONDS = 120.0
"""Lines of failures closer than this are one failure: each agent writes its own."""

_GAP_SECONDS = 7 * 86_400.0
"""A longer time without a line is a gap: it is not counted as running time."""

_STOPS = {-15: "SIGTERM", -2: "SIGINT"}
"""Exit codes of workers that somebody stopped."""

_SIGNALS = {-9: "SIGKILL", -11: "SIGSEGV", -6: "SIGABRT", -7: "SIGBUS"}


def is_of_torchrun(line: str) -> bool:
    """Whether a line was written by torchrun."""
    return _LOGGER.search(line) is not None and (
        any(one.search(line) for one in (_FAILED, _GROUP_FAILED, _CHANGED, _STOPPED, _BEGUN))
        or _FINISHED.search(line) is not None
    )


def is_error_file(line: str) -> bool:
    """Whether a file that begins so is one of ``TORCHELASTIC_ERROR_FILE``."""
    return line.startswith('{"message":') and '"extraInfo"' in line


def read(lines: Iterable[str], path: str, nodes: int | None) -> Counts:
    """Counts the failures and the node-hours of a log, of one run after another.

    Args:
        lines: The lines of the file.
        path: Its name, for errors.
        nodes: Number of nodes; None for that which the log names.

    Raises:
        ValueError: The number of nodes is not known, or no line has a time.
    """
    reader = _Reader()
    for line in lines:
        reader.read(line)
    counts = reader.counts
    counts.nodes = nodes or counts.nodes
    if not counts.nodes:
        raise ValueError(f"{path}: the log does not name the number of nodes: give --nodes")
    if not reader.has_times:
        raise ValueError(f"{path}: no line has a time, so the running time is unknown")
    if reader.seconds <= 0:
        raise ValueError(
            f"{path}: the log shows no running time: start torchrun with LOGLEVEL=INFO, which also "
            "logs when it begins"
        )
    counts.node_seconds = reader.seconds * counts.nodes
    return counts


class _Reader:
    """Follows a log from line to line."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.seconds = 0.0
        self.has_times = False
        self._year = 2000
        # The latest time of the run, and that of its last line.
        self._last: datetime | None = None
        self._now: datetime | None = None
        self._failed: datetime | None = None
        self._is_over = False

    def read(self, line: str) -> None:
        """Takes one line."""
        # Other programs may write other clocks into the same log.
        at = self._time(line) if _LOGGER.search(line) else None
        if at is not None:
            if _BEGUN.search(line):
                # No run went on before.
                self._last, self._is_over = None, False
            self._pass(at)
        nodes = _NODES.search(line)
        if nodes is not None:
            self.counts.nodes = int(nodes[1])
        failed = _FAILED.search(line)
        if failed is not None:
            self._fail(int(failed[1]))
        elif _GROUP_FAILED.search(line):
            self._fail(None)
        elif _CHANGED.search(line):
            self.counts.others["change of nodes"] += 1
        elif _STOPPED.search(line):
            self._stop("SIGTERM")
            self._is_over = True
        elif _FINISHED.search(line):
            self._is_over = True

    def _time(self, line: str) -> datetime | None:
        found = _GLOG.match(line)
        try:
            if found is not None:
                month, day, clock = found.groups()
                return datetime.fromisoformat(f"{self._year:04}-{month}-{day} {clock}")
            found = _DATED.match(line)
            if found is None:
                return None
            year, month, day, clock = found.groups()
            self._year = int(year)
            return datetime.fromisoformat(f"{year}-{month}-{day} {clock}")
        except ValueError:
            self.counts.left_out["without a valid time"] += 1
            return None

    def _pass(self, at: datetime) -> None:
        """Counts the time since the last line, unless the run was over or the clock jumped."""
        last, before, self.has_times = self._last, self._now or at, True
        self._last = self._now = at
        if last is None:
            return
        seconds = (at - last).total_seconds()
        if seconds < -300 * 86_400.0:
            # The prefix has no year, and a new one has begun.
            self._year += 1
            self._last = self._now = at = at.replace(year=self._year)
            seconds = (at - last).total_seconds()
        elif -_GAP_SECONDS <= seconds < 0:
            # Time is not counted again.
            self._last = last
        if self._is_over:
            # Lines of the same end are no new run.
            self._is_over = abs(seconds) <= _SAME_SECONDS
        elif 0 <= seconds <= _GAP_SECONDS:
            self.seconds += seconds
        elif seconds > 0:
            self.counts.left_out["after a gap of more than 7 days"] += 1
        elif (at - before).total_seconds() < -1:
            self.counts.left_out["before which the clock went back"] += 1

    def _fail(self, exit_code: int | None) -> None:
        if exit_code in _STOPS:
            self._stop(_STOPS[exit_code])
            return
        if self._is_new():
            code = f"exit code {exit_code}" if exit_code is not None else "failed worker group"
            self.counts.failures[_SIGNALS.get(exit_code or 0, code)] += 1
        self._failed = self._now

    def _stop(self, name: str) -> None:
        if self._is_new():
            self.counts.others[name] += 1
        self._failed = self._now

    def _is_new(self) -> bool:
        """Whether a line is of another failure than the one before it."""
        if self._failed is None or self._now is None:
            return True
        return abs((self._now - self._failed).total_seconds()) > _SAME_SECONDS
