"""`penstock.integrations.dcp.enable`: DCP on Penstock with nothing but a ``checkpoint_id``."""

from __future__ import annotations

import inspect
import os
import pickle
import random
import subprocess
import sys
import time
import types
from contextlib import closing

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    _storage_utils,
    filesystem,
    format_utils,
    staging,
    state_dict_loader,
    state_dict_saver,
)

import dcp_enable_worker
import forks
import penstock
from conftest import tell
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    MissingDependencyError,
)
from penstock.integrations import versions
from penstock.integrations.dcp import (
    StorageReader,
    StorageWriter,
    defaults,
    directory,
    disable,
    enable,
    patches,
)
from ranks import Job, environments_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:Detected an existing checkpoint",
    "ignore:fsync not supported",
)

SEED = 4_127
try:
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess
except ImportError:
    # PyTorch before 2.7.
    _AsyncCheckpointProcess = None

needs_process = pytest.mark.skipif(
    _AsyncCheckpointProcess is None, reason="PyTorch before 2.7 has no process that saves"
)
needs_stager = pytest.mark.skipif(
    not hasattr(state_dict_saver, "DefaultStager"),
    reason="PyTorch before 2.9 makes no stager itself",
)
# From PyTorch 2.7 on a rank can save alone.
HAS_NO_DIST = "no_dist" in inspect.signature(state_dict_saver.save).parameters
KILLS = int(os.environ.get("PENSTOCK_TORTURE_DCP_KILLS", "3"))
SECONDS_MAX = 120


@pytest.fixture(autouse=True)
def _taken_back():
    yield
    disable()


def state_of(step):
    return {"model": {"w": torch.arange(6.0).reshape(2, 3) + step}, "step": step}


def save(path, step, **arguments):
    dcp.save(state_of(step), checkpoint_id=path, no_dist=True, **arguments)


def loaded(path, **arguments):
    state = {"model": {"w": torch.zeros(2, 3)}, "step": -1}
    dcp.load(state, checkpoint_id=path, no_dist=True, **arguments)
    assert torch.equal(state["model"]["w"], state_of(state["step"])["model"]["w"])
    return state["step"]


def together(ranks, *commands):
    with closing(Job(ranks)) as job:
        for command in commands:
            name, *arguments = command.split(":")
            job.call(getattr(dcp_enable_worker, name), *arguments, timeout_seconds=SECONDS_MAX)


def launch(ranks, *commands):
    """Runs commands on ranks in new interpreters: frameworks start processes and groups."""
    processes = [
        forks.RankPopen(
            [dcp_enable_worker.__file__, *commands],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments_of(ranks)
    ]
    try:
        said = [process.communicate(timeout=SECONDS_MAX)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)


class TestInstalling:
    KNOWN = (
        (_storage_utils, "_storage_setup"),
        (state_dict_saver, "_storage_setup"),
        (state_dict_loader, "_storage_setup"),
        (dcp, "FileSystemReader"),
        (dcp, "FileSystemWriter"),
        (format_utils, "FileSystemReader"),
        (state_dict_saver, "DefaultStager"),
        (_AsyncCheckpointProcess, "save"),
    )

    def known(self):
        there = [(place, name) for place, name in self.KNOWN if hasattr(place, name)]
        return [vars(place)[name] for place, name in there]

    def test_everything_is_as_before_when_it_is_taken_back(self):
        before = self.known()
        enable(file_system_writer=True)
        assert not any(new is old for new, old in zip(self.known(), before, strict=True))
        disable()
        assert all(new is old for new, old in zip(self.known(), before, strict=True))
        disable()
        with enable():
            assert dcp.FileSystemWriter is filesystem.FileSystemWriter
        assert all(new is old for new, old in zip(self.known(), before, strict=True))

    def test_modules_that_are_imported_in_between_have_theirs_back(self, monkeypatch):
        theirs = _storage_utils._storage_setup
        module = types.ModuleType("of_a_framework")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        with enable():
            module._storage_setup = _storage_utils._storage_setup
            assert module._storage_setup is not theirs
        assert module._storage_setup is theirs

    def test_another_call_replaces_what_the_first_has_chosen(self, tmp_path):
        before = self.known()
        with enable(overwrite=False):
            again = enable()
            save(tmp_path / "a", 1)
            save(tmp_path / "a", 2)
        # The first install's block has ended, after the second one had replaced it.
        save(tmp_path / "a", 3)
        assert loaded(tmp_path / "a") == 3
        with again:
            pass
        assert all(new is old for new, old in zip(self.known(), before, strict=True))

    def test_a_version_that_is_too_old_is_refused_and_nothing_changes(self, monkeypatch):
        before = self.known()
        monkeypatch.setattr(versions, "version", lambda _: "2.3.1+cpu")
        with pytest.raises(MissingDependencyError, match=r"'torch>=2\.4'") as e:
            enable()
        assert e.value.name == "torch"
        assert all(new is old for new, old in zip(self.known(), before, strict=True))

    def test_what_pytorch_has_moved_is_named_and_nothing_changes(self, monkeypatch):
        def _storage_setup(storage, checkpoint_id, reader=False, *, registry): ...

        def load(state_dict, *, checkpoint_id=None): ...

        monkeypatch.setattr(_storage_utils, "_storage_setup", _storage_setup)
        monkeypatch.setattr(state_dict_loader, "load", load)
        monkeypatch.delattr(format_utils, "FileSystemReader")
        with pytest.raises(MissingDependencyError) as caught:
            enable()
        for moved in (
            "_storage_setup demands registry",
            "load uses no _storage_setup",
            "no torch.distributed.checkpoint.format_utils.FileSystemReader",
        ):
            assert moved in str(caught.value)
        assert _storage_utils._storage_setup is _storage_setup

    def test_a_newer_version_warns_and_is_tried_out_before_the_first_save(
        self, tmp_path, monkeypatch
    ):
        if not HAS_NO_DIST:
            pytest.skip("no newer version is like this one, before PyTorch 2.7")
        tried = []
        monkeypatch.setattr(versions, "version", lambda _: "99.0.0")
        monkeypatch.setattr(versions, "_warned", set())
        monkeypatch.setattr(versions, "_self_checked", set())
        try_out = patches._try_out

        def trying():
            tried.append(os.listdir(tmp_path))
            try_out()

        monkeypatch.setattr(patches, "_try_out", trying)
        with pytest.warns(versions.NewerVersionWarning, match=r"torch .* 99\.0\.0 is newer"):
            enable()
        for step in (1, 2):
            save(tmp_path / "a", step)
        assert tried == [[]]
        assert loaded(tmp_path / "a") == 2

    def test_a_newer_version_that_changes_a_state_saves_nothing(self, tmp_path, monkeypatch):
        def fail():
            raise ValueError("it came back as {}")

        monkeypatch.setattr(versions, "version", lambda _: "99.0.0")
        monkeypatch.setattr(versions, "_warned", {"torch"})
        monkeypatch.setattr(versions, "_self_checked", set())
        monkeypatch.setattr(patches, "_try_out", fail)
        enable()
        with pytest.raises(MissingDependencyError, match=r"came back as .*newer Penstock"):
            save(tmp_path / "a", 1)
        assert os.listdir(tmp_path) == []

    def test_wrong_options_are_refused_and_nothing_changes(self):
        before = self.known()
        with pytest.raises((TypeError, ValueError)):
            enable(options={"engine": "threads"})
        assert all(new is old for new, old in zip(self.known(), before, strict=True))


class TestSaving:
    def test_a_checkpoint_id_is_enough(self, tmp_path):
        for path in (str(tmp_path / "a"), tmp_path / "deep" / "b"):
            with enable():
                save(path, 1)
                assert loaded(path) == 1
            assert penstock.load(path)["step"] == 1
            assert penstock.verify(path).ok
            assert path / ".metadata" if path is not str(path) else True

    def test_planners_are_those_that_are_given(self, tmp_path):
        with enable():
            save(tmp_path / "a", 1, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
            state = {"more": torch.ones(2), **state_of(5)}
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            save(tmp_path / "b", 2)
            dcp.load(state, checkpoint_id=tmp_path / "b", planner=planner, no_dist=True)
        assert (state["step"], state["more"].tolist()) == (2, [1.0, 1.0])
        assert penstock.load(tmp_path / "a")["step"] == 1

    def test_what_names_a_writer_or_reader_is_as_it_was(self, tmp_path):
        with enable():
            writer = filesystem.FileSystemWriter(tmp_path / "a")
            dcp.save(state_of(1), storage_writer=writer, no_dist=True)
            assert (tmp_path / "a" / "__0_0.distcp").exists()
            assert loaded(None, storage_reader=filesystem.FileSystemReader(tmp_path / "a")) == 1
            dcp.save(state_of(2), storage_writer=StorageWriter(tmp_path / "b"), no_dist=True)
            assert loaded(None, storage_reader=StorageReader(tmp_path / "b")) == 2
            assert not (tmp_path / "b" / ".metadata").exists()

    def test_urls_and_what_is_no_path_stay_with_dcp(self):
        with enable():
            if not hasattr(filesystem, "SerializationFormat"):
                pytest.skip("DCP before PyTorch 2.8 cannot save to memory://")
            save("memory://bucket/step-1", 1)
            assert loaded("memory://bucket/step-1") == 1
            with pytest.raises(RuntimeError, match="must be specified"):
                dcp.save(state_of(1), no_dist=True)

    def test_it_overwrites_as_dcp_does_and_the_old_one_stays_until_then(self, tmp_path):
        class Failing(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                assert loaded(tmp_path / "a") == 1
                raise OSError("the disk is on fire")

        with enable():
            save(tmp_path / "a", 1)
            with pytest.raises(dcp.CheckpointException, match="on fire"):
                save(tmp_path / "a", 2, planner=Failing())
            assert loaded(tmp_path / "a") == 1
            save(tmp_path / "a", 3)
            assert loaded(tmp_path / "a") == 3

    def test_without_overwrite_what_is_complete_is_refused_whoever_wrote_it(self, tmp_path):
        save(tmp_path / "theirs", 1)
        with enable(overwrite=False):
            save(tmp_path / "ours", 1)
            for name in ("theirs", "ours"):
                with pytest.raises(dcp.CheckpointException) as caught:
                    save(tmp_path / name, 2)
                failure, _ = caught.value.failures[0]
                assert isinstance(failure, CheckpointExistsError)
                assert loaded(tmp_path / name) == 1

    def test_a_store_is_not_made_one_that_cannot_be_opened(self, tmp_path):
        penstock.CheckpointStore(tmp_path).save(1, state_of(1))
        with enable():
            for arguments in ({}, {"storage_writer": StorageWriter(tmp_path)}):
                with pytest.raises(dcp.CheckpointException, match="is a store of checkpoints"):
                    save(tmp_path, 2, **arguments)
        assert penstock.CheckpointStore(tmp_path).steps() == [1]

    def test_stores_and_verify_take_the_mark_for_no_damage(self, tmp_path):
        store = penstock.CheckpointStore(tmp_path)
        with enable():
            for step in (1, 2):
                save(store.path(step), step)
        assert store.steps() == [1, 2]
        assert store.verify(2).ok
        store.delete(1)
        assert store.steps() == [2]
        # Otherwise torchtitan would mistake the directory for a checkpoint.
        assert not os.path.exists(store.path(1))
        with enable():
            save(store.path(3), 3)
        assert store.verify(3).ok
        open(os.path.join(store.path(2), "notes"), "w").close()
        assert penstock.CheckpointStore(tmp_path, keep_last=1).retain().deleted == (2,)
        assert os.listdir(store.path(2)) == ["notes"]
        assert os.path.exists(os.path.join(store.path(3), ".metadata"))


class TestStaging:
    def test_saves_that_overlap_hold_what_was_there_when_they_were_asked_for(self, tmp_path):
        weight = torch.zeros(200_000)
        with enable():
            for number in range(3):
                pending = []
                for step in (2 * number, 2 * number + 1):
                    weight.fill_(step)
                    state = {"w": weight, "tied": weight}
                    pending.append(dcp.async_save(state, checkpoint_id=tmp_path / str(step)))
                weight.fill_(-1)
                for one in pending:
                    one.result()
        for step in range(6):
            found = penstock.load(tmp_path / str(step))
            assert found["w"].eq(step).all()
            assert found["tied"].eq(step).all()

    @needs_stager
    def test_memory_is_used_again_and_given_back(self):
        weight = torch.ones(1000)
        stagers = patches._stagers()
        first = stagers.lend()
        place = first.stage({"w": weight})["w"].data_ptr()
        busy = stagers.lend()
        assert busy.stage({"w": weight})["w"].data_ptr() != place
        first.close()
        again = stagers.lend()
        assert again.stage({"w": weight})["w"].data_ptr() == place
        again.close()
        busy.close()
        stagers.close()
        last = stagers.lend()
        last.stage({"w": weight})
        last.close()
        assert stagers._idle is None
        with pytest.raises(AssertionError, match="closed"):
            last.stage({"w": weight})

    @needs_stager
    def test_a_tensor_that_has_grown_is_copied_anew(self):
        stagers = patches._stagers()
        weight = torch.ones(10)
        for size in (10, 20, 5):
            lent = stagers.lend()
            assert (
                lent.stage({"w": weight.resize_(size).fill_(size)})["w"].tolist() == [size] * size
            )
            lent.close()
        stagers.close()

    @needs_stager
    def test_a_stager_of_ones_own_is_used(self, tmp_path):
        class Own(staging.DefaultStager):
            staged = 0

            def stage(self, state_dict):
                Own.staged += 1
                return super().stage(state_dict)

        with enable():
            own = Own(staging.StagingOptions(False, False, False, False))
            dcp.async_save(state_of(1), checkpoint_id=tmp_path / "a", async_stager=own).result()
            own.close()
            assert loaded(tmp_path / "a") == 1
        assert Own.staged == 1


class TestDcpsOwn:
    def test_its_directories_still_load(self, tmp_path):
        save(tmp_path / "a", 1)
        with enable():
            assert loaded(tmp_path / "a") == 1
            assert isinstance(dcp.FileSystemReader(tmp_path / "a"), filesystem.FileSystemReader)

    def test_a_save_over_one_removes_it_once_it_is_durable(self, tmp_path, monkeypatch):
        path = tmp_path / "a"
        save(path, 1)
        before = set(os.listdir(path))
        looked = []
        commit = penstock.checkpoint.saving.rank_save.RankAttempt.commit

        def committing(self, *arguments, **further):
            looked.append((loaded(path), before <= set(os.listdir(path))))
            return commit(self, *arguments, **further)

        monkeypatch.setattr(penstock.checkpoint.saving.rank_save.RankAttempt, "commit", committing)
        with enable():
            save(path, 2)
            assert looked == [(1, True)]
            assert loaded(path) == 2
        assert not any(name.endswith(".distcp") for name in os.listdir(path))
        assert b"Penstock" in (path / ".metadata").read_bytes()

    def test_what_dcp_saves_over_one_of_penstock_is_the_newer_one(self, tmp_path):
        path = tmp_path / "a"
        with enable():
            save(path, 1)
        save(path, 2)
        with enable():
            assert loaded(path) == 2
            save(path, 3)
            assert loaded(path) == 3
        save(path, 4)
        with enable():
            assert loaded(path) == 4

    def test_a_kill_between_commit_and_mark_leaves_no_doubt(self, tmp_path, monkeypatch):
        path = tmp_path / "a"
        save(path, 1)
        with enable():
            monkeypatch.setattr(directory, "mark", lambda _: None)
            save(path, 2)
            monkeypatch.undo()
            assert {"manifest.json", "__0_0.distcp"} < set(os.listdir(path))
            assert loaded(path) == 2
            save(path, 3)
            assert loaded(path) == 3
            assert not any(name.endswith(".distcp") for name in os.listdir(path))

    def test_one_that_is_half_written_is_refused_with_what_is_missing(self, tmp_path):
        for name in ("unfinished", "incomplete", "cut"):
            save(tmp_path / name, 1)
        (tmp_path / "unfinished" / ".metadata").unlink()
        (tmp_path / "incomplete" / "__0_0.distcp").unlink()
        os.truncate(tmp_path / "cut" / "__0_0.distcp", 100)
        with enable():
            with pytest.raises(IncompleteCheckpointError, match=r"\.metadata") as caught:
                loaded(tmp_path / "unfinished")
            assert caught.value.path == str(tmp_path / "unfinished")
            for name in ("incomplete", "cut"):
                with pytest.raises(dcp.CheckpointException, match="__0_0") as caught:
                    loaded(tmp_path / name)
                failure, _ = caught.value.failures[0]
                assert isinstance(failure, IncompleteCheckpointError)
            # An unfinished save does not block the next one.
            save(tmp_path / "unfinished", 2)
            assert loaded(tmp_path / "unfinished") == 2

    def test_what_a_store_has_left_of_a_step_is_no_checkpoint(self, tmp_path):
        store = penstock.CheckpointStore(tmp_path)
        with enable():
            save(store.path(1), 1)
            save(store.path(2), 2)
            store.delete(1)
            with pytest.raises(dcp.CheckpointException, match="no checkpoint at"):
                loaded(store.path(1))
        with pytest.raises(CheckpointNotFoundError):
            penstock.convert(store.path(1), tmp_path / "new")

    def test_nothing_at_all_is_an_error_of_penstock(self, tmp_path):
        with enable(), pytest.raises(dcp.CheckpointException, match="no checkpoint at"):
            loaded(tmp_path / "missing")


class TestClasses:
    def test_readers_go_by_what_is_there_and_writers_by_choice(self, tmp_path):
        save(tmp_path / "theirs", 1)
        with enable(file_system_writer=True):
            writer = dcp.FileSystemWriter(tmp_path / "ours", single_file_per_rank=False)
            dcp.save(state_of(2), storage_writer=writer, no_dist=True)
            assert type(writer) is defaults.DefaultWriter
            assert type(dcp.FileSystemReader(tmp_path / "ours")) is StorageReader
            for name, step in (("theirs", 1), ("ours", 2)):
                assert loaded(None, storage_reader=dcp.FileSystemReader(tmp_path / name)) == step
            refusing = dcp.FileSystemWriter(tmp_path / "ours", overwrite=False)
            with pytest.raises(dcp.CheckpointException, match="complete checkpoint"):
                dcp.save(state_of(3), storage_writer=refusing, no_dist=True)
            if hasattr(filesystem, "SerializationFormat"):
                written = filesystem.SerializationFormat.SAFETENSORS
                other = dcp.FileSystemWriter(tmp_path / "b", serialization_format=written)
                assert isinstance(other, filesystem.FileSystemWriter)

    def test_what_stands_in_has_the_public_attributes_of_dcps_own(self, tmp_path):
        """Except for those about DCP's own files, and for its stager, which is never called."""
        stager = {name for name in dir(staging.BlockingAsyncStager()) if not name.startswith("_")}
        left_out = {"fs", "metadata_path", "rank", "storage_data", "transforms", *stager}
        left_out.discard("cache_staged_state_dict")
        save(tmp_path / "theirs", 1)
        theirs = {
            "reader": filesystem.FileSystemReader(tmp_path / "theirs"),
            "writer": filesystem.FileSystemWriter(tmp_path / "ours", thread_count=3),
        }
        with enable(file_system_writer=True):
            save(tmp_path / "ours", 1)
            ours = {
                "reader": dcp.FileSystemReader(tmp_path / "ours"),
                "writer": dcp.FileSystemWriter(tmp_path / "ours", thread_count=3),
            }
        for name, stand_in in ours.items():
            public = {one for one in dir(theirs[name]) if not one.startswith("_")}
            assert not public - set(dir(stand_in)) - left_out, name
        assert ours["writer"].thread_count == 3
        for kind, identity in (("reader", "load_id"), ("writer", "save_id")):
            before = getattr(ours[kind], identity)
            assert before != getattr(theirs[kind], identity)
            assert type(before) is type(getattr(theirs[kind], identity)) is str
            ours[kind].reset()
            assert getattr(ours[kind], identity) != before
        assert ours["writer"].storage_meta().save_id == ours["writer"].save_id

    def test_they_are_classes_as_dcps_own(self, tmp_path):
        early = filesystem.FileSystemWriter(tmp_path / "a")
        with enable(file_system_writer=True):

            class Further(dcp.FileSystemWriter):
                pass

            further = Further(tmp_path / "a", thread_count=2)
            assert isinstance(early, dcp.FileSystemWriter)
            assert isinstance(further, Further)
            assert not isinstance(early, Further)
            assert isinstance(further, filesystem.FileSystemWriter)
            assert further.thread_count == 2
            assert not isinstance(7, dcp.FileSystemReader)
            sent = pickle.loads(pickle.dumps(dcp.FileSystemWriter(tmp_path / "c")))
            assert (type(sent), sent.path) == (defaults.DefaultWriter, str(tmp_path / "c"))

    def test_tools_that_make_a_reader_themselves_read_it(self, tmp_path):
        from lightning.fabric.utilities.load import _load_distributed_checkpoint

        path = tmp_path / "a"
        with enable():
            save(path, 1)
            format_utils.dcp_to_torch_save(path, tmp_path / "a.pt")
            torch.save({"epoch": 3}, path / "meta.pt")
            found = _load_distributed_checkpoint(path)
        assert torch.load(tmp_path / "a.pt")["step"] == 1
        assert (found["step"], found["epoch"]) == (1, 3)


@pytest.mark.slow
class TestRanks:
    def test_two_save_and_load_what_dcp_and_they_have_saved(self, tmp_path):
        path = f"{tmp_path}/a"
        together(
            2,
            f"own_format:{path}:rows:1",
            f"load:{path}:columns:1",
            f"save:{path}:rows:2",
            f"load:{path}:columns:2",
            *([f"alone:{tmp_path}/alone"] if HAS_NO_DIST else []),
            f"own_format:{tmp_path}/b:rows:1",
        )
        (tmp_path / "b" / "__1_0.distcp").unlink()
        together(2, f"refuse:{tmp_path}/b:__1_0.distcp", f"load:{path}:copies:2")

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=needs_process)])
    def test_saves_in_the_background(self, tmp_path, kind):
        launch(2, f"save_async:{tmp_path}/{kind}:{kind}")

    @pytest.mark.slow
    def test_lightning(self, tmp_path):
        launch(2, f"fabric:{tmp_path}/fabric", f"lightning:{tmp_path}/a.ckpt")

    @pytest.mark.slow
    def test_torchtitan(self, tmp_path):
        modes = ("disabled", "async")
        launch(2, *(f"torchtitan:{tmp_path}/{mode}:{mode}" for mode in modes))

    @pytest.mark.slow
    def test_transformers_and_accelerate(self, tmp_path):
        launch(2, f"transformers:{tmp_path}/t", f"accelerate:{tmp_path}/a")


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_what_was_complete_last(tmp_path):
    tell("seed", SEED)
    chooser = random.Random(SEED)
    last = 0
    for number in range(KILLS):
        path = tmp_path / f"run-{number // 4}"
        if number % 4 == 0:
            save(path, 0)
            dcp.save({"a": torch.zeros(300_000), "step": 0}, checkpoint_id=path, no_dist=True)
        with forks.RankPopen(
            [dcp_enable_worker.__file__, str(path)], stdout=subprocess.PIPE, text=True
        ) as process:
            said = int(process.stdout.readline()) if chooser.random() < 0.7 else 0
            time.sleep(chooser.uniform(0, 0.1))
            process.kill()
            said = max([said, *(int(line) for line in process.stdout if line.endswith("\n"))])
        state = {"a": torch.zeros(300_000), "step": -1}
        with enable():
            dcp.load(state, checkpoint_id=path, no_dist=True)
        assert state["step"] in (said, said + 1) or (said == 0 and state["step"] == last)
        assert torch.equal(state["a"], torch.full((300_000,), float(state["step"])))
        last = state["step"]
