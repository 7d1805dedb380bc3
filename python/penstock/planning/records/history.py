"""The history of a store: one line for each save, start and end of a run.

Reports are lost with their process, and a plan needs the durations of many saves. A store in a
directory keeps them in ``history.jsonl``, one JSON object per line. The file is not part of any
checkpoint: a line may be missing or torn after a crash, and a reader skips it. docs/format.md
lists the members.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.planning.models.quantity import Quantity, measured

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAME = "history.jsonl"

BYTES_MAX = 4 << 20
"""Size at which the older half of the lines is dropped, some 10,000 saves."""

LINE_BYTES_MAX = 64 << 10
"""Longest line that a reader takes."""

_RECENT = 20
"""Newest saves whose durations count."""

_RECENT_FAILURES = 10
"""Newest failures that say how often a run fails now: they give its rate to a third, which costs
2 % of the lost time on average, and a rate that has changed is followed soon.
"""

_TIME_MIN = 1_577_836_800
"""The begin of 2020, in seconds since 1970."""

_RUN_SECONDS_MAX = 366 * 86_400
"""Longest run; a longer one has a clock that made a jump."""


def append(root: str, entry: dict[str, Any]) -> None:
    """Appends a line to the history of a store.

    A line is one write, so lines of two processes do not mix. Nothing is synced: the history is not
    worth a wait, and a torn line harms no other.

    Args:
        root: The store's directory.
        entry: Members of the line; ``time`` is added if it is not among them.

    Raises:
        OSError: The file cannot be written.
    """
    line = json.dumps({"time": round(time.time(), 3), **entry}, separators=(",", ":")) + "\n"
    path = os.path.join(root, NAME)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        # After a torn line, a new one begins with a line feed, so that only the torn one is lost.
        torn = size > 0 and not _ends_whole(path)
        os.write(descriptor, (b"\n" if torn else b"") + line.encode())
    finally:
        os.close(descriptor)
    if size + len(line) > BYTES_MAX:
        _halve(path)


def _ends_whole(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _halve(path: str) -> None:
    """Drops the older half of the lines, but for the last start among them."""
    with open(path, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    dropped, kept = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    starts = [line for line in dropped if b'"kind":"start"' in line]
    beside = f"{path}.tmp"
    try:
        with open(beside, "wb") as file:
            file.writelines([*starts[-1:], *kept])
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def entries(root: str) -> Iterator[dict[str, Any]]:
    """The whole lines of a store's history, oldest first; none if it has no history.

    Raises:
        OSError: The file cannot be read.
    """
    path = os.path.join(root, NAME)
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(LINE_BYTES_MAX), b""):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
                yield entry


@dataclass
class Summary:
    """Facts of a history that a plan needs.

    Attributes:
        stall: Seconds for which a save stopped training; None without saves.
        durable: Seconds from the call until the checkpoint was on stable storage.
        step: Seconds of a training step outside of saves, or else from save to save; None if
            unknown.
        slowdown: Share of its speed that training lost beside a save; None if unknown.
        restart: Seconds of a start: those of the load; None without a load.
        save_bytes: Bytes of a checkpoint, of all ranks; None if unknown.
        starts: Starts of runs.
        ranks: Ranks of the newest save; 0 without saves.
        failures: Starts that did not follow a planned end.
        exposure_seconds: Time in which a run was seen to go on.
        recent_failures: The newest of the failures, `_RECENT_FAILURES` at most.
        recent_exposure_seconds: Time in which runs were seen since the failure before them.
    """

    stall: Quantity | None = None
    durable: Quantity | None = None
    step: Quantity | None = None
    slowdown: Quantity | None = None
    restart: Quantity | None = None
    save_bytes: Quantity | None = None
    starts: int = 0
    ranks: int = 0
    failures: int = 0
    exposure_seconds: float = 0.0
    recent_failures: int = 0
    recent_exposure_seconds: float = 0.0


@dataclass
class _Run:
    """One run of a history, in seconds since 1970."""

    began: float | None
    last: float | None = None
    has_ended: bool = False
    saved: tuple[float, float] | None = None
    """Time and step of the last save."""

    @property
    def seconds(self) -> float:
        """Time in which the run was seen; 0 if its clock made a jump."""
        if self.began is None or self.last is None:
            return 0.0
        seconds = self.last - self.began
        return seconds if 0 <= seconds <= _RUN_SECONDS_MAX else 0.0

    def step_seconds(self, at: float | None, step: float | None, stall: float) -> float | None:
        """Time of a step since the last save, without the stall; None if it is not known."""
        before = self.saved
        self.saved = None if at is None or step is None else (at, step)
        if before is None or self.saved is None:
            return None
        seconds, steps = self.saved[0] - before[0] - stall, self.saved[1] - before[1]
        return seconds / steps if seconds > 0 and steps > 0 else None

    def has_failed(self, begins: Sequence[float]) -> bool:
        """Whether the run did not end as planned: another one began after its last line.

        Args:
            begins: When runs began, this one among them, ascending.
        """
        last = self.last
        if self.has_ended or last is None:
            return False
        # Times of lines are rounded, and may be equal.
        later = len(begins) - bisect_left(begins, last)
        is_own_later = self.began is not None and self.began >= last
        return later > is_own_later


class _Samples(dict[str, list[float]]):
    """Measured numbers by name, oldest first."""

    def add(self, name: str, value: object) -> None:
        number = _number(value)
        if number is not None:
            self.setdefault(name, []).append(number)

    def recent(self, name: str, unit: str, source: str) -> Quantity | None:
        newest = self.get(name, [])[-_RECENT:]
        return measured(newest, unit, source) if newest else None


def summarize(root: str, *, began: float | None = None) -> Summary:
    """Reads a store's history.

    Skips members of another type, times that are no times, and unknown kinds.

    Args:
        root: The store's directory.
        began: When a run began that has no line yet, in seconds since 1970; None without one. The
            run before it has failed if it did not end.

    Raises:
        OSError: The file cannot be read.
    """
    samples, summary, source = _Samples(), Summary(), os.path.join(root, NAME)
    runs: dict[str, _Run] = {}
    for entry in entries(root):
        at, kind, name = _time(entry.get("time")), entry["kind"], str(entry.get("run"))
        if kind == "start":
            runs[name] = _Run(at)
            samples.add("restart", entry.get("load_seconds"))
        elif kind == "save":
            for member in ("stall_seconds", "seconds", "step_seconds", "bytes"):
                samples.add(member, entry.get(member))
            ranks = entry.get("ranks")
            summary.ranks = ranks if type(ranks) is int and 0 < ranks < 1e9 else summary.ranks
            if name in runs:
                step, stall = _number(entry.get("step")), _number(entry.get("stall_seconds"))
                samples.add("between", runs[name].step_seconds(at, step, stall or 0.0))
            before = _number(entry.get("step_seconds"))
            during = _number(entry.get("step_seconds_during"))
            if before and during:
                samples.add("slowdown", max(0.0, 1 - before / during))
        if name in runs and at is not None:
            runs[name].last = at
        if name in runs and kind == "end":
            runs[name].has_ended = not entry.get("error")
    summary.starts = len(runs)
    begins = [run.began for run in runs.values() if run.began is not None]
    begins = sorted(begins if began is None else [*begins, began])
    for run in reversed(runs.values()):
        has_failed = run.has_failed(begins)
        if summary.failures + has_failed <= _RECENT_FAILURES:
            summary.recent_failures += has_failed
            summary.recent_exposure_seconds += run.seconds
        summary.failures += has_failed
        summary.exposure_seconds += run.seconds
    summary.stall = samples.recent("stall_seconds", "s", source)
    summary.durable = samples.recent("seconds", "s", source)
    between = f"{source}, from save to save"
    summary.step = samples.recent("step_seconds", "s", source)
    summary.step = summary.step or samples.recent("between", "s", between)
    summary.slowdown = samples.recent("slowdown", "", source)
    summary.restart = samples.recent("restart", "s", source)
    summary.save_bytes = samples.recent("bytes", "bytes", source)
    return summary


def _number(value: object) -> float | None:
    """A duration, a size, a step or a time; None for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    # No clock measures less than a nanosecond, and quotients of less would overflow.
    return float(value) if value == 0 or 1e-9 <= value < 1e18 else None


def _time(value: object) -> float | None:
    """A time since 2020; None for anything else, as from a clock that is not set."""
    found = _number(value)
    return found if found is not None and found >= _TIME_MIN else None
