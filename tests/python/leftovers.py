"""What a test leaves behind fails it: a process, a thread, a mount; and none of it stays.

The process that runs tests adopts the orphans of those that it started, so that nothing escapes by
losing its parent.
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
"""For how long what is about to end is waited for: what was killed, and not waited for, is."""

_threads: set[threading.Thread] = set()


def pytest_sessionstart() -> None:
    """Takes orphans from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no orphans can be adopted")
    _threads.update(threading.enumerate())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Looks around when the fixtures of a test are gone."""
    result = yield
    if left := [*_processes(), *_started_threads(), *_mounts(item.config)]:
        pytest.fail(f"left behind: {', '.join(left)}", pytrace=False)
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Looks again when all is over, the servers that live as long as the tests too."""
    for server in forks.servers:
        server.end()
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
    if left := _processes():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.get_terminal_writer().line(f"left behind: {', '.join(left)}", red=True)


def _children() -> set[int]:
    """Processes that this one has started or adopted, but those that live as long as the tests."""
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
            # The thread is over, and another one has its children.
            continue
    return found - servers


def _processes() -> list[str]:
    """Ends and names the processes that go on running."""
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
    # Daemons are those of libraries, which nobody can end either.
    left = [one for one in threading.enumerate() if not one.daemon and one not in _threads]
    for one in left:
        one.join(_ENDING_SECONDS_MAX)
    left = [one for one in left if one.is_alive()]
    # Nobody can end a thread: it is told once.
    _threads.update(left)
    return [f"thread {one.name}" for one in left]


def _mounts(config: pytest.Config) -> list[str]:
    """Unmounts and names what is mounted below the directories of the tests."""
    ours = str(config._tmp_path_factory.getbasetemp())
    with open("/proc/self/mountinfo") as file:
        left = [place for line in file if (place := line.split()[4]).startswith(f"{ours}/")]
    for place in reversed(left):
        subprocess.run(["umount", "--lazy", place], check=True)
    return [f"mount {place}" for place in left]
