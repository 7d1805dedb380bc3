"""Counts of this process's open files and threads."""

import os
import time


def count_files_and_threads():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled():
    """Returns the counts once threads of earlier tests have ended."""
    least = count_files_and_threads()
    for _ in range(20):
        time.sleep(0.01)
        least = min(least, count_files_and_threads(), key=lambda count: count[1])
    return least


def assert_settles_at(expected):
    """Waits for the expected counts: a joined thread may still be listed for a moment."""
    deadline = time.monotonic() + 5
    while count_files_and_threads() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count_files_and_threads() == expected
