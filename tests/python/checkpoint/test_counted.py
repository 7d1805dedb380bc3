"""The number of files that store operations open, as counted by the kernel."""

from __future__ import annotations

import ctypes
import fcntl
import fnmatch
import functools
import os
import struct
import threading
import warnings

import numpy as np
import pytest

import penstock
from penstock.errors import PenstockWarning

IN_OPEN = 0x20
EVENT = struct.Struct("iIII")


class Opened:
    """Counts how often files of some steps are opened, by any process."""

    def __init__(self, store, steps):
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            pytest.skip("there are no more inotify instances")
        for step in steps:
            path = os.fsencode(store.path(step))
            assert libc.inotify_add_watch(self.descriptor, path, IN_OPEN) >= 0

    def count(self, call, files="part-*.json"):
        """Returns the number of parts, or other files, that a call opens."""
        self._drain()
        call()
        return len(fnmatch.filter(map(os.fsdecode, self._drain()), files))

    def _drain(self):
        names = []
        while True:
            try:
                events = os.read(self.descriptor, 1 << 20)
            except BlockingIOError:
                return names
            while events:
                *_, length = EVENT.unpack_from(events)
                names.append(events[EVENT.size : EVENT.size + length].rstrip(b"\0"))
                events = events[EVENT.size + length :]

    def close(self):
        os.close(self.descriptor)


@pytest.fixture(params=[12, 24])
def counted(tmp_path, request):
    """Yields a store that keeps all its steps, the counter, and the last step."""
    last = request.param
    store = penstock.CheckpointStore(tmp_path, keep_last=last)
    for step in range(1, last + 1):
        store.save(step, {"step": step, "w": np.zeros(9)})
    # The directory exists, so that the next save is counted from its beginning.
    os.mkdir(store.path(last + 1))
    opened = Opened(store, range(1, last + 2))
    yield store, opened, last
    opened.close()


def test_the_counter_counts(counted):
    store, opened, last = counted
    assert opened.count(store.scan) == last


def test_the_newest_is_found_from_the_top(counted):
    store, opened, last = counted
    assert opened.count(store.steps) == 0
    assert opened.count(store.latest) == 1
    assert opened.count(store.load) <= 2
    assert opened.count(lambda: store.load(fallback=True)) <= 2
    assert opened.count(lambda: store.load(last - 1)) == 1


def test_a_damaged_newest_costs_no_more_than_itself(counted):
    store, opened, last = counted
    os.unlink(os.path.join(store.path(last), "manifest.json"))
    (name,) = (n for n in os.listdir(store.path(last - 1)) if n.startswith("shard"))
    os.truncate(os.path.join(store.path(last - 1), name), 1)
    with warnings.catch_warnings(action="ignore"):
        assert opened.count(store.latest) == 2
        assert opened.count(store.load) <= 3
        assert opened.count(lambda: store.load(fallback=True)) <= 6
    assert store.latest() == last - 2


def test_retention_after_a_save_looks_at_what_it_hangs_on(counted):
    store, opened, last = counted
    store.verify(last // 2)
    # The saved step, the deleted one, and the last verified one; some twice.
    assert opened.count(lambda: store.save(last + 1, {"step": last + 1})) <= 6
    assert store.steps() == list(range(2, last + 2))


def test_what_is_marked_is_not_opened_to_read_the_marks(counted):
    store, opened, last = counted
    for step in range(1, last + 1):
        store.verify(step)
    # Each step's identity is read, and the displayed step is checked.
    assert opened.count(store.marks, "manifest.json") == last
    assert opened.count(store.latest, "manifest.json") <= 2
    # Each step is looked up once, and once before each change.
    store = penstock.CheckpointStore(store.root, keep_last=last - 1)
    save = functools.partial(store.save, last + 1, {"step": last + 1})
    assert opened.count(save, "manifest.json") <= 2 * last + 12


def test_a_save_that_waits_for_a_reader_looks_once(counted):
    store, opened, last = counted
    for step in range(1, last):
        store.verify(step)
    (name,) = (n for n in os.listdir(store.path(last)) if n.startswith("shard"))
    os.truncate(os.path.join(store.path(last), name), 1)
    directory = os.open(store.path(last), os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_SH)
    # A waiting save checks for the reader every 10 ms.
    release = threading.Timer(0.2, os.close, [directory])

    def save():
        release.start()
        with pytest.warns(PenstockWarning, match="makes way"):
            store.save(last, {"step": -1})

    # Once while it waits, once alone; and the new step, which retention considers.
    assert opened.count(save) <= 6
    release.join()
    assert store.load()["step"] == -1
