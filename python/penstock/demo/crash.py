"""Kills a training process during a save, and proves that the save had not committed.

A kill at a chosen time may come before the save or after it. The process is therefore stopped
(SIGSTOP) as soon as a shard of a new attempt exists; a stopped process cannot commit. If the
directory has no manifest (the commit point) by then, the process is killed (SIGKILL) without
running again, so the manifest stays missing. If there is a manifest, the process continues, and the
next save is tried.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import _native
from penstock.common.file_names import rank_of, step_of

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

POLL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Kill:
    """A SIGKILL that hit a save between its first byte and its commit."""

    step: int
    directory: Path
    files: list[tuple[str, int]]
    """Name and bytes of each file in the directory when the process was killed."""


class SaveKiller(threading.Thread):
    """Watches a store, and kills the saving process in its first save from a step on.

    Args:
        process: The training process.
        root: The store's directory; it need not exist yet.
        step_min: Saves of earlier steps are not killed.
    """

    def __init__(self, process: subprocess.Popen[str], root: Path, step_min: int) -> None:
        super().__init__(daemon=True)
        self.kill: Kill | None = None
        self._process = process
        self._root = root
        self._step_min = step_min
        self._ended = threading.Event()

    def run(self) -> None:
        """Polls until a save was killed or `end` is called."""
        while self.kill is None and not self._ended.wait(POLL_SECONDS):
            saving = self._saving()
            if saving is not None:
                self.kill = self._stop_look_kill(*saving)

    def end(self) -> Kill | None:
        """Stops watching; returns the kill, if there was one."""
        self._ended.set()
        self.join()
        return self.kill

    def _saving(self) -> tuple[int, Path] | None:
        """Step and directory of a save that has written a shard and not committed."""
        try:
            directories = list(self._root.iterdir())
        except FileNotFoundError:
            return None
        for directory in directories:
            step = step_of(directory.name)
            if step is not None and step >= self._step_min:
                names = [name for name, _ in _listing(directory)]
                if _has_begun(names) and _native.MANIFEST not in names:
                    return step, directory
        return None

    def _stop_look_kill(self, step: int, directory: Path) -> Kill | None:
        self._process.send_signal(signal.SIGSTOP)
        try:
            # Returns once every thread has stopped; WNOWAIT leaves the exit status to `Popen`.
            found = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return None
        if found is None or found.si_code != os.CLD_STOPPED:
            return None
        files = _listing(directory)
        if _native.MANIFEST in (name for name, _ in files):
            self._process.send_signal(signal.SIGCONT)
            return None
        self._process.send_signal(signal.SIGKILL)
        return Kill(step, directory, files)


def _has_begun(names: list[str]) -> bool:
    return any(rank_of(name) is not None for name in names)


def _listing(directory: Path) -> list[tuple[str, int]]:
    """Name and bytes of each file, except files that vanish meanwhile."""
    files = []
    for path in sorted(directory.iterdir()):
        try:
            files.append((path.name, path.stat().st_size))
        except FileNotFoundError:
            continue
    return files
