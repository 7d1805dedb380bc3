"""`penstock.integrations.megatron`: Megatron-LM's tracker file, and its deletion of iterations.

Some wheels of Megatron-Core contain `megatron.training`; its functions are tested then. Otherwise a
module with functions of the same source shape stands for it, and says so.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import sys
import types
from types import CellType, FunctionType, SimpleNamespace

import pytest
import torch

megatron = pytest.importorskip("megatron.core.dist_checkpointing")

import penstock  # noqa: E402
from conftest import tell  # noqa: E402
from penstock.errors import IncompleteCheckpointError, PenstockWarning, StorageError  # noqa: E402
from penstock.integrations.megatron import disable, enable, retention  # noqa: E402
from penstock.plugin import OpenCheckpoint, durable  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

STAND_IN = """
import os, shutil, threading
from pathlib import Path
from megatron.core.msc_utils import {files}

def print_rank_0(text):
    print(text)

def get_checkpoint_name(path, iteration, return_base_dir=False):
    return os.path.join(path, "iter_{{:07d}}".format(iteration))

def save_checkpoint(args, iteration, tracker_filename, release):
    def iter_finalize_fn():
        prev_iteration = 0
        save_retain_interval = args.save_retain_interval
        if save_retain_interval is not None and os.path.exists(tracker_filename):
            with {files}{open}(tracker_filename, "r") as f:
                prev_iteration = int(f.read().strip())
        with {files}{open}(tracker_filename, "w") as f:
            f.write("release" if release else str(iteration))
        if prev_iteration > 0 and prev_iteration % save_retain_interval != 0:
            th = threading.Thread(
                target=_async_delete_checkpoint_impl, args=(args.save, prev_iteration)
            )
            th.start()
    return iter_finalize_fn

def _async_delete_checkpoint_impl(save_path, iteration_to_delete):
    name = get_checkpoint_name(save_path, iteration=iteration_to_delete, return_base_dir=True)
    try:
        shutil.rmtree(name)
    except Exception as e:
        print("encountered exception", e)

def cleanup_old_non_persistent_checkpoint(save_dir, leave_ckpt_num=1, do_async=False):
    found = sorted(Path(save_dir).rglob("iter_*"), key=lambda one: int(one.name[5:]))
    for one in found[:-leave_ckpt_num]:
        shutil.rmtree(one)
"""


@pytest.fixture
def training():
    """Megatron-LM's module, with the plug-in enabled."""
    try:
        module = importlib.import_module(retention.MODULE)
    except ImportError:
        from megatron.core import msc_utils

        is_new = hasattr(msc_utils, "maybe_msc")
        source = STAND_IN.format(
            files="maybe_msc" if is_new else "open_file", open=".open" if is_new else ""
        )
        tell("megatron.training is not in this wheel: functions of the same shape stand for it")
        module = types.ModuleType(retention.MODULE)
        exec(source, vars(module))
        sys.modules[retention.MODULE] = module
    try:
        with enable():
            yield module
        assert module.shutil is shutil
    finally:
        disable()
        if not hasattr(module, "__file__"):
            del sys.modules[retention.MODULE]


def finalizer(module, root, iteration, *, retain=None, release=False):
    """The function of `save_checkpoint` that writes the tracker, with values for its variables."""
    args = SimpleNamespace(
        save=str(root), save_retain_interval=retain, log_progress=False, async_save=False
    )
    known = {
        "args": args,
        "iteration": iteration,
        "tracker_filename": str(root / retention.TRACKER),
        "release": release,
    }
    codes = [
        one
        for one in module.save_checkpoint.__code__.co_consts
        if getattr(one, "co_name", "") == "iter_finalize_fn" and "release" in one.co_freevars
    ]
    (code,) = codes
    cells = tuple(CellType(known.get(name, 0)) for name in code.co_freevars)
    return FunctionType(code, vars(module), "iter_finalize_fn", None, cells)


def saved(root, *iterations):
    for one in iterations:
        penstock.save(root / f"iter_{one:07}", {"w": torch.full((3,), float(one))})


def threads_of_deletion():
    import threading

    for one in threading.enumerate():
        if one is not threading.current_thread() and "delete" in one.name:
            one.join(30)


def tracked(root):
    return (root / retention.TRACKER).read_text()


def test_the_tracker_is_replaced_durably(training, tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    replaced = []
    replace = durable.replace
    monkeypatch.setattr(durable, "replace", lambda *one: replaced.append(one[0]) or replace(*one))
    finalizer(training, tmp_path, 1)()
    finalizer(training, tmp_path, 2)()
    assert tracked(tmp_path) == "2"
    assert replaced == [str(tmp_path / retention.TRACKER)] * 2
    assert not list(tmp_path.glob("*.tmp"))


def test_the_tracker_never_names_what_is_not_complete(training, tmp_path):
    saved(tmp_path, 1, 2)
    finalizer(training, tmp_path, 1)()
    (tmp_path / "iter_0000002" / "manifest.json").unlink()
    for missing in (2, 3):
        with pytest.raises(IncompleteCheckpointError, match=f"iter_000000{missing}"):
            finalizer(training, tmp_path, missing)()
        assert tracked(tmp_path) == "1"
    (tmp_path / "iter_0000002" / "metadata.json").write_text("{}")
    for leftover in ("shard-*", "part-*"):
        for file in (tmp_path / "iter_0000002").glob(leftover):
            file.unlink()
        with pytest.raises(IncompleteCheckpointError, match="iter_0000002"):
            finalizer(training, tmp_path, 2)()
    (tmp_path / "iter_0000002" / "__0_0.distcp").write_bytes(b"of DCP")
    with pytest.raises(IncompleteCheckpointError, match="iter_0000002"):
        finalizer(training, tmp_path, 2)()
    assert tracked(tmp_path) == "1"
    # Checkpoints that are not Penstock's are Megatron-LM's affair.
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004" / ".metadata").write_bytes(b"of DCP")
    finalizer(training, tmp_path, 4)()
    assert tracked(tmp_path) == "4"
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    finalizer(training, tmp_path, 5)()
    assert tracked(tmp_path) == "5"


def test_a_tracker_that_cannot_be_written_keeps_the_iteration_before(
    training, tmp_path, monkeypatch
):
    saved(tmp_path, 1, 2)
    finalizer(training, tmp_path, 1)()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            finalizer(training, tmp_path, 2)()
    assert tracked(tmp_path) == "1"


def test_an_old_iteration_is_deleted_by_the_one_door(training, tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    removed = []
    remove = retention.remove_checkpoint
    monkeypatch.setattr(
        retention,
        "remove_checkpoint",
        lambda *one, **how: removed.append(one) or remove(*one, **how),
    )
    finalizer(training, tmp_path, 1)()
    finalizer(training, tmp_path, 2, retain=10)()
    threads_of_deletion()
    assert removed == [(str(tmp_path / "iter_0000001"),)]
    assert not (tmp_path / "iter_0000001").exists()
    assert torch.equal(penstock.load(tmp_path / "iter_0000002")["w"], torch.full((3,), 2.0))


def test_an_iteration_that_is_read_is_not_deleted(training, tmp_path):
    saved(tmp_path, 1, 2, 3)
    reader = OpenCheckpoint(str(tmp_path / "iter_0000001"))
    try:
        training._async_delete_checkpoint_impl(str(tmp_path), 1)
        # A persistent worker deletes in a fork.
        child = multiprocessing.get_context("fork").Process(
            target=training._async_delete_checkpoint_impl, args=(str(tmp_path), 1)
        )
        child.start()
        child.join(30)
        assert child.exitcode == 0
        with pytest.warns(PenstockWarning, match="iter_0000001"):
            training.cleanup_old_non_persistent_checkpoint(str(tmp_path))
        assert penstock.verify(tmp_path / "iter_0000001").ok
    finally:
        reader.release()
    training.cleanup_old_non_persistent_checkpoint(str(tmp_path))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["iter_0000003"]


def test_a_module_of_another_shape_stays_and_is_named(tmp_path):
    module = types.ModuleType(retention.MODULE)
    module.save_checkpoint = lambda: None
    before = sys.modules.get(retention.MODULE)
    sys.modules[retention.MODULE] = module
    try:
        with pytest.warns(PenstockWarning, match="has no shutil"), enable():
            pass
    finally:
        if before is None:
            del sys.modules[retention.MODULE]
        else:
            sys.modules[retention.MODULE] = before
