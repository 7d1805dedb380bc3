"""Hugging Face Accelerate with Penstock: saves, resumes, and refusals."""

from __future__ import annotations

import gc
import json
import os
import shutil
import warnings
from functools import partial

import accelerate
import killed_runs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from torch import nn

import forks
import penstock
from conftest import mounted, slow
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingDependencyError,
    PenstockWarning,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)
from penstock.integrations import versions
from penstock.integrations.accelerate import attach
from penstock.integrations.first_rank import from_first

KILLS = int(os.environ.get("PENSTOCK_TORTURE_ACCELERATE_KILLS", "3"))
SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", "31"))


class Progress:
    """A custom object."""

    def __init__(self):
        self.state = {"step": 0}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture(autouse=True)
def _forget():
    yield
    forget()


def forget():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()


class Run:
    """A small training with all kinds of state; ``penstock`` chooses the library that saves it."""

    def __init__(self, directory=None, *, penstock=True, limit=None, loader=(True, True), **how):
        forget()
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            project_config=ProjectConfiguration(
                project_dir=None if directory is None else str(directory),
                automatic_checkpoint_naming=directory is not None,
                total_limit=limit,
            ),
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader=loader[0], use_seedable_sampler=loader[1]
            ),
            gradient_accumulation_steps=how.pop("accumulate", 1),
        )
        if penstock:
            attach(self.accelerator, **how)
        set_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        data = torch.arange(40.0).view(10, 4)
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @property
    def step(self):
        return self.progress.state["step"]

    def train(self, until, every=None):
        """Trains up to a step, and returns each step's loss."""
        losses = []
        while self.step < until:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    # Draws from each kind of generator.
                    noise = np.random.random() + np.random.default_rng(0).random()
                    loss = self.model(batch).sum() + noise
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.progress.state = {"step": self.step + 1}
                losses.append(loss.item())
                if every and self.step % every == 0:
                    self.accelerator.save_state()
                if self.step == until:
                    break
        return losses

    def bits(self):
        return [one.detach().clone() for one in self.model.parameters()]


def checkpoints(directory):
    return sorted(os.listdir(directory / "checkpoints"))


def damaged(path):
    """Truncates the manifest of a checkpoint, so that it exists but is invalid."""
    with open(path / "manifest.json", "r+b") as file:
        file.truncate(100)


# 3 in the middle of an epoch, 5 at its end, in the body of its last batch.
@pytest.mark.parametrize("stop", [3, *slow(5, 7)])
@pytest.mark.parametrize(
    "how", [{}, *slow({"background": True}, {"background": True, "lazy": True})]
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, stop, how):
    straight = Run(tmp_path / "straight")
    wanted = straight.train(12, every=stop)
    run = Run(tmp_path / "run", **how)
    first = run.train(stop, every=stop)
    run.accelerator.end_training()
    resumed = Run(tmp_path / "run", **how)
    resumed.scheduler.step()
    resumed.accelerator.load_state()
    assert resumed.step == stop
    assert first + resumed.train(12) == wanted
    assert all(map(torch.equal, resumed.bits(), straight.bits()))
    assert resumed.scheduler.state_dict() == straight.scheduler.state_dict()


@pytest.mark.slow
def test_what_is_saved_is_one_checkpoint_with_the_names_of_accelerate(tmp_path):
    run = Run()
    run.train(3)
    path = run.accelerator.save_state(tmp_path / "state")
    state = penstock.load(path)
    assert list(state) == [
        "model",
        "optimizer",
        "scheduler",
        "dataloader",
        "custom_checkpoint_0",
        "scaler",
        "accelerator",
        "rng",
    ]
    assert torch.equal(state["model"]["0.weight"], run.model[0].weight)
    assert state["custom_checkpoint_0"] == {"step": 3}
    assert state["scaler"]["scale"] == 8.0
    assert not [name for name in os.listdir(path) if name.endswith((".bin", ".pkl", ".pt"))]
    # To the same path again, as Accelerate allows.
    run.train(4)
    run.accelerator.save_state(tmp_path / "state")
    assert penstock.load(path)["custom_checkpoint_0"] == {"step": 4}


@pytest.mark.slow
def test_a_loader_that_does_not_know_its_place_begins_the_right_epoch(tmp_path):
    straight = Run(loader=(False, True))
    wanted = straight.train(15)
    assert Run(tmp_path, loader=(False, True)).train(5, every=5) == wanted[:5]
    resumed = Run(tmp_path, loader=(False, True))
    resumed.accelerator.load_state()
    assert resumed.train(15) == wanted[5:]


@pytest.mark.slow
def test_an_order_that_cannot_come_back_is_told_once(tmp_path):
    run = Run(tmp_path, loader=(True, False))
    with pytest.warns(PenstockWarning, match="use_seedable_sampler") as told:
        run.train(4, every=1)
    assert len([one for one in told if "loader 0" in str(one.message)]) == 1
    run = Run(tmp_path / "seedable")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        run.train(4, every=1)


def test_gradients_that_would_be_lost_are_told(tmp_path):
    run = Run(tmp_path, accumulate=2)
    with pytest.warns(PenstockWarning, match="gradients that are accumulated"):
        run.train(1, every=1)


@pytest.mark.slow
def test_a_missing_part_is_an_error_and_nothing_is_changed(tmp_path):
    run = Run()
    run.train(2)
    path = run.accelerator.save_state(tmp_path / "state")
    other = Run()
    other.accelerator._schedulers.clear()
    before = other.bits()
    with pytest.raises(StateMismatchError, match="'scheduler' is in the checkpoint"):
        other.accelerator.load_state(path)
    other = Run()
    other.accelerator.register_for_checkpointing(Progress())
    with pytest.raises(StateMismatchError, match="custom_checkpoint_1"):
        other.accelerator.load_state(path)
    assert all(map(torch.equal, other.bits(), before))
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        other.accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="strict"):
        other.accelerator.load_state(path, strict=False)


@pytest.mark.slow
def test_a_module_that_is_registered_is_compared_before_anything_changes(tmp_path):
    def averaged(width):
        run = Run()
        run.average = torch.optim.swa_utils.AveragedModel(nn.Linear(width, 2))
        run.accelerator.register_for_checkpointing(run.average)
        return run

    run = averaged(3)
    path = run.accelerator.save_state(tmp_path / "state")
    same = averaged(3)
    same.accelerator.load_state(path)
    assert torch.equal(same.average.module.weight, run.average.module.weight)
    other = averaged(4)
    with torch.no_grad():
        other.model[0].weight.zero_()
    with pytest.raises(StateMismatchError, match="nothing was changed"):
        other.accelerator.load_state(path)
    assert not other.model[0].weight.any()


@pytest.mark.slow
def test_an_object_without_a_state_is_an_error_when_it_is_saved(tmp_path):
    run = Run()
    run.progress.state = None
    with pytest.raises(UnsupportedStateError, match="returned None"):
        run.accelerator.save_state(tmp_path / "state")


@pytest.mark.slow
def test_random_states_that_are_missing_are_an_error(tmp_path):
    run = Run()
    path = run.accelerator.save_state(tmp_path / "state")
    state = penstock.load(path)
    del state["rng"]
    metadata = penstock.inspect(path).metadata
    penstock.save(path, state, overwrite=True, metadata=metadata)
    with pytest.raises(StateMismatchError, match="rng"):
        run.accelerator.load_state(path)


@pytest.mark.slow
def test_the_limit_deletes_only_what_is_older_than_the_newest(tmp_path):
    run = Run(tmp_path, limit=2)
    run.train(5, every=1)
    assert checkpoints(tmp_path) == ["checkpoint_3", "checkpoint_4"]
    # A directory that a kill left, a half-deleted one, and one of a user.
    os.remove(tmp_path / "checkpoints" / "checkpoint_3" / "manifest.json")
    (tmp_path / "checkpoints" / ".checkpoint_1.removing").mkdir()
    (tmp_path / "checkpoints" / "best").mkdir()
    run.accelerator.save_state()
    run.accelerator.save_state()
    assert checkpoints(tmp_path) == ["best", "checkpoint_5", "checkpoint_6"]


@pytest.mark.slow
def test_of_a_link_only_the_link_is_deleted(tmp_path):
    run = Run(tmp_path / "run", limit=1)
    run.train(1, every=1)
    place, archive = tmp_path / "run/checkpoints/checkpoint_0", tmp_path / "archive"
    shutil.move(place, archive)
    place.symlink_to(archive)
    run.accelerator.save_state()
    assert os.listdir(place.parent) == ["checkpoint_1"]
    assert penstock.verify(archive).ok


@pytest.mark.slow
def test_a_save_that_fails_deletes_nothing_and_training_goes_on(tmp_path, monkeypatch):
    run = Run(tmp_path, limit=1)
    run.train(1, every=1)
    with mounted("tmpfs", tmp_path / "small", 1 << 20) as small:
        shutil.copytree(tmp_path / "checkpoints", small / "checkpoints")
        monkeypatch.setattr(run.accelerator.project_configuration, "project_dir", str(small))
        run.accelerator.register_for_checkpointing(Progress())
        run.accelerator._custom_objects[-1].state = {"large": torch.zeros(1 << 20)}
        with pytest.raises(StorageError, match="free"):
            run.accelerator.save_state()
        assert "checkpoint_0" in checkpoints(small)
        run.accelerator._custom_objects.pop()
        resumed = Run(small, limit=1)
        resumed.accelerator.load_state()
        assert resumed.step == 1
        resumed.train(2, every=1)
        assert checkpoints(small) == ["checkpoint_1"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["save_state", "load_state", "end_training"])
def test_an_error_in_the_background_comes_from_the_next_call(tmp_path, method):
    with mounted("tmpfs", tmp_path / "small", 1 << 20) as small:
        run = Run(small, background=True, limit=1)
        run.train(1, every=1)
        run.progress.state = {"step": 1, "large": torch.ones(1 << 20)}
        run.accelerator.save_state()
        with pytest.raises(StorageError, match="free"):
            getattr(run.accelerator, method)()
        run.progress.state = {"step": 1}
        run.accelerator.save_state()
        run.accelerator.end_training()
        assert checkpoints(small) == ["checkpoint_2"]
        resumed = Run(small)
        resumed.accelerator.load_state()
        assert resumed.step == 1


@pytest.mark.slow
def test_the_newest_is_the_highest_number_that_is_complete(tmp_path):
    run = Run(tmp_path)
    run.train(11, every=1)
    root = tmp_path / "checkpoints"
    os.remove(root / "checkpoint_10" / "manifest.json")
    os.utime(root / "checkpoint_2")
    resumed = Run(tmp_path)
    with pytest.warns(PenstockWarning, match="checkpoint_10 is passed over"):
        resumed.accelerator.load_state()
    assert resumed.step == 10
    # Into the remains of the interrupted save.
    resumed.train(11, every=1)
    assert penstock.verify(root / "checkpoint_10").ok
    with pytest.raises(CheckpointExistsError, match="went further"):
        Run(tmp_path).accelerator.save_state()


@pytest.mark.slow
def test_a_run_begins_anew_only_where_nothing_was_saved(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        run.accelerator.load_state()
    run.accelerator.save_state()
    damaged(tmp_path / "checkpoints" / "checkpoint_0")
    with pytest.warns(PenstockWarning), pytest.raises(CorruptCheckpointError):
        run.accelerator.load_state()


@pytest.mark.slow
def test_what_accelerate_saved_is_loaded_by_its_own_code(tmp_path):
    old = Run(tmp_path, penstock=False)
    first = old.train(3, every=3)
    wanted = old.train(8)
    run = Run(tmp_path)
    run.accelerator.load_state()
    assert run.step == 3
    assert len(first) == 3
    assert run.accelerator.save_iteration == 1
    got = run.train(8)
    run.accelerator.save_state()
    assert checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_1"]
    # Dropout draws other numbers: Accelerate's loader draws a seed when it restarts.
    assert len(got) == len(wanted)
    resumed = Run(tmp_path)
    resumed.accelerator.load_state()
    assert resumed.step == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random_states_0.pkl", "scheduler.bin", "optimizer.bin"])
def test_what_accelerate_saved_by_half_is_refused(tmp_path, name):
    Run(tmp_path, penstock=False).train(1, every=1)
    path = tmp_path / "checkpoints" / "checkpoint_0"
    os.remove(path / name)
    run = Run(tmp_path)
    with pytest.raises(IncompleteCheckpointError, match=name):
        run.accelerator.load_state(path)
    with pytest.raises(CheckpointExistsError, match="accelerate saved itself"):
        run.accelerator.save_state()


@pytest.mark.slow
def test_what_takes_a_pickle_is_named_and_stored_by_choice_and_trust(tmp_path):
    run = Run()
    run.progress.state = {"step": 0, "config": [Progress, {"a": {1, 2}}]}
    with pytest.raises(UnsupportedStateError, match="pickled=") as error:
        run.accelerator.save_state(tmp_path / "state")
    assert error.value.key == "custom_checkpoint_0.config.0"
    assert not (tmp_path / "state" / "manifest.json").exists()
    chosen = Run(pickled=["custom_checkpoint_0.config"])
    chosen.progress.state = run.progress.state
    path = chosen.accelerator.save_state(tmp_path / "state")
    with pytest.raises(UnsupportedStateError, match="trust=True"):
        chosen.accelerator.load_state(path)
    trusting = Run(trust=True)
    trusting.accelerator.load_state(path)
    assert trusting.progress.state == run.progress.state


def test_what_cannot_be_stored_is_named_when_it_is_given():
    run = Run()
    odd = Progress()
    odd.state = {"config": Progress}
    with pytest.raises(UnsupportedStateError, match="pickled=") as error:
        run.accelerator.register_for_checkpointing(odd)
    assert error.value.key == "custom_checkpoint_1.config"
    Run(pickled=["custom_checkpoint_1.config"]).accelerator.register_for_checkpointing(odd)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(UnsupportedStateError) as error:
        Run().accelerator.prepare(optimizer)
    assert error.value.key == "optimizer_1.param_groups.0.hook"


@pytest.mark.slow
def test_hooks_save_models_by_themselves(tmp_path):
    run = Run()
    removed = []

    def save(models, weights, directory):
        torch.save(weights.pop(), os.path.join(directory, "mine.pt"))

    def load(models, directory):
        removed.append(models.pop())
        removed[0].load_state_dict(torch.load(os.path.join(directory, "mine.pt")))

    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.register_load_state_pre_hook(load)
    run.train(2)
    wanted = run.bits()
    path = run.accelerator.save_state(tmp_path / "state")
    assert "model" not in penstock.load(path)
    run.train(4)
    run.accelerator.load_state(path)
    assert all(map(torch.equal, run.bits(), wanted))
    assert run.optimizer.state_dict()["state"][0]["step"] == 2


@pytest.mark.slow
def test_what_is_not_supported_is_refused(monkeypatch):
    run = Run()
    with pytest.raises(ValueError, match="already"):
        attach(run.accelerator)
    other = Run(penstock=False).accelerator
    with pytest.raises(ValueError, match="lazy=True"):
        attach(other, lazy=True)
    with pytest.raises(ValueError, match="two groups have one name"):
        attach(other, groups={"model": "", "model_1": ""})
    monkeypatch.setattr(other.project_configuration, "save_on_each_node", True)
    with pytest.raises(ValueError, match="save_on_each_node"):
        attach(other)
    kind = type(other.distributed_type)
    monkeypatch.setattr(other.state, "distributed_type", kind.DEEPSPEED)
    with pytest.raises(UnsupportedStateError, match="deepspeed"):
        attach(other)


@pytest.fixture
def newer(monkeypatch):
    """Pretends that a newer, untested Accelerate is installed."""
    found = versions.version
    monkeypatch.setattr(
        versions, "version", lambda name: "99.0" if name == "accelerate" else found(name)
    )
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setattr(versions, "_self_checked", set())


def test_a_newer_version_is_taken_after_a_tiny_state_has_come_back(tmp_path, newer):
    with pytest.warns(versions.NewerVersionWarning, match=r"99\.0 is newer"):
        run = Run(tmp_path, background=True)
    before = torch.get_rng_state()
    path = run.accelerator.save_state()
    assert versions._self_checked == {"accelerate"}
    assert torch.equal(torch.get_rng_state(), before)
    run.accelerator.load_state(path)
    assert checkpoints(tmp_path) == ["checkpoint_0"]


def test_a_newer_version_in_which_something_does_not_come_back_is_refused(
    tmp_path, monkeypatch, newer
):
    run = Run(tmp_path)
    saves = type(run.accelerator.save_state.__self__)
    monkeypatch.setattr(saves, "_load", lambda *_: None)
    with pytest.raises(MissingDependencyError, match=r"99\.0.* came back otherwise"):
        run.accelerator.save_state()
    assert not (tmp_path / "checkpoints").exists() or checkpoints(tmp_path) == []


def test_what_has_moved_is_named_and_older_versions_are_refused(monkeypatch):
    other = Run(penstock=False).accelerator
    del other._custom_objects
    monkeypatch.delattr(accelerate.Accelerator, "save_iteration")
    with pytest.raises(MissingDependencyError) as caught:
        attach(other)
    assert "_custom_objects" in str(caught.value)
    assert "save_iteration" in str(caught.value)
    monkeypatch.setattr(versions, "version", lambda _: "1.5.2")
    with pytest.raises(MissingDependencyError, match=r"from 1\.6 on, and 1\.5\.2 is"):
        attach(other)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"background": True}, {"background": True, "lazy": True}])
def test_a_model_is_where_readers_of_models_look_for_it(tmp_path, how):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    run = Run(groups={"model": ""}, files=tmp_path / "base", **how)
    run.train(2)
    path = run.accelerator.save_state(tmp_path / "state")
    run.accelerator.end_training()
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(run.model.state_dict())
    assert (path / "config.json").read_text() == "{}"
    resumed = Run()
    resumed.accelerator.load_state(path)
    assert all(map(torch.equal, resumed.bits(), run.bits()))


def begin_rank(directory, *, is_sharded, limit=None, seed=3, is_seedable=True):
    """Starts a training on one of the ranks of a job."""
    forget()
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(size)
    accelerator = accelerate.Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=directory, automatic_checkpoint_naming=True, total_limit=limit
        ),
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=True, use_seedable_sampler=is_seedable
        ),
    )
    if is_sharded:
        # Accelerate supports FSDP on devices only; on the CPU everything else works.
        shared = AcceleratorState._shared_state
        shared["distributed_type"] = type(accelerator.distributed_type).FSDP
        shared["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    set_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.arange(96.0).view(24, 4)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader)
    set_seed(7, device_specific=True)
    return accelerator, *prepared


def run_rank(directory, steps, *, is_sharded, resumes=False, saves=True, seed=3):
    """Returns the losses of one rank, and its weights."""
    accelerator, model, optimizer, loader = begin_rank(directory, is_sharded=is_sharded, seed=seed)
    if saves:
        attach(accelerator, groups={"model": ""}, files={"config.json": b"{}"})
    if resumes:
        accelerator.load_state()
    losses = []
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == steps:
            if saves:
                accelerator.save_state()
            break
    weights = [one.to_local() if is_sharded else one for one in model.parameters()]
    return losses, [one.detach().clone().numpy() for one in weights]


def run_ranks(jobs, *arguments, **how):
    return jobs.of(2).call(_call, arguments, how)


def _call(arguments, how):
    return _call_with(partial(run_rank, **how), *arguments)


def _call_with(function, *arguments):
    try:
        return function(*arguments)
    finally:
        forget()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_ranks_save_one_checkpoint_and_go_on_bit_for_bit(jobs, tmp_path, is_sharded):
    how = {"is_sharded": is_sharded}
    straight = run_ranks(jobs, str(tmp_path / "straight"), 6, **how)
    first = run_ranks(jobs, str(tmp_path / "run"), 4, **how)
    # The saved run determines the order of the data, whatever seed the new one has.
    second = run_ranks(jobs, str(tmp_path / "run"), 2, resumes=True, seed=4, **how)
    path = tmp_path / "run" / "checkpoints" / "checkpoint_0"
    assert penstock.inspect(path).world_size == 2
    # There is no index for sharded tensors.
    assert (path / "model.safetensors.index.json").exists() != is_sharded
    assert (path / "config.json").exists()
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == straight[rank][0]
        assert all(map(np.array_equal, second[rank][1], straight[rank][1]))
    assert straight[0][0] != straight[1][0]


def warned_of_order(directory, is_seedable):
    """Returns whether a rank is warned when it saves in the middle of an epoch."""
    accelerator, *_, loader = begin_rank(directory, is_sharded=False, is_seedable=is_seedable)
    attach(accelerator)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in zip(range(2), loader, strict=False):
            accelerator.save_state()
    return any("use_seedable_sampler" in str(one.message) for one in told)


@pytest.mark.parametrize("is_seedable", [True, False])
def test_ranks_are_warned_of_an_order_that_cannot_come_back(jobs, tmp_path, is_seedable):
    found = jobs.of(2).call(_call_with, warned_of_order, str(tmp_path), is_seedable)
    assert found == [not is_seedable, not is_seedable]


def _look():
    """Returns the path of a rank's error after a search that failed on the first rank."""

    def find():
        if dist.get_rank():
            raise AssertionError("only the first rank looks")
        raise CheckpointNotFoundError("there is nothing", path="/nowhere")

    try:
        from_first(find)
    except CheckpointNotFoundError as error:
        return error.path
    return from_first(lambda: "found")


def test_what_the_first_rank_finds_is_an_error_or_a_checkpoint_of_all(jobs):
    assert jobs.of(2).call(_look) == ["/nowhere", "/nowhere"]


def complete(directory):
    """Returns the complete steps in the directory of the example."""
    found = (directory / "checkpoints").glob("checkpoint_*/manifest.json")
    states = [penstock.load(one.parent, keys="custom_checkpoint_0.step") for one in found]
    return sorted(state["custom_checkpoint_0"]["step"] for state in states)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path, ranks):
    if ranks is not None and KILLS < 10:
        pytest.skip("the example's test kills two ranks once: see make torture WHAT=frameworks")
    killed_runs.survives(
        "accelerate_training.py",
        tmp_path,
        KILLS,
        SEED,
        complete=complete,
        popen=forks.AcceleratePopen,
        ranks=ranks,
    )
