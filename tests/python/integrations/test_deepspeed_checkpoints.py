"""DeepSpeed with Penstock as its checkpoint engine: ZeRO 0 to 3 on two ranks, and refusals."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections import Counter, OrderedDict, defaultdict

import killed_runs
import pytest
import torch
import torch.distributed as dist
from deepspeeds import attach, config_of, deepspeed_here

import forks
import penstock
from conftest import mounted, run_child
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    MissingDependencyError,
    PenstockWarning,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)
from penstock.integrations import pickling, versions
from penstock.integrations.deepspeed import tags, values

KILLS = int(os.environ.get("PENSTOCK_TORTURE_DEEPSPEED_KILLS", "3"))
SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", "32"))
WIDTH = 8
STEPS = 4


def build(stage, dtype="bf16", width=WIDTH):
    """Returns an engine with a model of its own."""
    deepspeed = deepspeed_here()
    torch.manual_seed(11)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 2 * width), torch.nn.Dropout(0.5), torch.nn.Linear(2 * width, width)
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(stage, dtype)
    )
    torch.manual_seed(20 + dist.get_rank())
    return engine


def train(engine, steps):
    """Returns each step's loss, with random batches and dropout, whose states must be restored."""
    losses = []
    for _ in range(steps):
        width = engine.module[2].out_features
        batch = torch.randn(2, width).to(next(engine.module.parameters()).dtype)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def saved(directory, stage, dtype, how):
    """Trains, saves in between, and returns the losses from then on."""
    engine = build(stage, dtype)
    attach(engine, **how)
    train(engine, 2)
    engine.save_checkpoint(directory, client_state={"epoch": 7})
    losses = train(engine, STEPS)
    engine.destroy()
    return losses


def resumed(directory, stage, dtype, how):
    engine = build(stage, dtype)
    attach(engine, **how)
    path, client_state = engine.load_checkpoint(directory)
    assert (path is not None, client_state["epoch"]) == (True, 7)
    losses = train(engine, STEPS)
    engine.destroy()
    return losses


KINDS = [
    (0, "fp32", {}),
    (1, "bf16", {}),
    (2, "bf16", {"background": True, "lazy": True}),
    (3, "bf16", {"background": True}),
    (3, "fp32", {}),
]


@pytest.mark.parametrize(("stage", "dtype", "how"), KINDS)
def test_a_resumed_run_goes_on_bit_for_bit(jobs, tmp_path, stage, dtype, how):
    path = str(tmp_path / "run")
    wanted = jobs.of(2).call(saved, path, stage, dtype, how)
    assert (tmp_path / "run" / "latest").read_text() == "global_step2"
    found = penstock.inspect(tmp_path / "run" / "global_step2")
    assert (found.world_size, found.step) == (2, 2)
    assert jobs.of(2).call(resumed, path, stage, dtype, how) == wanted
    assert wanted[0] != wanted[1]


def converted(directory):
    """Compares the results of DeepSpeed's own tool on a tag and on its copy by `to_torch`."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from penstock.integrations.deepspeed.checkpoint_engine import to_torch

    engine = build(2)
    attach(engine)
    train(engine, 2)
    engine.save_checkpoint(directory)
    if dist.get_rank() == 0:
        to_torch(directory, directory + "-torch")
        with pytest.raises(FileExistsError):
            to_torch(directory, directory + "-torch")
        live = engine.module.state_dict()
        # The copy is for other programs; in this one, the tag itself works.
        for path in (directory + "-torch", directory):
            found = get_fp32_state_dict_from_zero_checkpoint(path)
            assert found.keys() == live.keys()
            for name, value in found.items():
                assert torch.equal(value.to(torch.bfloat16), live[name])
    dist.barrier()
    # By DeepSpeed's own engine, and by Penstock's, which leaves such tags to it.
    losses = train(engine, 2)
    for is_ours in (False, True):
        other = build(2)
        if is_ours:
            attach(other)
        other.load_checkpoint(directory + "-torch")
        # Its own engine restores no random states.
        torch.manual_seed(5)
        first = train(other, 2)
        other.destroy()
        again = build(2)
        attach(again)
        again.load_checkpoint(directory)
        torch.manual_seed(5)
        assert train(again, 2) == first
        if is_ours:
            with pytest.raises(CheckpointExistsError, match="saved by DeepSpeed itself"):
                again.save_checkpoint(directory + "-torch", tag="global_step2")
        again.destroy()
    engine.destroy()
    return losses


def test_a_tag_is_written_back_and_old_ones_are_loaded(jobs, tmp_path):
    jobs.of(2).call(converted, str(tmp_path / "run"), timeout_seconds=200)


def refused(directory):
    """Incomplete tags, and unsupported values."""
    engine = build(2)
    attach(engine)
    train(engine, 1)
    engine.save_checkpoint(directory, tag="good")
    engine.save_checkpoint(directory, tag="bad")
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(os.path.join(directory, "bad", "manifest.json"))
    dist.barrier()
    with pytest.raises(IncompleteCheckpointError, match="bad"):
        engine.load_checkpoint(directory, tag="bad")
    with pytest.raises(penstock.PenstockError) as error:
        engine.save_checkpoint(directory, tag="worse", client_state={"it": object})
    if dist.get_rank() == 0:
        assert error.value.key == "mp_rank_00_model_states.pt.it"
        assert "pickled=" in str(error.value)
        with open(os.path.join(directory, "latest")) as file:
            assert file.read() == "bad"
    dist.barrier()
    attach(engine, pickled=["*.it"])
    engine.save_checkpoint(directory, tag="raw", client_state={"it": object})
    with pytest.raises(UnsupportedStateError, match="trust=True"):
        engine.load_checkpoint(directory)
    attach(engine, trust=True)
    _, client_state = engine.load_checkpoint(directory)
    assert client_state["it"] is object
    # A model without a tag is a plain file, as in DeepSpeed.
    engine.save_16bit_model(directory, "model.bin")
    dist.barrier()
    assert torch.load(os.path.join(directory, "model.bin")).keys() == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    engine.destroy()


def test_what_is_no_complete_tag_is_refused(jobs, tmp_path):
    jobs.of(2).call(refused, str(tmp_path / "run"), timeout_seconds=120)


def installed(directory):
    """Every new engine uses Penstock's; a failed save leaves `latest` unchanged."""
    import deepspeed.runtime.engine as runtime

    from penstock.integrations.deepspeed import checkpoint_engine

    theirs = runtime.create_checkpoint_engine
    checkpoint_engine.enable(background=True)
    try:
        engine = build(1)
        assert isinstance(engine.checkpoint_engine, checkpoint_engine.PenstockCheckpointEngine)
        train(engine, 1)
        engine.save_checkpoint(directory, tag="first")
        train(engine, 1)
        engine.save_checkpoint(directory, tag="second", save_latest=False)
        train(engine, 1)
        engine.destroy()
        with pytest.raises(ValueError, match="lazy=True"):
            checkpoint_engine.enable(lazy=True)
    finally:
        runtime.create_checkpoint_engine = theirs
    dist.barrier()
    with open(os.path.join(directory, "latest")) as file:
        assert file.read() == "first"
    assert penstock.inspect(os.path.join(directory, "second")).step == 2
    assert not glob.glob(os.path.join(directory, "*.tmp"))


def test_install_is_for_all_engines_and_latest_for_those_that_ask(jobs, tmp_path):
    jobs.of(2).call(installed, str(tmp_path / "run"))


def test_states_come_back_as_themselves(tmp_path):
    weights = torch.nn.BatchNorm1d(3).state_dict()
    state = {"weights": weights, "counts": Counter("aab"), "seen": defaultdict(list, a=[1])}
    files = {"one.pt": pickling.packed(values.plain(state), "one.pt", ["*.seen"]), "none.pt": {}}
    penstock.save(tmp_path / "tag", {"files": files}, metadata={"pickled": ["*.seen"]})
    found = tags.read_file(str(tmp_path / "tag" / "one.pt"), trust=True)
    assert type(found["weights"]) is OrderedDict
    # Modules read their version from these, to update old states.
    assert found["weights"]._metadata == weights._metadata
    assert (found["counts"], found["seen"]) == (state["counts"], state["seen"])
    assert found["seen"].default_factory is list
    # A pipeline layer without weights.
    assert tags.read_file(str(tmp_path / "tag" / "none.pt"), trust=True) == {}
    with pytest.raises(CheckpointNotFoundError, match="none of it"):
        tags.read_file(str(tmp_path / "tag" / "further.pt"), trust=True)
    with pytest.raises(UnsupportedStateError, match=r"x\.f: cannot be pickled either"):
        pickling.packed({"f": lambda: None}, "x", ["x.f"])


def full(directory, how):
    """The disk has room for one tag only."""
    engine = build(2, width=512)
    attach(engine, **how)
    ours = engine.checkpoint_engine
    train(engine, 1)
    engine.save_checkpoint(directory, tag="first")
    ours.wait()
    train(engine, 1)

    def save():
        engine.save_checkpoint(directory, tag="second")
        ours.stage()
        ours.wait()

    with pytest.raises(penstock.PenstockError, match="free"):
        save()
    with open(os.path.join(directory, "latest")) as file:
        assert file.read() == "first"
    train(engine, 1)
    other = build(2, width=512)
    attach(other, **how)
    assert other.load_checkpoint(directory)[0] is not None
    assert other.global_steps == 1
    other.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(os.path.join(directory, "first"))
    dist.barrier()
    save()
    engine.destroy()
    # The first rank moves it, once all ranks' saves are durable.
    dist.barrier()
    with open(os.path.join(directory, "latest")) as file:
        assert file.read() == "second"


@pytest.mark.parametrize("how", [{}, {"background": True}, {"background": True, "lazy": True}])
def test_where_the_disk_is_full_the_last_tag_loads_and_training_goes_on(
    jobs, tmp_path, need_root, how
):
    with mounted("tmpfs", tmp_path / "small", 24 << 20) as small:
        jobs.of(2).call(full, str(small), how, timeout_seconds=120)
        assert penstock.inspect(small / "second").step == 3
        assert penstock.verify(small / "second").ok


def failing(directory):
    """An error on the first rank alone is raised on all, and no rank waits for the other."""
    engine = build(0, "fp32")
    train(engine, 1)
    # By DeepSpeed itself: the second rank has no file in it.
    engine.save_checkpoint(directory, tag="theirs")
    attach(engine)
    is_first = dist.get_rank() == 0
    with pytest.raises(CheckpointExistsError, match="saved by DeepSpeed itself"):
        engine.save_checkpoint(directory, tag="theirs")
    # A file takes the place of the directory.
    if is_first:
        open(os.path.join(directory, "file"), "w").close()
    dist.barrier()
    with pytest.raises(penstock.PenstockError, match="Not a directory"):
        engine.save_checkpoint(os.path.join(directory, "file"), tag="tag")
    # `latest` cannot be written.
    if is_first:
        os.remove(os.path.join(directory, "latest"))
        os.mkdir(os.path.join(directory, "latest"))
    dist.barrier()
    with pytest.raises(StorageError, match="latest cannot be written"):
        engine.save_checkpoint(directory, tag="good")
    assert penstock.verify(os.path.join(directory, "good")).ok
    attach(engine, background=True)
    with pytest.warns(PenstockWarning) if is_first else contextlib.nullcontext():
        engine.save_checkpoint(directory, tag="better")
        engine.checkpoint_engine.wait()
    dist.barrier()
    if is_first:
        os.rmdir(os.path.join(directory, "latest"))
    engine.destroy()
    dist.barrier()
    with open(os.path.join(directory, "latest")) as file:
        assert file.read() == "better"
    assert not glob.glob(os.path.join(directory, "**", "*.tmp"), recursive=True)


def test_what_fails_on_one_rank_is_raised_by_all(jobs, tmp_path):
    jobs.of(2).call(failing, str(tmp_path / "run"), timeout_seconds=120)


def lazily(directory, stage, dtype):
    """Takes the next step, or destroys the engine, right after each save."""
    engine = build(stage, dtype, width=256)
    attach(engine, background=True, lazy=True)
    train(engine, 1)
    engine.save_checkpoint(directory, tag="step")
    losses = train(engine, 2)
    engine.save_checkpoint(directory, tag="end")
    engine.destroy()
    again = build(stage, dtype, width=256)
    attach(again)
    again.load_checkpoint(directory, tag="step")
    assert train(again, 2) == losses
    again.destroy()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_a_lazy_save_has_what_was_there_at_the_call(jobs, tmp_path, stage, dtype):
    """Its tensors are too large to be copied at once."""
    jobs.of(2).call(lazily, str(tmp_path), stage, dtype, timeout_seconds=120)
    assert all(penstock.verify(tmp_path / tag).ok for tag in ("step", "end"))


def piped(directory, stages, zero):
    """A pipeline with a file for each layer; one layer has no weights."""
    deepspeed = deepspeed_here()

    def engine_of(**how):
        torch.manual_seed(11)
        layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)]
        module = deepspeed.pipe.PipelineModule(
            layers,
            num_stages=stages,
            loss_fn=torch.nn.functional.mse_loss,
            partition_method="uniform",
        )
        config = {
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": zero},
        }
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=config
        )
        attach(engine, **how)
        return engine

    def losses(engine):
        torch.manual_seed(20)
        batches = iter([(torch.randn(1, 256), torch.randn(1, 256)) for _ in range(4)])
        return [engine.train_batch(batches).item() for _ in range(2)]

    engine = engine_of(background=True, lazy=True)
    losses(engine)
    engine.save_checkpoint(directory)
    # It counts steps in another way than an engine without a pipeline.
    wanted = losses(engine)
    engine.destroy()
    again = engine_of()
    again.load_checkpoint(directory)
    assert losses(again) == wanted
    again.destroy()


@pytest.mark.parametrize(("stages", "zero"), [(2, 0), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_a_pipeline_goes_on_from_a_lazy_save(jobs, tmp_path, stages, zero):
    """With one stage both ranks read the first one's files, some of which have no tensors."""
    jobs.of(2).call(piped, str(tmp_path / "run"), stages, zero, timeout_seconds=120)
    assert penstock.verify(tmp_path / "run" / "global_step2").ok


def weights(directory):
    """Loads the model without its optimizer, from any tag; and its reason if there is none."""
    engine = build(3)
    attach(engine, background=True)
    wanted = {}
    for tag in ("first", "second"):
        train(engine, 1)
        engine.save_checkpoint(directory, tag=tag)
        wanted[tag] = whole(engine)
    # Waits until there is a latest tag, and loads it.
    path, _ = engine.load_checkpoint(directory, load_module_only=True)
    assert os.path.basename(os.path.dirname(path)) == "second"
    for tag in ("first", "second"):
        other = build(3)
        attach(other)
        torch.manual_seed(5)
        other.load_checkpoint(directory, tag, True, False)
        # Random states are restored with the optimizer only.
        drawn = torch.rand(1)
        torch.manual_seed(5)
        assert drawn == torch.rand(1)
        found = whole(other)
        assert all(torch.equal(found[name], value) for name, value in wanted[tag].items())
        other.destroy()
    with pytest.raises(CheckpointNotFoundError, match="beside it: first, second"):
        engine.load_checkpoint(directory, tag="third")
    engine.destroy()
    other = build(2)
    attach(other)
    with pytest.raises(StateMismatchError, match="stage of ZeRO"):
        other.load_checkpoint(directory)
    other.destroy()


def whole(engine):
    """Returns the weights of all ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    # Without their optimizer they are restored as the forward uses them.
    return {
        name: safe_get_full_fp32_param(value).bfloat16()
        for name, value in engine.module.named_parameters()
    }


@pytest.mark.slow
def test_weights_are_loaded_without_their_optimizer(jobs, tmp_path):
    jobs.of(2).call(weights, str(tmp_path / "run"), timeout_seconds=60)


def dropped(directory):
    """An engine that is never destroyed warns of the error of its last save."""
    engine = build(1)
    attach(engine, background=True)
    engine.save_checkpoint(directory, tag="one")
    ours = engine.checkpoint_engine

    def fail():
        raise penstock.PenstockError("no room")

    ours.cleanup()
    ours.cleanup = fail
    with pytest.warns(PenstockWarning, match="the last save failed: no room"):
        engine.__del__()


@pytest.mark.slow
def test_an_engine_that_is_dropped_tells_of_a_save_that_failed(jobs, tmp_path):
    jobs.of(2).call(dropped, str(tmp_path / "run"))


def complete(directory):
    """Returns the steps of the example's complete tags, up to the latest one."""
    newest = directory / "latest"
    if not newest.exists():
        return []
    last = int(newest.read_text().removeprefix("global_step"))
    steps = [penstock.inspect(one.parent).step for one in directory.glob("*/manifest.json")]
    assert last in steps
    return sorted(step for step in steps if step <= last)


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_ends_as_if_they_had_not_been(tmp_path):
    killed_runs.survives(
        "deepspeed_training.py",
        tmp_path,
        KILLS,
        SEED,
        complete=complete,
        popen=forks.DeepSpeedPopen,
        ranks=2,
    )


MOVED = """
    import json, os
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.engine import DeepSpeedEngine as Engine
    import penstock
    from penstock.integrations.deepspeed import checkpoint_engine

    before = Engine.save_checkpoint
    del Engine._take_model_step
    Engine.load_checkpoint = lambda self, load_dir, *, strict: None
    try:
        checkpoint_engine.enable()
    except penstock.errors.MissingDependencyError as error:
        print(json.dumps([str(error), Engine.save_checkpoint is before]))
"""


@pytest.mark.slow
def test_methods_that_deepspeed_has_moved_are_named_and_nothing_is_wrapped():
    said, is_as_before = run_child(MOVED, is_fresh=True)
    assert "no deepspeed.runtime.engine.DeepSpeedEngine._take_model_step" in said
    assert "takes no tag, load_module_strict" in said
    assert "demands strict" in said
    assert is_as_before


def saves_with_a_newer(directory, stage, is_broken):
    """Returns the error of a first save with a newer DeepSpeed, or the losses of two steps."""
    deepspeed_here()
    from deepspeed import DeepSpeedEngine

    found, load = versions.version, None
    versions.version = lambda name: "99.0" if name == "deepspeed" else found(name)
    versions._warned.add("deepspeed")
    versions._self_checked.clear()
    try:
        engine = build(stage)
        attach(engine)
        if is_broken:
            load = DeepSpeedEngine.load_checkpoint
            DeepSpeedEngine.load_checkpoint = lambda *_, **__: (None, {})
        losses = train(engine, 1)
        try:
            engine.save_checkpoint(directory, "a")
        except MissingDependencyError as error:
            return str(error)
        return losses + train(engine, 1)
    finally:
        if load is not None:
            DeepSpeedEngine.load_checkpoint = load
        versions.version = found
        versions._warned.discard("deepspeed")


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_newer_version_is_taken_after_a_tiny_run_went_on(jobs, tmp_path, stage):
    straight = jobs.of(2).call(straight_losses, stage, 2)
    found = jobs.of(2).call(saves_with_a_newer, str(tmp_path), stage, False)
    # Random numbers that the trial drew are restored.
    assert found == straight
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


def straight_losses(stage, steps):
    return train(build(stage), steps)


def test_a_newer_version_whose_tiny_run_goes_on_otherwise_saves_nothing(jobs, tmp_path):
    told = jobs.of(2).call(saves_with_a_newer, str(tmp_path), 0, True)
    assert all("99.0 is newer" in one and "had losses of" in one for one in told), told
    assert os.listdir(tmp_path) == []


class Moved:
    """A value whose newer class does not accept its saved state."""


def test_a_value_that_cannot_be_made_is_not_called_a_file_that_is_missing(tmp_path):
    def unfit(state):
        raise ValueError("not with this version")

    penstock.register_type(Moved, vars, unfit)
    penstock.save(tmp_path / "tag", {"files": {"mp_rank_00_model_states.pt": {"a": Moved()}}})
    with pytest.raises(StateMismatchError, match="not with this version"):
        tags.read_file(str(tmp_path / "tag" / "mp_rank_00_model_states.pt"))
    with pytest.raises(CheckpointNotFoundError, match="none of it"):
        tags.read_file(str(tmp_path / "tag" / "mp_rank_01_model_states.pt"))
