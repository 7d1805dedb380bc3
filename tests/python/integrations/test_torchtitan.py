"""`penstock.integrations.torchtitan`: torchtitan's runs, saved and resumed by Penstock."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models.llama3 import Llama3StateDictAdapter, model_registry

import forks
import penstock
import titan
from conftest import mounted, tell
from damaged import damage
from documentation.test_example_programs import Program, said
from penstock.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingDependencyError,
    PenstockWarning,
    StateMismatchError,
    StorageError,
    UnsupportedPathError,
    UnsupportedStateError,
)
from penstock.integrations import dcp, versions
from penstock.integrations.torchtitan import Checkpointer
from titan import begun, end, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:DTensor random operators"),
]

KILLS = int(os.environ.get("PENSTOCK_TORTURE_TITAN_KILLS", "3"))
SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", "71"))
KEPT = 3  # checkpoints that the example keeps

MODES = ["disabled", "async", "async_with_pinned_mem"]
WEIGHT = "tok_embeddings.weight"


def store_of(folder):
    return penstock.CheckpointStore(folder / "checkpoint")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs 6 steps, saves after 2 and 4; returns the folder and the losses of all steps."""
    folder = tmp_path_factory.mktemp("saved")
    losses = trained(folder, 4)
    return folder, losses + trained(folder, 6, interval=100, last_save_model_only=True, load_only=1)


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "workers"), [*((mode, 0) for mode in MODES), (MODES[2], 2)])
def test_a_run_that_was_resumed_loses_what_it_would_have_lost(tmp_path, mode, workers):
    straight = trained(tmp_path / "straight", 6, workers=workers, interval=100)
    first = trained(tmp_path / "resumed", 5, async_mode=mode, workers=workers)
    assert first == straight[:5]
    # The last step is saved as well, while a worker has prefetched batches.
    os.rename(*(store_of(tmp_path / "resumed").path(step) for step in (5, 9)))
    shutil.rmtree(store_of(tmp_path / "resumed").path(9))
    run = begun(tmp_path / "resumed", async_mode=mode, workers=workers)
    assert run.checkpointer.load(step=-1)
    assert run.step == 4
    assert list(run.train(6)) == straight[4:]
    end(run)


def test_what_is_stored_has_torchtitans_names_and_no_pickle(saved):
    state = penstock.load(store_of(saved[0]).path(4))
    assert state["train_state"] == {"step": 4, "ntokens_seen": 256}
    assert state["lr_scheduler"] == {"last_epoch": 4}
    assert state["dataloader"]["dp_rank_0"]["dataset_state"] == {"count": 8}
    assert state[WEIGHT].shape == (2048, 256)
    assert f"state.{WEIGHT}.exp_avg" in state["optimizer"]
    assert set(state["rng"]) == {"python", "numpy", "torch"}


def test_the_fields_of_the_config_are_torchtitans(tmp_path):
    fields = set(Checkpointer.Config.__dataclass_fields__)
    assert fields - {"trust", "sealing", "identities", "sign", "signed_by"} == set(
        CheckpointManager.Config.__dataclass_fields__
    )
    with pytest.raises(ValueError, match="at least 2"):
        Checkpointer.Config(keep_latest_k=1)
    with pytest.raises(ValueError, match="async_mode"):
        Checkpointer.Config(async_mode="sometimes")
    assert Checkpointer.Config(async_mode="ASYNC").async_mode == "async"
    with pytest.raises(UnsupportedPathError):
        begun(tmp_path, folder="gs://bucket/run")


def test_the_last_so_many_steps_are_kept_and_one_more_while_one_is_saved(tmp_path):
    run = begun(tmp_path, keep_latest_k=2, interval=1, async_mode="async")
    store, seen = store_of(tmp_path), []
    for _ in run.train(5):
        seen.append(store.steps())
        run.checkpointer.maybe_wait_for_saving()
        assert store.steps() == list(range(max(run.step - 1, 1), run.step + 1))
    end(run)
    # During a save, all steps that retention keeps are there.
    assert all(len(steps) >= min(index, 2) for index, steps in enumerate(seen))
    assert store.steps() == [4, 5]


def test_a_save_that_fails_is_told_once_and_training_goes_on(tmp_path, need_root):
    folder = tmp_path / "small"
    with mounted("tmpfs", folder, 40 << 20):
        run = begun(folder, async_mode="async_with_pinned_mem", interval=1)
        steps = run.train(20)
        next(steps)
        run.checkpointer.maybe_wait_for_saving()
        next(steps)  # the disk is full during this save
        with pytest.raises(StorageError, match="free") as caught:
            next(steps)
        assert caught.value.errno == errno.ENOSPC
        assert store_of(folder).steps() == [1]
        shutil.rmtree(store_of(folder).path(1))
        assert run.checkpointer.save(run.step)
        end(run)
        assert store_of(folder).steps() == [3]
        assert penstock.verify(store_of(folder).path(3)).ok


def test_what_fails_at_the_end_comes_from_close_or_goes_with_what_ended_the_run(
    tmp_path, need_root
):
    def end_as_torchtitan_does(run, error):
        try:
            next(run.train(5))
            raise error
        except ZeroDivisionError:
            run.checkpointer.close()
            raise

    folder = tmp_path / "small"
    with mounted("tmpfs", folder, 10 << 20):
        run = begun(folder, async_mode="async", interval=1)
        next(run.train(5))
        with pytest.raises(StorageError, match="free"):
            run.checkpointer.close()
        run.checkpointer.close()
        run = begun(folder, async_mode="async", interval=1)
        with pytest.raises(ZeroDivisionError) as caught:
            end_as_torchtitan_does(run, ZeroDivisionError())
        assert "a save in the background failed" in caught.value.__notes__[0]


def test_a_step_that_is_damaged_or_half_written_is_passed_over(copied):
    store = store_of(copied)
    shutil.copytree(store.path(4), store.path(6))
    os.unlink(os.path.join(store.path(6), "manifest.json"))
    damage(store, 4, WEIGHT)
    run = begun(copied)
    with pytest.warns(PenstockWarning) as told:
        assert run.checkpointer.load(step=-1)
    assert run.step == 2
    assert any("0004" in str(one.message) for one in told)
    end(run)


def test_a_step_that_is_asked_for_is_loaded_or_the_error_says_why_not(copied):
    store = store_of(copied)
    run = begun(copied)
    assert run.checkpointer.load(step=2)
    assert run.step == 2
    damage(store, 4, WEIGHT)
    with pytest.raises(CorruptCheckpointError, match="0004"):
        run.checkpointer.load(step=4)
    os.unlink(os.path.join(store.path(4), "manifest.json"))
    with pytest.raises(IncompleteCheckpointError, match="0004"):
        run.checkpointer.load(step=4)
    with pytest.raises(FileNotFoundError, match="step-7"):
        run.checkpointer.load(step=7)
    end(run)


def test_a_run_does_not_begin_anew_because_all_it_has_is_damaged(copied):
    store = store_of(copied)
    for step in (2, 4):
        damage(store, step, WEIGHT)
    run = begun(copied)
    with pytest.warns(PenstockWarning), pytest.raises(CorruptCheckpointError):
        run.checkpointer.load(step=-1)
    end(run)


def test_a_step_that_a_run_has_gone_back_behind_is_saved_anew(copied):
    run = begun(copied, load_step=2)
    assert run.checkpointer.load(step=2)
    assert len(list(run.train(4))) == 2
    end(run)
    assert store_of(copied).steps() == [2, 4]


def test_what_torchtitans_own_manager_has_saved_is_loaded_and_gone_on_from(tmp_path):
    trained(tmp_path, 4, of=CheckpointManager)
    (tmp_path / "checkpoint" / "step-9").mkdir()  # half-written
    run = begun(tmp_path)
    assert run.checkpointer.load(step=-1)
    assert run.step == 4
    assert len(list(run.train(6))) == 2
    end(run)
    steps = [name for name in os.listdir(tmp_path / "checkpoint") if name.startswith("step-")]
    assert min(steps) == "step-0000000006"
    run = begun(tmp_path)
    assert run.checkpointer.load(step=-1)
    assert run.step == 6
    assert run.checkpointer.load(step=2)
    assert run.step == 2
    end(run)


def test_what_its_manager_has_saved_by_penstock_is_gone_on_from(tmp_path):
    with dcp.enable():
        trained(tmp_path, 4, of=CheckpointManager)
    # Remains of a deleted checkpoint: torchtitan looks for this file.
    (tmp_path / "checkpoint" / "step-9").mkdir()
    shutil.copy(tmp_path / "checkpoint/step-4/.metadata", tmp_path / "checkpoint/step-9")
    run = begun(tmp_path)
    assert run.checkpointer.load(step=-1)
    assert run.step == 4
    end(run)


def test_a_trainer_that_has_random_states_of_its_own_is_refused(tmp_path):
    run = begun(tmp_path)
    states = run.checkpointer.states
    further = {"dataloader": None, "model_parts": [run.model], "sd_adapter": None}
    further |= {"optimizers": run.optimizers, "lr_schedulers": run.lr_schedulers}
    config = Checkpointer.Config(enable=True)
    # The states of an earlier manager are the manager's own.
    config.build(states=states, base_folder=str(tmp_path), **further).close()
    with pytest.raises(UnsupportedStateError, match="rng: a state of the trainer"):
        config.build(states={"rng": run}, base_folder=str(tmp_path), **further)
    end(run)


def test_a_state_that_cannot_be_stored_is_named_when_the_manager_is_made(tmp_path):
    run = begun(tmp_path)
    further = {"dataloader": None, "model_parts": [run.model], "sd_adapter": None}
    further |= {"optimizers": run.optimizers, "lr_schedulers": run.lr_schedulers}
    run.step = print
    with pytest.raises(UnsupportedStateError) as caught:
        Checkpointer.Config(enable=True).build(
            states={"train_state": run}, base_folder=str(tmp_path), **further
        )
    assert caught.value.key == "train_state.step"
    end(run)


def test_a_new_run_begins_with_the_model_of_another(saved, tmp_path):
    path = str(store_of(saved[0]).path(4))
    run = begun(tmp_path / "model", initial_load_path=path)
    assert run.checkpointer.load(step=-1)
    assert run.step == 0
    assert torch.equal(run.model.state_dict()[WEIGHT], penstock.load(path)[WEIGHT])
    assert not run.optimizers.optimizers[0].state
    whole = begun(tmp_path / "all", initial_load_path=path, initial_load_model_only=False)
    assert whole.checkpointer.load(step=-1)
    assert whole.step == 4
    foreign = begun(tmp_path / "none", initial_load_path=str(tmp_path))
    with pytest.raises(IncompleteCheckpointError, match=r"no manifest\.json"):
        foreign.checkpointer.load(step=-1)
    for one in (run, whole, foreign):
        end(one)


def test_what_is_excluded_stays_as_it_is(copied):
    run = begun(copied, exclude_from_loading=["dataloader", "optimizer"])
    assert run.checkpointer.load(step=-1)
    assert run.step == 4
    assert not run.optimizers.optimizers[0].state
    assert run.dataloader.state_dict() == begun(copied).dataloader.state_dict()
    end(run)
    run = begun(copied, exclude_from_loading=["ema"])
    with pytest.raises(StateMismatchError, match="no 'ema'"):
        run.checkpointer.load(step=-1)
    end(run)


def test_a_last_step_of_the_model_only_begins_runs_and_ends_this_one(tmp_path):
    trained(tmp_path, 3, last_save_model_only=True, export_dtype="bfloat16")
    store = store_of(tmp_path)
    model = penstock.load(store.path(3))
    assert {tensor.dtype for tensor in model.values()} == {torch.bfloat16}
    run = begun(tmp_path)
    with pytest.raises(StateMismatchError, match=r"model only.*load_step"):
        run.checkpointer.load(step=-1)
    assert run.checkpointer.load(step=2)
    end(run)
    new = begun(tmp_path / "new", initial_load_path=store.path(3))
    assert new.checkpointer.load(step=-1)
    assert torch.equal(new.model.state_dict()[WEIGHT], model[WEIGHT].float())
    end(new)


def test_a_last_step_for_hugging_face_is_no_step_to_go_on_with(tmp_path):
    run = begun(tmp_path, last_save_model_only=True)
    config = model_registry("debugmodel").model
    config.layers = config.layers[:1]
    run.checkpointer.last_save_in_hf = True
    run.checkpointer.sd_adapter = Llama3StateDictAdapter(config, None)
    list(run.train(3))
    end(run)
    assert any(one.suffix == ".safetensors" for one in (tmp_path / "checkpoint/step-3").iterdir())
    run = begun(tmp_path)
    assert run.checkpointer.load(step=-1)
    assert run.step == 2
    end(run)


def test_another_model_is_refused_and_nothing_is_changed(copied):
    run = begun(copied, layers=2)
    before = run.digest()
    with pytest.raises(StateMismatchError, match=r"layers\.1.*not in the checkpoint"):
        run.checkpointer.load(step=-1)
    assert run.digest() == before
    trained(copied / "two", 2, layers=2)
    small = begun(copied / "two")
    with pytest.raises(StateMismatchError, match=r"layers\.1.*not in the model"):
        small.checkpointer.load(step=-1)
    end(run)
    end(small)


def test_a_checkpoint_without_a_part_is_refused(copied):
    store = store_of(copied)
    state = store.load(4)
    del state["lr_scheduler"]
    store.save(8, state)
    run = begun(copied)
    with pytest.raises(StateMismatchError, match=r"lr_scheduler.*exclude_from_loading"):
        run.checkpointer.load(step=-1)
    end(run)
    run = begun(copied, exclude_from_loading=["lr_scheduler"])
    assert run.checkpointer.load(step=-1)
    end(run)


class Odd:
    """A value that needs pickle."""

    def __eq__(self, other):
        return type(other) is Odd

    __hash__ = None


def test_a_place_that_takes_a_pickle_is_named_and_stored_only_if_trusted(tmp_path):
    def odd(**fields):
        run = begun(tmp_path, **fields)
        dataset = run.dataloader.dataset
        dataset.state_dict = lambda: {"count": dataset._count, "odd": Odd()}
        return run

    run = odd()
    with pytest.raises(UnsupportedStateError, match=r"odd.*trust=True") as caught:
        list(run.train(2))
    assert caught.value.key == "dataloader.dp_rank_0.dataset_state.odd"
    end(run)
    assert store_of(tmp_path).steps() == []
    run = odd(trust=True)
    list(run.train(2))
    end(run)
    run = odd()
    with pytest.raises(UnsupportedStateError, match=r"pickled.*trust=True"):
        run.checkpointer.load(step=-1)
    end(run)
    run = odd(trust=True)
    assert run.checkpointer.load(step=-1)
    assert run.step == 2
    end(run)


def test_places_of_other_workers_or_ranks_are_refused_by_name(copied):
    run = begun(copied, workers=2)
    with pytest.raises(StateMismatchError, match=r"0 workers.*num_workers=0"):
        run.checkpointer.load(step=-1)
    end(run)
    run = begun(copied)
    run.dataloader.dp_world_size = 4
    with pytest.raises(StateMismatchError, match=r"1 data-parallel ranks.*there are 4"):
        run.checkpointer.load(step=-1)
    end(run)
    run = begun(copied)
    run.dataloader.dp_rank, run.dataloader._rank_id = 1, "dp_rank_1"
    with pytest.raises(StateMismatchError, match="no place in the data for dp_rank_1"):
        run.checkpointer.load(step=-1)
    end(run)


def test_optimizers_that_step_have_the_rest_copied_first(tmp_path):
    run = begun(tmp_path, async_mode="async_with_pinned_mem")
    list(run.train(2))
    run.checkpointer.maybe_wait_for_saving()
    before = run.model.state_dict()[WEIGHT].clone()
    assert run.checkpointer.save(4)
    run.optimizers.step()  # guarded, even without a call of maybe_wait_for_staging
    end(run)
    assert not torch.equal(run.model.state_dict()[WEIGHT], before)
    assert torch.equal(store_of(tmp_path).load(4)[WEIGHT], before)


def test_a_checkpointer_that_is_disabled_or_only_loads_saves_nothing(copied, tmp_path):
    run = begun(copied, load_only=True)
    assert run.checkpointer.load(step=-1)
    assert len(list(run.train(6))) == 2
    end(run)
    assert store_of(copied).steps() == [2, 4]
    config = Checkpointer.Config(enable=False)
    run = titan.example().Run(str(tmp_path / "off"), config, layers=1)
    assert not run.checkpointer.load(step=-1)
    list(run.train(1))
    end(run)
    assert not (tmp_path / "off").exists()


def killed(directory, steps, ranks, chooser):
    """Runs the example until a SIGKILL at a random moment; returns its output."""
    program = Program("torchtitan_training.py", directory, steps, ranks, 2, popen=forks.TitanPopen)
    try:
        # During start-up, a resume or a save; or anywhere between.
        lines = chooser.randrange(8)
        program.wait_for_lines(lines)
        time.sleep(chooser.uniform(0, 0.2 if lines else 2))
    finally:
        program.kill()
    return program.lines


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, ranks):
    tell("seed", SEED)
    chooser = random.Random(f"{SEED} {ranks}")
    if ranks is not None and KILLS < 10:
        pytest.skip("the example's test kills two ranks once: see make torture WHAT=frameworks")
    steps, kills = 16, KILLS
    program = Program(
        "torchtitan_training.py", tmp_path / "straight", steps, ranks, 2, popen=forks.TitanPopen
    )
    straight = program.wait()
    wanted = {line for line in straight if not line.startswith("a new run")}
    run = before = 0
    for number in range(kills):
        directory = tmp_path / str(run)
        lines = killed(directory, steps, ranks, chooser)
        ended = any(line.startswith("digest") for line in lines)
        store = store_of(directory)
        complete = store.steps() if os.path.isdir(store.root) else []
        tell(f"kill {number}: {lines[:1]} to {lines[-1:]}, steps {complete}")
        assert {line for line in lines if line.startswith(("step", "digest"))} <= wanted
        assert len(complete) >= min(before, KEPT)
        before = 0 if ended else len(complete)
        run += ended
    program = Program(
        "torchtitan_training.py", tmp_path / str(run), steps, ranks, 2, popen=forks.TitanPopen
    )
    assert said(program.wait(), "digest") == said(straight, "digest")


@pytest.mark.slow
def test_ranks_resume_together_and_one_process_goes_on_with_what_two_saved(tmp_path, jobs):
    folder, own = str(tmp_path / "run"), str(tmp_path / "own")
    store = store_of(tmp_path / "run")
    job = jobs.of(2)

    def losses(folder, steps, *, is_own=False):
        # Importing torchtitan takes a rank some seconds.
        arguments = (str(folder), steps, is_own)
        return job.call(titan.rank_losses, *arguments, timeout_seconds=200)

    straight = losses(tmp_path / "straight", 6)
    assert losses(folder, 4) == [one[:4] for one in straight]
    assert straight[0] != straight[1]
    # Both fall back if one of them finds the newest step damaged.
    (shard,) = Path(store.path(4)).glob("shard-00001-*")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert job.call(titan.rank_step, folder) == [2, 2]
    (aside,) = Path(store.root).glob("damaged-*")
    (aside / shard.name).write_bytes(content)
    aside.rename(store.path(4))
    assert losses(folder, 6) == [one[4:] for one in straight]
    # A checkpoint of torchtitan itself on the same number of ranks.
    losses(own, 2, is_own=True)
    assert job.call(titan.rank_step, own) == [2, 2]
    run = begun(tmp_path / "run")
    with pytest.raises(StateMismatchError, match="2 data-parallel ranks"):
        run.checkpointer.load(step=-1)
    end(run)
    run = begun(tmp_path / "run", exclude_from_loading=["dataloader"])
    with pytest.warns(PenstockWarning, match="2 ranks saved it and 1 goes on"):
        assert run.checkpointer.load(step=-1)
    assert run.step == 6
    end(run)


@pytest.fixture
def newer(monkeypatch):
    """Pretends that a newer, untested torchtitan is installed."""
    found = versions.version
    monkeypatch.setattr(
        versions, "version", lambda name: "99.0" if name == "torchtitan" else found(name)
    )
    monkeypatch.setattr(versions, "_self_checked", set())


def test_a_newer_version_is_taken_after_a_tiny_run_has_come_back(saved, tmp_path, newer):
    losses = trained(tmp_path, 4)
    assert versions._self_checked == {"torchtitan"}
    # Random numbers that the trial drew are restored, and it leaves nothing behind.
    assert losses == saved[1][:4]
    assert not list(tmp_path.glob("**/.penstock-trial*"))
    run = begun(tmp_path)
    assert run.checkpointer.load(step=-1)
    end(run)


def test_a_newer_version_in_which_something_does_not_come_back_saves_nothing(
    tmp_path, monkeypatch, newer
):
    monkeypatch.setattr(CheckpointManager, "load", lambda *_, **__: True)
    run = begun(tmp_path, interval=1)
    with pytest.raises(MissingDependencyError, match=r"99\.0.*came back otherwise"):
        list(run.train(1))
    end(run)
    assert store_of(tmp_path).steps() == []
