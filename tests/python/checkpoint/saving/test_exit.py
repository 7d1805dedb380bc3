"""The end of a process with background saves: each is completed, reported or interrupted."""

from __future__ import annotations

import signal
import textwrap

import pytest

import forks
import penstock
import victim
from background import run_to_its_end
from checkpoint.test_kill import Victim
from compare import assert_same
from conftest import MATRIX, run_child, tell, uring_refusal

END = """
    import os, signal, sys, threading, time
    import numpy as np, penstock

    root, lazy, end = sys.argv[1:]
    store = penstock.CheckpointStore(root, keep_last=1)
    store.save(0, {"w": 0})
    state = {"w": np.full(32 << 20, 7, np.uint8)}
    pending = store.save_async(1, state, lazy=lazy == "True")
    if end == "failure":
        os.makedirs(store.path(3) + "/manifest.json")
        store.save_async(2, state, overwrite=True).result()
    if end == "exit":
        sys.exit(3)
    if end == "exception":
        raise RuntimeError("boom")
"""


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("end", "code"), [("end", 0), ("exit", 3), ("exception", 1)])
def test_a_process_that_ends_completes_its_save_first(disk_path, lazy, end, code):
    done = run_to_its_end(END, disk_path / "store", lazy, end)
    assert done.returncode == code, done.stderr
    assert "penstock:" not in done.stderr
    assert ("boom" in done.stderr) == (end == "exception")
    store = penstock.CheckpointStore(disk_path / "store")
    # A step beyond retention is deleted as well.
    assert store.steps() == [1]
    assert (store.load()["w"] == 7).all()


RANKS_END = """
    import fcntl, os, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    import numpy as np, penstock, torch.distributed as dist
    from penstock.common import found

    rank, root, meeting = int(sys.argv[1]), *sys.argv[2:]
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    # As if there were more ranks than one thread looks at.
    found._LOOKED_AT = 1
    store = penstock.CheckpointStore(root)
    os.makedirs(store.path(1), exist_ok=True)
    fd = os.open(store.path(1), os.O_RDONLY)
    if rank == 0:
        fcntl.flock(fd, fcntl.LOCK_EX)
    dist.barrier()
    pending = store.save_async(1, {"w": np.full(1 << 20, 7)})

    def release():
        # Once the interpreter ends, no pool of threads takes a task.
        try:
            while True:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(int)
                time.sleep(0.01)
        except RuntimeError:
            fcntl.flock(fd, fcntl.LOCK_UN)

    if rank == 0:
        threading.Thread(target=release).start()
"""


def test_many_ranks_that_end_complete_their_save_first(disk_path):
    root, code = disk_path / "store", textwrap.dedent(RANKS_END)
    ranks = [
        forks.WholePopen(["-c", code, str(rank), str(root), str(disk_path / "meeting")])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    store = penstock.CheckpointStore(root)
    assert store.steps() == [1]
    assert (store.load()["w"] == 7).all()


DCP_END = """
    import sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    import torch, torch.distributed.checkpoint as dcp
    from penstock.integrations.dcp import StorageWriter

    def save():
        try:
            while True:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(int)
                time.sleep(0.01)
        except RuntimeError:
            writer = StorageWriter(sys.argv[1])
            dcp.save({"w": torch.full((9,), 7.0)}, storage_writer=writer, no_dist=True)

    threading.Thread(target=save).start()
"""


def test_a_background_save_of_dcp_is_completed_first(disk_path):
    """Once the interpreter ends, no pool of threads takes a task."""
    done = run_to_its_end(DCP_END, disk_path / "saved")
    assert done.returncode == 0, done.stderr
    assert (penstock.load(disk_path / "saved")["w"] == 7).all(), done.stderr


FAIL = """
    import os, sys
    import numpy as np, penstock

    root, how = sys.argv[1:]
    store = penstock.CheckpointStore(root)
    open(store.path(1), "w").close()
    pending = store.save_async(1, {"w": np.ones(1 << 20)})
    if how == "exception":
        assert pending.exception() is not None
    elif how == "wait":
        try:
            store.wait()
        except penstock.errors.StorageError:
            pass
    elif how == "cancel":
        pending.cancel()
    elif how == "dropped":
        del pending, store
"""


@pytest.mark.parametrize("how", ["nobody", "dropped", "exception", "wait", "cancel"])
def test_a_failure_that_nobody_asked_for_is_on_standard_error_at_the_end(disk_path, how):
    root = disk_path / "store"
    root.mkdir()
    done = run_to_its_end(FAIL, root, how)
    assert done.returncode == 0, done.stderr
    if how in ("nobody", "dropped"):
        [line] = done.stderr.splitlines()
        assert line.startswith(f"penstock: {root}/step-0000000001 was not saved: ")
        assert "irectory" in line
    else:
        assert done.stderr == ""


INTERRUPTED_END = """
    import os, signal, sys, threading
    import numpy as np, penstock

    signal.signal(signal.SIGINT, signal.default_int_handler)
    root, engine, share = sys.argv[1:]
    options = penstock.Options(
        engine=engine, direct="off", queue_depth=1, io_threads=1, extent_bytes=1 << 20
    )
    store = penstock.CheckpointStore(root, options=options)
    pending = store.save_async(1, {"w": np.ones(64 << 20, np.uint8)}, lazy=True)

    def interrupt():
        # The main thread is at its end and waits for the save.
        main = threading.main_thread()
        while main.is_alive():
            pass
        while pending.progress().bytes_done < float(share) * (64 << 20) and not pending.done():
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
"""


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_ctrl_c_at_the_end_says_what_is_lost(disk_path, engine):
    outcomes = set()
    for number, share in enumerate([0, 0.3, 0.7, 1]):
        root = disk_path / f"store-{number}"
        done = run_to_its_end(INTERRUPTED_END, root, engine, share)
        assert done.returncode in (0, -signal.SIGINT), done.stderr
        store = penstock.CheckpointStore(root)
        is_told = f"penstock: {store.path(1)} was " in done.stderr
        if store.steps() == [1]:
            # The commit may have succeeded after the report.
            assert not is_told or "unless it is listed" in done.stderr
            assert (store.load()["w"] == 1).all()
        else:
            assert is_told, done.stderr
        outcomes.add(is_told)
        store.sweep()
        store.save(2, {"w": 2})
    tell(outcomes)
    assert True in outcomes, "every save was faster than the signal: nothing was tested"


INTERRUPTED_WAIT = """
    import fcntl, json, os, signal, sys, threading
    import numpy as np, penstock

    signal.signal(signal.SIGINT, signal.default_int_handler)
    root, how = sys.argv[1:]
    options = penstock.Options(staging_bytes=4 << 20) if how == "staging" else None
    store = penstock.CheckpointStore(root, options=options)
    os.makedirs(store.path(1))
    fd = os.open(store.path(1), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    state = {"w": np.ones(8 << 20)}
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    pending = None
    try:
        if how == "staging":
            timer.start()
            store.save_async(1, state)
        else:
            pending = store.save_async(1, state, lazy=how == "wait_staged")
            timer.start()
            if how == "save":
                store.save(2, {"w": 2})
            elif how == "wait":
                store.wait()
            else:
                getattr(pending, how)()
        outcome = "went on"
    except KeyboardInterrupt:
        outcome = "interrupted"
    still = pending is not None and not pending.done()
    fcntl.flock(fd, fcntl.LOCK_UN)
    # The save in an emergency.
    store.save(3, {"w": 3})
    print(json.dumps([outcome, still, store.steps()]))
"""


@pytest.mark.parametrize("how", ["result", "exception", "wait_staged", "wait", "save"])
def test_ctrl_c_ends_the_wait_and_not_the_save(disk_path, how):
    outcome = run_child(INTERRUPTED_WAIT, disk_path / "store", how)
    assert outcome == ["interrupted", True, [1, 3]]


def test_ctrl_c_while_the_state_is_staged_ends_the_save_and_the_next_one_works(disk_path):
    outcome = run_child(INTERRUPTED_WAIT, disk_path / "store", "staging")
    assert outcome == ["interrupted", False, [3]]


@pytest.mark.slow
def test_after_any_of_12_kills_the_newest_acknowledged_step_loads(disk_path):
    root = disk_path / "store"
    engines = [pair for pair in MATRIX if pair[0] == "threads" or uring_refusal() is None]
    newest, incomplete = -1, 0
    for kill in range(12):
        process = Victim("train_async", root, *engines[kill % len(engines)])
        process.kill_after(0.01 + 0.17 * kill / 12, acknowledged=kill % 2)
        newest = max([newest, *process.acknowledged])
        store = penstock.CheckpointStore(root)
        incomplete += any(info.state == "incomplete" for info in store.scan())
        assert not [info for info in store.scan() if info.state == "damaged"]
        if newest < 0:
            continue
        state = store.load()
        assert state["step"] >= newest
        assert_same(state, victim.make_state(state["step"]))
        newest = state["step"]
    tell(f"step {newest}; {incomplete} of 12 kills in the middle of a save")
    assert newest > 0
    assert incomplete > 0, "no kill came in the middle of a save: nothing was tested"
