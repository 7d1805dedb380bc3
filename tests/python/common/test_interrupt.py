"""Long calls can be interrupted, let other threads run, and report progress."""

from __future__ import annotations

import os

import numpy as np
import pytest

import penstock
from compare import assert_same
from conftest import run_child
from opened import assert_settles_at, settled
from penstock.errors import CheckpointExistsError
from threads import on_threads
from ticker import Ticker

MIB = 1 << 20

# Small requests, one at a time: slow enough to be interrupted on any disk.
SLOW = """
    import json, os, signal, sys, threading, time
    import numpy as np, penstock

    signal.signal(signal.SIGINT, signal.default_int_handler)
    path, engine = sys.argv[1:]
    options = penstock.Options(
        engine=engine, direct="auto", queue_depth=1, io_threads=1, extent_bytes=1 << 20
    )
    state = {f"w{i}": np.full(8 << 20, i, np.uint8) for i in range(128)}
    sent = None

    def interrupt(done, total):
        global sent
        if sent is None and 0 < done < total // 2:
            sent = (time.monotonic(), done, total)
            os.kill(os.getpid(), signal.SIGINT)

    def tree(root):
        return sorted(
            os.path.relpath(os.path.join(place, name), root)
            for place, _, names in os.walk(root) for name in names
        )
"""

INTERRUPTED_SAVE = (
    SLOW
    + """
    try:
        penstock.save(path, state, options=options, progress=interrupt)
        outcome = "saved"
    except KeyboardInterrupt:
        outcome = "interrupted"
    waited = time.monotonic() - sent[0] if sent else None
    left = tree(path), os.path.exists(path)
    penstock.save(path, {"x": 1}, options=options)
    print(json.dumps([outcome, waited, left, penstock.load(path)]))
"""
)

INTERRUPTED_OVERWRITE = (
    SLOW
    + """
    penstock.save(path, {"old": 1})
    before = tree(path)
    try:
        penstock.save(path, state, overwrite=True, options=options, progress=interrupt)
        outcome = "saved"
    except KeyboardInterrupt:
        outcome = "interrupted"
    print(json.dumps([outcome, tree(path) == before, penstock.load(path)]))
"""
)

INTERRUPTED_LOAD = (
    SLOW
    + """
    penstock.save(path, state)
    outcomes = []
    for call in (penstock.load, penstock.verify):
        sent = None
        try:
            call(path, options=options, progress=interrupt)
            outcomes.append("finished")
        except KeyboardInterrupt:
            outcomes.append("interrupted")
        outcomes.append(time.monotonic() - sent[0] if sent else None)
    loaded = penstock.load(path, keys="w7", options=options)
    print(json.dumps([outcomes, bool((loaded["w7"] == 7).all())]))
"""
)

PROMPTLY_SECONDS = 5.0
"""Generous: a person may wait this long, on a busy machine."""


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_ctrl_c_stops_a_save_and_leaves_nothing(disk_path, engine):
    outcome, waited, left, loaded = run_child(INTERRUPTED_SAVE, disk_path / "ckpt", engine)
    assert outcome == "interrupted"
    assert waited < PROMPTLY_SECONDS
    assert left == [[], False]
    assert loaded == {"x": 1}


def test_ctrl_c_leaves_the_checkpoint_that_was_to_be_replaced(disk_path):
    outcome, is_as_before, loaded = run_child(INTERRUPTED_OVERWRITE, disk_path / "ckpt", "auto")
    assert outcome == "interrupted"
    assert is_as_before
    assert loaded == {"old": 1}


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_ctrl_c_stops_a_load_and_a_verification(disk_path, engine):
    outcomes, is_right = run_child(INTERRUPTED_LOAD, disk_path / "ckpt", engine)
    assert outcomes[::2] == ["interrupted", "interrupted"]
    assert max(outcomes[1::2]) < PROMPTLY_SECONDS
    assert is_right


def test_ctrl_c_without_a_callback_stops_a_save(disk_path):
    script = (
        SLOW
        + """
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        for _ in range(50):
            penstock.save(path, state, options=options, overwrite=True)
        outcome = "saved"
    except KeyboardInterrupt:
        outcome = "interrupted"
    names = tree(path)
    complete = "manifest.json" in names
    print(json.dumps([outcome, len(names) == (3 if complete else 0)]))
    """
    )
    assert run_child(script, disk_path / "ckpt", "auto") == ["interrupted", True]


def test_a_signal_handler_that_raises_stops_a_save_with_its_exception(disk_path):
    script = (
        SLOW
        + """
    class Stop(Exception):
        pass

    def handler(number, frame):
        raise Stop

    signal.signal(signal.SIGUSR1, handler)

    def signal_once(done, total):
        global sent
        if sent is None and done:
            sent = True
            os.kill(os.getpid(), signal.SIGUSR1)

    try:
        penstock.save(path, state, options=options, progress=signal_once)
        outcome = "saved"
    except Stop:
        outcome = "stopped"
    print(json.dumps([outcome, os.path.exists(path)]))
    """
    )
    assert run_child(script, disk_path / "ckpt", "auto") == ["stopped", False]


def test_a_signal_handler_that_returns_stops_nothing(disk_path):
    script = (
        SLOW
        + """
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))

    def signal_often(done, total):
        os.kill(os.getpid(), signal.SIGUSR1)

    penstock.save(path, state, progress=signal_often)
    print(json.dumps([len(seen) > 0, penstock.verify(path).ok]))
    """
    )
    assert run_child(script, disk_path / "ckpt", "auto") == [True, True]


def test_other_threads_run_during_a_save_and_a_load(disk_path):
    state = [np.full(8 * MIB, i, np.uint8) for i in range(64)]
    options = penstock.Options(queue_depth=1, io_threads=1, extent_bytes=MIB)
    with Ticker() as saving:
        penstock.save(disk_path / "ckpt", state, options=options)
    with Ticker() as verifying:
        penstock.verify(disk_path / "ckpt", options=options)
    with Ticker() as loading:
        penstock.load(disk_path / "ckpt", options=options)
    assert min(saving.ticks, verifying.ticks, loading.ticks) >= 3


def test_threads_save_and_load_at_the_same_time(disk_path, options):
    def work(number):
        state = {"w": np.full(3 * MIB, number, np.uint8), "number": number}
        for round_ in range(4):
            path = disk_path / f"ckpt-{number}-{round_}"
            penstock.save(path, state, options=options)
            assert_same(penstock.load(path, options=options), state)

    on_threads(work, range(6))


def test_one_of_many_saves_to_one_path_wins(disk_path):
    wins, losses = [], []

    def work(number):
        try:
            penstock.save(disk_path / "ckpt", {"w": np.full(MIB, number, np.uint8)})
            wins.append(number)
        except CheckpointExistsError:
            losses.append(number)

    on_threads(work, range(6))
    assert len(wins) == 1
    assert len(losses) == 5
    assert_same(penstock.load(disk_path / "ckpt"), {"w": np.full(MIB, wins[0], np.uint8)})


# Progress.


def big(count=48):
    return [np.full(4 * MIB, i, np.uint8) for i in range(count)]


SLOWLY = penstock.Options(queue_depth=1, io_threads=1, extent_bytes=MIB)


@pytest.mark.parametrize("call", ["save", "load", "verify"])
def test_progress_rises_to_the_whole(disk_path, call):
    seen = []

    def progress(done, total):
        seen.append((done, total))

    path = disk_path / "ckpt"
    if call == "save":
        penstock.save(path, big(), options=SLOWLY, progress=progress)
    else:
        penstock.save(path, big())
        getattr(penstock, call)(path, options=SLOWLY, progress=progress)
    done = [pair[0] for pair in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] >= 48 * 4 * MIB
    assert len({total for _, total in seen if total}) == 1


class RefusalError(Exception):
    pass


def refuse(done, total):
    if done:
        raise RefusalError


def test_a_callback_that_raises_stops_a_save_and_leaves_nothing(disk_path):
    with pytest.raises(RefusalError):
        penstock.save(disk_path / "ckpt", big(), options=SLOWLY, progress=refuse)
    assert os.listdir(disk_path) == []


def test_a_callback_that_raises_stops_a_load(disk_path):
    penstock.save(disk_path / "ckpt", big())
    with pytest.raises(RefusalError):
        penstock.load(disk_path / "ckpt", options=SLOWLY, progress=refuse)
    assert_same(penstock.load(disk_path / "ckpt", keys="3"), [big()[3]])


def test_a_callback_that_raises_when_all_is_done_does_not_hide_a_save(tmp_path):
    """A committed save is reported as complete; without such a report nothing was committed."""

    def refuse_the_end(done, total):
        if done == total:
            raise RefusalError

    try:
        penstock.save(tmp_path / "ckpt", {"w": np.zeros(10)}, progress=refuse_the_end)
        assert penstock.verify(tmp_path / "ckpt").ok
    except RefusalError as error:
        is_told = "complete" in "".join(getattr(error, "__notes__", []))
        assert (tmp_path / "ckpt").exists() == is_told


def test_a_bar_shows_on_standard_error(disk_path, capfd):
    penstock.save(disk_path / "ckpt", big(8), progress=True)
    penstock.load(disk_path / "ckpt", progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "saving" in shown.err
    assert "loading" in shown.err


@pytest.mark.parametrize("progress", [1, "yes", object()])
def test_progress_of_another_type_is_refused(tmp_path, progress):
    with pytest.raises(TypeError, match="progress"):
        penstock.save(tmp_path / "ckpt", {}, progress=progress)


def test_an_interrupted_save_closes_its_files_and_threads(disk_path):
    penstock.save(disk_path / "warm", big(2))
    before = settled()
    for _ in range(5):
        with pytest.raises(RefusalError):
            penstock.save(disk_path / "ckpt", big(), options=SLOWLY, progress=refuse)
    assert_settles_at(before)


def test_many_saves_and_loads_leave_no_files_open(disk_path, options):
    path = disk_path / "ckpt"
    penstock.save(path, big(2), options=options)
    before = settled()
    for _ in range(20):
        penstock.save(path, big(2), overwrite=True, options=options)
        penstock.load(path, options=options)
    assert_settles_at(before)
