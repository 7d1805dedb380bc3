"""Forks during background saves neither harm the save nor wait for it."""

from __future__ import annotations

import json
import os
import textwrap
import traceback

import pytest
import torch

import forks
import penstock
from background import run_to_its_end


@pytest.mark.parametrize("has_saved", [False, True])
def test_a_fork_does_not_speak_for_its_rank(disk_path, lone_job, has_saved):
    store = penstock.CheckpointStore(disk_path / "store")
    if has_saved:
        store.save(1, {"w": torch.ones(3)})
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(penstock.PenstockError, match="no_dist=True"):
                store.save(2, {"w": torch.ones(3)})
            with pytest.raises(penstock.PenstockError, match="no_dist=True"):
                penstock.CheckpointStore(disk_path / "other").save(2, {"w": torch.ones(3)})
            alone = penstock.CheckpointStore(disk_path / "alone", no_dist=True)
            alone.save(3, {"w": torch.ones(3)})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    store.save(4, {"w": torch.ones(3)})
    assert store.latest() == 4


FORK = """
    import faulthandler, json, os, sys, time
    import numpy as np, penstock, torch

    root, lazy, how = sys.argv[1:]

    def watch(seconds):
        # A child has no other thread, not even the one that watches memory.
        faulthandler.dump_traceback_later(seconds, exit=True)

    watch(150)
    options = penstock.Options(
        queue_depth=1, io_threads=1, extent_bytes=1 << 20, staging_bytes=64 << 20
    )
    store = penstock.CheckpointStore(root, options=options)
    # An array would be copied at the call, lazy or not.
    state = {"w": torch.full((96 << 20,), 7, dtype=torch.uint8)}
    pending = store.save_async(1, state, lazy=lazy == "True")
    while not pending.progress().bytes_done:
        time.sleep(0.0005)

    def refuses(call):
        try:
            call()
        except penstock.PenstockError as error:
            return "fork" in str(error)
        return False

    def in_child():
        watch(100)
        calls = pending.result, pending.exception, pending.stage, pending.cancel, \
            pending.wait_staged
        is_right = all(map(refuses, calls)) and (pending.done() or "running" in repr(pending))
        store.wait()
        # It may save on its own.
        other = store.save_async(2, {"w": np.full(16 << 20, 9, np.uint8)})
        other.result()
        store.save(3, {"w": 3})
        store.close()
        return is_right

    faulthandler.cancel_dump_traceback_later()
    if how == "multiprocessing":
        import multiprocessing
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=lambda: queue.put(in_child()))
        child.start()
        watch(150)
        is_right = queue.get()
        child.join()
        code = child.exitcode
    else:
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writable, json.dumps(in_child()).encode())
            if how == "exit":
                sys.exit(0)
            del pending, store
            os._exit(0)
        watch(150)
        os.close(writable)
        is_right = json.loads(os.read(readable, 100) or "false")
        _, code = os.waitpid(child, 0)
    if lazy == "False":
        state["w"][:] = 0
    report = pending.result()
    print(json.dumps([is_right, code, bool((store.load(1)["w"] == 7).all()), store.steps()]))
"""


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("how", ["exit", "_exit", "multiprocessing"])
def test_a_forked_child_neither_harms_the_save_nor_waits_for_it(disk_path, how, lazy):
    program = ["-c", textwrap.dedent(FORK), disk_path / "store", lazy, how]
    done = forks.run(program, popen=forks.WholePopen)
    # A child that is silent by now hangs in the fork itself.
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [True, 0, True, [1, 2, 3]], done.stderr
    assert "penstock:" not in done.stderr
    assert penstock.verify(disk_path / "store/step-0000000001").ok


def test_a_forked_childs_copy_of_an_attempt_removes_nothing(disk_path):
    """Also when the copy is dropped: files and directory belong to the parent."""
    done = run_to_its_end(
        """
        import os, sys
        import numpy as np
        from penstock import _native, Options
        from penstock.checkpoint.state.flatten import flatten

        path = sys.argv[1]
        attempt = _native.Attempt.begin(path, overwrite=False)
        for stage in ("begun", "written"):
            if stage == "written":
                flat = flatten({"w": np.ones(1 << 20)})
                job = _native.Job(
                    path, flat.tensors, flat.aliases, flat.tree,
                    options=Options().to_native(), arena=None, lazy=True, nice=None,
                )
                vote = job.write(attempt, 0)["vote"]
            before = sorted(os.listdir(path))
            child = os.fork()
            if child == 0:
                del attempt
                os._exit(0)
            os.waitpid(child, 0)
            assert sorted(os.listdir(path)) == before, (stage, before)
        attempt.commit([(0, *vote)], step=None, metadata="{}", overwrite=False)
        """,
        disk_path / "ckpt",
    )
    assert done.returncode == 0, done.stderr
    assert penstock.verify(disk_path / "ckpt").ok
