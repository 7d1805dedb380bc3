"""Fails a test that leaves a process, a thread or a mount behind, and ends what it left.

The process that runs tests adopts the orphans of its children, so that no process escapes by losing
its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import forks

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER = 36
_ENDING_SECONDS_MAX = 30
"""How long a test waits for ending processes and threads, such as killed, unreaped children."""

lasting: set[int] = set()
"""Processes that a fixture of the session keeps, and ends with it."""

_threads: set[threading.Thread] = set()


def pytest_sessionstart() -> None:
    """Adopts orphans from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no orphans can be adopted")
    _threads.update(threading.enumerate())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Checks for leftovers after the fixtures of a test are gone."""
    result = yield
    if left := [*_processes(), *_started_threads(), *_mounts(item.config)]:
        pytest.fail(f"left behind: {', '.join(left)}", pytrace=False)
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Checks again at the end of all tests, including the servers that serve all of them."""
    for server in forks.servers:
        server.end()
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
    if left := _processes():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.get_terminal_writer().line(f"left behind: {', '.join(left)}", red=True)


def _children() -> set[int]:
    """Returns the processes that this one has started or adopted, except the servers."""
    servers = {
        forkserver._forkserver._forkserver_pid,
        resource_tracker._resource_tracker._pid,
        *(server.pid for server in forks.servers),
    }
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except FileNotFoundError:
            # The thread has ended, and another one has its children.
            continue
    return found - servers - lasting


def _processes() -> list[str]:
    """Ends and names the processes that still run."""
    deadline = time.monotonic() + _ENDING_SECONDS_MAX
    while running := [pid for pid in _children() if not _is_over(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    names = []
    for pid in running:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        names.append(f"process {pid} ({command.strip()[:200]})")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return names


def _is_over(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _started_threads() -> list[str]:
    # Daemon threads belong to libraries, and cannot be ended.
    left = [one for one in threading.enumerate() if not one.daemon and one not in _threads]
    for one in left:
        one.join(_ENDING_SECONDS_MAX)
    left = [one for one in left if one.is_alive()]
    # A thread cannot be ended: it is reported once.
    _threads.update(left)
    return [f"thread {one.name}" for one in left]


def _mounts(config: pytest.Config) -> list[str]:
    """Unmounts and names the mounts below the directories of the tests."""
    ours = str(config._tmp_path_factory.getbasetemp())
    with open("/proc/self/mountinfo") as file:
        left = [place for line in file if (place := line.split()[4]).startswith(f"{ours}/")]
    for place in reversed(left):
        subprocess.run(["umount", "--lazy", place], check=True)
    return [f"mount {place}" for place in left]
