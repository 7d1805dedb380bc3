"""A lazy save is whole or raises, whoever changes the state and whenever."""

from __future__ import annotations

import ctypes
import os
import random
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
import torn
from background import held
from compare import assert_same
from conftest import run_child, tell, watch_refusal
from penstock.errors import StateMismatchError

MIB = 1 << 20

SAVES = int(os.environ.get("PENSTOCK_TORTURE_LAZY_SAVES", "22"))
"""Lazy saves that race with a change; the variable sets more."""

SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", time.time_ns() % 1_000_000_000))

torch.set_num_threads(1)


def test_no_change_of_any_kind_tears_a_save(tmp_path):
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory, prefix="penstock-test-") as directory:
        total, scenes = torn.campaign(Path(directory) / "store", SAVES, SEED)
    tell(f"PENSTOCK_TORTURE_SEED={SEED}", dict(total))
    for name, outcomes in scenes.items():
        assert not outcomes["torn"], f"{name}: {outcomes}"
        assert not outcomes["refused"], f"{name} has to be saved: {outcomes}"
    assert total["whole"] > 0


def started(change):
    """Runs a change on another thread; returns in the middle of the change."""
    reached, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=change, args=(reached, go_on))
    thread.start()
    reached.wait()
    return thread, go_on


@pytest.mark.usefixtures("need_watch")
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_change_that_is_under_way_when_all_is_copied_fails_the_save(disk_path, is_guarded):
    """PyTorch has not counted the change yet: half of it follows after the save."""
    store = penstock.CheckpointStore(disk_path / "store")
    parameter = torch.nn.Parameter(torch.zeros(4 * MIB))
    if is_guarded:
        penstock.guard(torch.optim.AdamW([parameter], fused=True))
    memory = parameter.detach().numpy()

    def change(reached, go_on):
        memory[: 2 * MIB] = 1
        reached.set()
        go_on.wait()
        memory[2 * MIB :] = 1

    with held(store, 1):
        pending = store.save_async(1, {"w": parameter}, lazy=True)
        version = parameter._version
        thread, go_on = started(change)
    error = pending.exception()
    go_on.set()
    thread.join()
    assert isinstance(error, StateMismatchError)
    assert (error.key, error.path) == ("w", pending.path)
    assert "pending.stage()" in str(error)
    assert "lazy=False" in str(error)
    assert parameter._version == version
    assert store.steps() == []


@pytest.mark.usefixtures("need_watch")
@pytest.mark.parametrize("place", [0, 1, 5000, 4 * MIB - 1])
def test_a_single_byte_does_not_tear_a_save(disk_path, place):
    """The first and last page are shared with other memory: the call copies their bytes."""
    store = penstock.CheckpointStore(disk_path / "store")
    # Neither end is a page boundary.
    w = torch.zeros(4 * MIB + 100, dtype=torch.uint8)[50:-50]
    with held(store, 1):
        pending = store.save_async(1, [w], lazy=True)
        ctypes.memset(w.data_ptr() + place, 1, 1)
    if place == 5000:
        assert isinstance(pending.exception(), StateMismatchError)
    else:
        pending.result()
        assert not store.load(1)[0].any()
    with held(store, 2):
        pending = store.save_async(2, [w], lazy=True)
        # Changes of neighbouring memory do not matter.
        ctypes.memset(w.data_ptr() - 1, 1, 1)
        ctypes.memset(w.data_ptr() + w.nbytes, 1, 1)
    pending.result()
    assert_same(store.load(2), [w])


@pytest.mark.parametrize("kind", [kind for kind in torn.OPTIMIZERS if kind != "foreign"])
@pytest.mark.parametrize("has_closure", [False, True], ids=["plain", "closure"])
def test_every_optimizer_can_be_guarded(disk_path, kind, has_closure):
    """Gradients may not exist before a step has run its closure."""
    store = penstock.CheckpointStore(disk_path / "store")
    dice = random.Random(1)
    scene = torn.stepped(dice, kind, is_guarded=True, has_closure=has_closure)
    expected = torn.snapshot(scene.state)
    with held(store, 1):
        pending = store.save_async(1, scene.state, lazy=True)
        scene.change()
    pending.result()
    assert torn.equal(expected, store.load(1))
    assert not torn.equal(expected, scene.state)


@pytest.mark.usefixtures("need_watch")
@pytest.mark.parametrize("kind", torn.OPTIMIZERS)
def test_no_optimizer_without_a_guard_tears_a_save(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    scene = torn.stepped(random.Random(1), kind, is_guarded=False, has_closure=True)
    with held(store, 1):
        pending = store.save_async(1, scene.state, lazy=True)
        scene.change()
    assert isinstance(pending.exception(), StateMismatchError)


def test_what_calls_nobody_before_it_steps_cannot_be_guarded():
    class Wrapper(torch.optim.Optimizer):
        """A proxy that is an optimizer by type only, as some libraries have it."""

        def __init__(self):
            pass

    for optimizer in (torn.Foreign([torch.zeros(3)]), Wrapper()):
        with pytest.raises(TypeError, match=r"register_step_pre_hook.*pending\.stage\(\)"):
            penstock.guard(optimizer)


@pytest.mark.usefixtures("need_watch")
def test_the_watch_ends_with_the_copy(disk_path):
    """A later change does no harm, though the save still writes."""
    store = penstock.CheckpointStore(disk_path / "store")
    w = torch.zeros(4 * MIB)
    for step in range(3):
        before = w.clone()
        with held(store, step):
            pending = store.save_async(step, [w], lazy=True)
            assert not pending.wait_staged(0)
            pending.stage()
            w.add_(1)
        assert pending.result().fallbacks == store.save(9, [1], overwrite=True).fallbacks
        assert_same(store.load(step), [before])


@pytest.mark.parametrize("kind", ["second", "shared", "much"])
def test_what_cannot_be_watched_is_copied_at_the_call_and_the_report_says_so(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    w = torch.zeros(4 * MIB)
    first = penstock.CheckpointStore(disk_path / "first")
    with held(first, 1), held(store, 1):
        if kind == "second":
            watched = first.save_async(1, [torch.ones(MIB)], lazy=True)
        elif kind == "shared":
            w.share_memory_()
        state = [w, np.zeros(65 * MIB, np.uint8)] if kind == "much" else [w]
        pending = store.save_async(1, state, lazy=True)
        assert pending.wait_staged(0)
        w.add_(1)
    [reason] = [text for text in pending.result().fallbacks if "copied at the call" in text]
    if watch_refusal() is None:
        words = {"second": "another state", "shared": "several processes", "much": "64 MiB"}
        assert words[kind] in reason
    assert not store.load(1)[0].any()
    if kind == "second":
        watched.result()


REFUSED = """
    import ctypes, errno, json, struct, sys
    import torch

    # As the profile of a container: the system call fails. Its number is that of this machine.
    LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
    program = b"".join(struct.pack("HBBI", *row) for row in [
        (LOAD, 0, 0, 0),
        (JUMP_EQUAL, 1, 0, int(sys.argv[2])),
        (RETURN, 0, 0, 0x7FFF0000),
        (RETURN, 0, 0, 0x00050000 | errno.EPERM),
    ])
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = Filter(len(program) // 8, program)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, ctypes.get_errno()
    assert libc.prctl(22, 2, ctypes.byref(filter_)) == 0, ctypes.get_errno()

    import penstock
    store = penstock.CheckpointStore(sys.argv[1])
    w = torch.zeros(4 << 20)
    pending = store.save_async(1, [w], lazy=True)
    is_staged = pending.wait_staged(0)
    w.lgamma_()
    fallbacks = pending.result().fallbacks
    print(json.dumps([is_staged, fallbacks, bool(store.load(1)[0].any())]))
"""


@pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"), reason="no number of userfaultfd is known"
)
def test_where_the_kernel_does_not_watch_the_state_is_copied_at_the_call(disk_path):
    number = {"x86_64": 323, "aarch64": 282}[os.uname().machine]
    is_staged, fallbacks, is_torn = run_child(REFUSED, disk_path / "store", number)
    assert is_staged
    assert any("copied at the call" in text and "userfaultfd" in text for text in fallbacks)
    assert not is_torn


@pytest.mark.usefixtures("need_watch")
def test_a_fork_neither_ends_the_watch_nor_is_watched(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    w = np.zeros(16 * MIB, np.uint8)
    state = [torch.from_numpy(w)]
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        child = os.fork()
        if child == 0:
            # The child drops its copy of the save, writes to its copy of the state, and saves that.
            w[:] = 3
            own = penstock.CheckpointStore(disk_path / "own")
            other = own.save_async(1, state, lazy=True)
            other.stage()
            w[:] = 4
            other.result()
            is_right = bool((own.load(1)[0] == 3).all())
            del pending, other, store, own
            os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
    pending.result()
    assert_same(store.load(1), [torch.zeros(16 * MIB, dtype=torch.uint8)])
    with held(store, 2):
        pending = store.save_async(2, state, lazy=True)
        child = os.fork()
        if child == 0:
            del pending
            os._exit(0)
        os.waitpid(child, 0)
        w[9 * MIB] = 1
    assert isinstance(pending.exception(), StateMismatchError)


def test_another_writer_of_a_mapped_file_does_not_tear_a_save(disk_path):
    """Pages of a private mapping belong to the file until this process writes to them."""
    path = disk_path / "w.pt"
    torch.save({"w": torch.zeros(4 * MIB)}, path)
    state = torch.load(path, mmap=True)
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        with path.open("r+b") as file:
            file.seek(8 * MIB)
            file.write(b"1" * 4096)
        assert state["w"].any()
    fallbacks = pending.result().fallbacks
    assert not store.load(1)["w"].any()
    if watch_refusal() is None:
        assert any("memory that a file is mapped to" in text for text in fallbacks)
