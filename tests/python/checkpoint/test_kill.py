"""SIGKILL at random moments: the store always loads the acknowledged saves, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import penstock
import victim
from compare import assert_same
from conftest import tell, uring_refusal
from victim import make_state

KILLS = int(os.environ.get("PENSTOCK_TORTURE_KILLS", 12))
SEED = os.environ.get("PENSTOCK_TORTURE_SEED", "4711")


class Victim:
    """A process that saves until it is killed."""

    def __init__(self, command, path, engine, direct):
        self.process = subprocess.Popen(
            [sys.executable, victim.__file__, command, str(path), engine, direct],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.acknowledged = []
        assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            # A truncated line was not acknowledged.
            if line.endswith("\n"):
                self.acknowledged.append(int(line))

    def kill_after(self, seconds, acknowledged=0):
        """Kills the process some seconds after it has acknowledged so many steps."""
        while len(self.acknowledged) < acknowledged and self.process.poll() is None:
            time.sleep(0.001)
        time.sleep(seconds)
        assert self.process.poll() is None, self.process.stderr.read()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()


def engines():
    if uring_refusal() is None:
        return [("uring", "on"), ("threads", "off"), ("uring", "off"), ("threads", "on")]
    return [("threads", "on"), ("threads", "off")]


def is_orphan(file, path):
    known = {entry.name for entry in penstock.inspect(path).files}
    return file.name not in known


@pytest.mark.timeout(300 + 2 * KILLS)
def test_the_newest_acknowledged_step_loads_after_any_kill(disk_path):
    tell("seed", SEED)
    chooser = random.Random(SEED)
    root = disk_path / "store"
    newest, in_the_middle, saves = -1, 0, 0
    for kill in range(KILLS):
        process = Victim("train", root, *engines()[kill % len(engines())])
        process.kill_after(chooser.uniform(0, 0.25), acknowledged=kill % 2)
        newest = max([newest, *process.acknowledged])
        saves += len(process.acknowledged)
        store = penstock.CheckpointStore(root)
        in_the_middle += any(info.state == "incomplete" for info in store.scan())
        if newest < 0:
            continue
        state = store.load()
        assert state["step"] >= newest
        assert_same(state, make_state(state["step"]))
        assert not [info for info in store.scan() if info.state == "damaged"]
        newest = state["step"]
        if kill % 6 == 5:
            store.sweep()
            assert {info.state for info in store.scan()} == {"complete"}
            assert store.load()["step"] == newest
    tell(f"{saves} saves acknowledged, {in_the_middle} of {KILLS} kills in the middle of one")
    assert in_the_middle > 0, "no kill came in the middle of a save: nothing was tested"
    for step in penstock.CheckpointStore(root).steps():
        assert penstock.verify(root / f"step-{step:010}").ok


@pytest.mark.slow
def test_a_checkpoint_that_is_being_replaced_survives_any_of_10_kills(disk_path):
    tell("seed", SEED)
    chooser = random.Random(SEED)
    path = disk_path / "ckpt"
    newest, orphans = -1, 0
    for kill in range(10):
        process = Victim("replace", path, *engines()[kill % len(engines())])
        process.kill_after(chooser.uniform(0.02, 0.25), acknowledged=kill % 2)
        newest = max([newest, *process.acknowledged])
        if newest < 0:
            continue
        state = penstock.load(path)
        assert state["step"] >= newest
        assert_same(state, make_state(state["step"]))
        newest = state["step"]
        orphans += sum(is_orphan(file, path) for file in path.iterdir())
    assert orphans > 0, "no kill came in the middle of a save: nothing was tested"
    # The next save removes the files of dead ones.
    penstock.save(path, make_state(0), overwrite=True)
    assert not [file for file in path.iterdir() if is_orphan(file, path)]


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_store_that_two_processes_save_to_loses_nothing(disk_path, engine):
    """The lease keeps a sweep from deleting the files of a running save."""
    if (engine, "on") not in engines():
        pytest.skip(f"io_uring: {uring_refusal()}")
    root = disk_path / "store"
    process = Victim("train", root, engine, "on")
    store = penstock.CheckpointStore(root)
    try:
        while len(process.acknowledged) < 20 and process.process.poll() is None:
            store.sweep()
    finally:
        process.kill_after(0)
    assert len(process.acknowledged) >= 20
    assert_same(store.load()["weights"][2], make_state(store.latest())["weights"][2])
    assert store.latest() >= max(process.acknowledged)
    assert isinstance(store.load()["tied"], np.ndarray)
