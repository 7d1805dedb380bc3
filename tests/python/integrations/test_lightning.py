"""`PenstockIO` in Lightning: restored state, the time of deletions, refusals."""

import copy
import inspect
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import threading
import warnings
from pathlib import Path

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

import forks
import penstock
from conftest import mounted
from integrations.lightnings import Module, dataset, equal, fit, loader, trainer
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PenstockWarning,
    StateMismatchError,
    StorageError,
    UnsupportedPathError,
    UnsupportedStateError,
)
from penstock.integrations.lightning import PenstockIO, directories, newest
from ranks import environments_of

MIB = 1 << 20

IS_TRUSTING = "weights_only" not in inspect.signature(lightning.Trainer.fit).parameters
"""Whether this version of Lightning unpickles its files by default, as all did before 2.6."""


class Heavy(Module):
    """Its state is so large that a small disk holds only one checkpoint."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ballast", torch.zeros(5 * MIB // 4))


class Config(dict):
    """Like OmegaConf's containers: not a plain dict."""


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|torchdata")
        yield


def saved_steps(directory):
    """Returns the complete checkpoints of a directory by step, without links."""
    found = {}
    for path in Path(directory).glob("*.ckpt"):
        if not path.is_symlink():
            try:
                found[penstock.inspect(path).step] = path
            except penstock.PenstockError:
                continue
    return found


def loaded_as_a_model(directory):
    """Returns the tensors in an index, as readers of models load them."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in set(index.values()):
        found |= load_file(directory / file)
    assert found.keys() == index.keys()
    return found


def keeping_all(directory, **options):
    return [ModelCheckpoint(dirpath=directory, save_top_k=-1, **options)]


# Restored state.


@pytest.mark.parametrize(
    ("kind", "options", "saves", "bounds"),
    [
        (DataLoader, {}, {}, {}),
        (DataLoader, {}, {"monitor": "val"}, {"max_steps": 13}),
        (DataLoader, {}, {"every_n_train_steps": 5}, {}),
        (StatefulDataLoader, {}, {"every_n_train_steps": 3}, {}),
        (StatefulDataLoader, {}, {"every_n_train_steps": 5}, {"max_steps": 13}),
        (StatefulDataLoader, {"num_workers": 1}, {"every_n_train_steps": 4}, {}),
        (StatefulDataLoader, {"num_workers": 1}, {}, {}),
    ],
)
def test_a_run_goes_on_bit_for_bit_from_each_of_its_checkpoints(
    tmp_path, kind, options, saves, bounds
):
    validation = DataLoader(dataset(), batch_size=10) if "monitor" in saves else None

    def run(name, ckpt_path=None):
        directory = tmp_path / name
        epochs = -1 if bounds else 3
        io = PenstockIO(background=True)
        callbacks = keeping_all(directory, **saves)
        one = trainer(directory, io, epochs=epochs, callbacks=callbacks, **bounds)
        return fit(one, data=loader(kind, **options), validation=validation, ckpt_path=ckpt_path)

    straight = run("straight")
    checkpoints = saved_steps(tmp_path / "straight")
    assert len(checkpoints) >= 2
    for step in sorted(checkpoints)[:3]:
        resumed = run(f"from-{step}", checkpoints[step])
        assert resumed.losses == {at: loss for at, loss in straight.losses.items() if at >= step}
        assert equal(resumed, straight)


class Thorough(Module):
    """Draws in hooks, and adapts its rate to validation, at each epoch or step."""

    interval = "epoch"

    def on_train_start(self):
        torch.rand(1)

    def on_train_epoch_start(self):
        self.scale = 1 + torch.rand(1).item()

    def on_train_epoch_end(self):
        random.random()

    def training_step(self, batch, index):
        return super().training_step(batch, index) * self.scale

    def validation_step(self, batch, index):
        self.log("val", (self.net(batch[0]) - batch[0]).square().mean() + torch.rand(1).sum())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=10.0, factor=0.5
        )
        scheduler = {"scheduler": plateau, "monitor": "val", "interval": self.interval}
        return [optimizer], [scheduler | {"strict": False}]


class ThoroughSteps(Thorough):
    interval = "step"
    scale = 1.0

    def on_train_epoch_start(self):
        """Not called in a run that resumes within an epoch."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "module", "saves", "options"),
    [
        (DataLoader, Thorough, {}, {}),
        (DataLoader, Thorough, {"save_on_train_epoch_end": False}, {}),
        (DataLoader, Thorough, {"every_n_train_steps": 5}, {}),
        (DataLoader, Thorough, {}, {"reload_dataloaders_every_n_epochs": 2}),
        (StatefulDataLoader, Thorough, {"every_n_train_steps": 5}, {"max_steps": 13}),
        (StatefulDataLoader, Thorough, {}, {"reload_dataloaders_every_n_epochs": 1}),
        (StatefulDataLoader, ThoroughSteps, {"every_n_train_steps": 2}, {"val_check_interval": 2}),
        (
            StatefulDataLoader,
            ThoroughSteps,
            {"every_n_train_steps": 4},
            {"val_check_interval": 3, "check_val_every_n_epoch": None},
        ),
    ],
)
def test_what_comes_after_a_save_in_the_same_epoch_is_not_left_out(
    tmp_path, kind, module, saves, options
):
    """Validation, hooks and schedulers: Lightning runs them after a save, or skips them."""
    validation = DataLoader(dataset(), batch_size=10)

    def run(name, ckpt_path=None):
        callbacks = keeping_all(tmp_path / name, **saves)
        one = trainer(tmp_path / name, PenstockIO(), callbacks=callbacks, **options)
        return fit(one, module(), loader(kind), validation, ckpt_path=ckpt_path), one

    straight, ended = run("straight")
    checkpoints = saved_steps(tmp_path / "straight")
    for step in sorted(checkpoints):
        resumed, again = run(f"from-{step}", checkpoints[step])
        assert resumed.losses == {at: loss for at, loss in straight.losses.items() if at >= step}
        assert equal(resumed, straight)
        rates = [one.optimizers[0].param_groups[0]["lr"] for one in (ended, again)]
        assert rates[0] == rates[1]


def test_a_sampler_that_knows_its_place_begins_the_next_epoch(tmp_path):
    """It is a generator: it learns of an epoch's end at the next request for a sample."""

    def run(name, ckpt_path=None):
        data = dataset()
        sampler = StatefulDistributedSampler(data, num_replicas=1, rank=0)
        fed = StatefulDataLoader(data, batch_size=4, sampler=sampler)
        one = trainer(tmp_path / name, PenstockIO())
        return fit(one, data=fed, ckpt_path=ckpt_path)

    straight = run("straight")
    resumed = run("resumed", saved_steps(tmp_path / "straight")[5])
    assert min(resumed.losses) == 5
    assert equal(resumed, straight)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_run_that_had_ended_goes_on_with_more_epochs(tmp_path, kind):
    """Its loaders have no iterators any more."""

    def data():
        # torchdata's samplers draw their seed when they are made.
        lightning.seed_everything(1, verbose=False)
        return loader(kind)

    straight = fit(trainer(tmp_path / "straight", PenstockIO(), epochs=3), data=data())
    ended = trainer(tmp_path / "ended", PenstockIO(), epochs=2)
    fit(ended, data=data())
    ended.save_checkpoint(tmp_path / "final.ckpt")
    more = trainer(tmp_path / "more", PenstockIO(), epochs=3)
    resumed = fit(more, data=data(), ckpt_path=tmp_path / "final.ckpt")
    assert equal(resumed, straight)
    # The same trainer again.
    ended.fit_loop.max_epochs = 3
    resumed = fit(ended, data=data(), ckpt_path=tmp_path / "final.ckpt")
    assert equal(resumed, straight)


def test_a_loader_that_loses_its_place_is_told_of_when_it_is_saved(tmp_path):
    saves = {"every_n_train_steps": 3}

    def saved(name, data, **options):
        one = trainer(
            tmp_path / name, PenstockIO(), epochs=1, callbacks=keeping_all(tmp_path, **saves)
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(one, data=data)
        return [str(each.message) for each in told if each.category is PenstockWarning]

    assert saved("stateful", loader(StatefulDataLoader)) == []
    (message,) = saved("plain", loader(DataLoader))
    assert "StatefulDataLoader" in message
    # Lightning wraps samplers like this for shuffle=True on many ranks.
    sampler = DistributedSamplerWrapper(RandomSampler(dataset()), num_replicas=1, rank=0)
    fed = StatefulDataLoader(dataset(), batch_size=4, sampler=sampler)
    assert any("StatefulDistributedSampler" in message for message in saved("wrapped", fed))


def test_another_number_of_schedulers_is_an_error(tmp_path):
    class Bare(Module):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    fit(trainer(tmp_path, PenstockIO(), epochs=1))
    (path,) = saved_steps(tmp_path).values()
    with pytest.raises(StateMismatchError, match="1 schedulers") as caught:
        fit(trainer(tmp_path / "bare", PenstockIO()), Bare(), ckpt_path=path)
    assert caught.value.key == "lr_schedulers"


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_a_model_s_directory_as_well(tmp_path, background):
    io = PenstockIO(
        background=background, groups={"state_dict.net": ""}, files={"config.json": b"{}"}
    )
    module = fit(trainer(tmp_path, copy.deepcopy(io), epochs=1))
    (path,) = saved_steps(tmp_path).values()
    found = loaded_as_a_model(path)
    assert found.keys() == module.net.state_dict().keys()
    assert all(torch.equal(found[name], one) for name, one in module.net.state_dict().items())
    assert (path / "config.json").read_text() == "{}"
    assert equal(Module.load_from_checkpoint(path), module)


def test_a_checkpoint_is_one_of_penstocks_and_holds_everything(tmp_path):
    one = trainer(tmp_path, PenstockIO(), epochs=1)
    module = fit(one)
    (path,) = saved_steps(tmp_path).values()
    assert path.name == "epoch=0-step=5.ckpt"
    assert penstock.verify(path).ok
    assert penstock.inspect(path).step == 5
    state = penstock.load(path)
    assert {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks"} <= set(state)
    assert torch.equal(state["state_dict"]["net.0.weight"], module.net[0].weight)
    assert not any(file.suffix in (".pt", ".pkl", ".ckpt") for file in path.iterdir())


def test_weights_alone_can_be_saved_and_are_nothing_to_go_on_from(tmp_path):
    callbacks = keeping_all(tmp_path, save_weights_only=True)
    fit(trainer(tmp_path, PenstockIO(), epochs=1, callbacks=callbacks))
    (path,) = saved_steps(tmp_path).values()
    assert "optimizer_states" not in penstock.load(path)
    assert newest.newest([str(path)]) == []


def test_other_trainers_are_as_they_were(tmp_path):
    callbacks = keeping_all(tmp_path, save_last="link")
    fit(trainer(tmp_path, epochs=1, callbacks=callbacks))
    path = tmp_path / "epoch=0-step=5.ckpt"
    assert path.is_file()
    assert "penstock" not in torch.load(path, weights_only=False)
    assert (tmp_path / "last.ckpt").is_symlink()


def test_a_module_loads_from_a_directory(tmp_path):
    module = fit(trainer(tmp_path, PenstockIO(), epochs=1), Module(width=7))
    (path,) = saved_steps(tmp_path).values()
    loaded = Module.load_from_checkpoint(path)
    assert equal(loaded, module)
    assert loaded.hparams.width == 7


def test_evaluation_takes_a_checkpoint(tmp_path):
    data = DataLoader(dataset(), batch_size=10)
    one = trainer(tmp_path, PenstockIO(), epochs=2)
    fit(one, validation=data)
    (again,) = one.validate(Module(), data, ckpt_path="best", verbose=False)
    assert again["val"] == one.callback_metrics["val"]


# The newest checkpoint.


def test_last_is_the_highest_step_that_is_complete_whatever_the_times(tmp_path):
    io = PenstockIO()
    fit(trainer(tmp_path, io, epochs=3))
    steps = saved_steps(tmp_path)
    os.utime(steps[5], (2e9, 2e9))
    # The remains of a killed save: files without a manifest.
    shutil.copytree(steps[15], tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt" / "manifest.json").unlink()
    one = trainer(tmp_path, io, epochs=4)
    module = fit(one, ckpt_path="last")
    assert min(module.losses) == 15


def test_a_damaged_one_is_passed_over_and_said_so(tmp_path):
    fit(trainer(tmp_path, PenstockIO(), epochs=3))
    steps = saved_steps(tmp_path)
    (steps[15] / "manifest.json").write_text('{"format":"penstock-checkpoint"')
    shard = next(steps[10].glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-3000] ^= 1
    shard.write_bytes(data)
    with pytest.warns(PenstockWarning, match="passed over") as told:
        module = fit(trainer(tmp_path, PenstockIO(), epochs=4), ckpt_path="last")
    assert min(module.losses) == 5
    assert sum("passed over" in str(one.message) for one in told) == 2


def test_where_all_are_damaged_no_run_begins_anew(tmp_path):
    fit(trainer(tmp_path, PenstockIO(), epochs=1))
    (path,) = saved_steps(tmp_path).values()
    (path / "manifest.json").write_text('{"format":"penstock-checkpoint"')
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(path))):
        fit(trainer(tmp_path, PenstockIO(), epochs=1), ckpt_path="last")


def test_where_there_is_none_a_run_begins_and_says_so(tmp_path):
    with pytest.warns(PenstockWarning, match="no complete checkpoint yet"):
        module = fit(trainer(tmp_path, PenstockIO(), epochs=1), ckpt_path="last")
    assert min(module.losses) == 0


def test_slurm_goes_on_from_the_highest_complete_number_and_is_never_ahead_of_a_save(
    tmp_path, monkeypatch
):
    io = PenstockIO(background=True)
    one = trainer(tmp_path, io, epochs=2)
    connector = one._checkpoint_connector
    seen = []

    class Preempted(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            path = connector.hpc_save_path(str(tmp_path))
            trainer.save_checkpoint(path)
            seen.append(penstock.verify(path).ok)

    one.callbacks.append(Preempted())
    fit(one)
    assert seen == [True, True]
    os.mkdir(tmp_path / "hpc_ckpt_3.ckpt")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    again = trainer(tmp_path, PenstockIO(), epochs=3)
    module = fit(again)
    assert again.ckpt_path == str(tmp_path / "hpc_ckpt_2.ckpt")
    assert min(module.losses) == 10


def slurm_s(directory, rank, ranks):
    """Returns Slurm's variables of a rank, with a `scontrol` that records its calls."""
    commands = directory / "commands"
    commands.mkdir(exist_ok=True)
    scontrol = commands / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {directory / "asked"}\n')
    scontrol.chmod(0o755)
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "train",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(ranks),
        "SLURM_NTASKS_PER_NODE": str(ranks),
        "SLURM_PROCID": str(rank),
    }


class Signalled(Module):
    """Sends Slurm's signal in the middle of the third batch."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if self.trainer.ckpt_path is None and self.trainer.fit_loop.total_batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return loss


@pytest.mark.parametrize(("accumulated", "step"), [(1, 3), (2, 2)])
def test_slurm_s_signal_tears_no_step(tmp_path, monkeypatch, accumulated, step):
    """The save waits for the end of the batch, and of its accumulated gradients."""
    for name, value in slurm_s(tmp_path, 0, 1).items():
        monkeypatch.setenv(name, value)
    options = {"epochs": 2, "accumulate_grad_batches": accumulated}

    def run():
        one = trainer(tmp_path, SLURMEnvironment(), PenstockIO(), **options)
        return fit(one, Signalled(), loader(StatefulDataLoader))

    straight = run()
    assert (tmp_path / "asked").read_text() == "requeue 12345\n"
    assert penstock.inspect(tmp_path / "hpc_ckpt_1.ckpt").step == step
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        resumed = run()
    assert min(resumed.losses) == step
    assert equal(resumed, straight)


def test_what_an_exception_left_is_no_more_than_another_one(tmp_path):
    """Lightning looks for it by itself, and takes the latest file, complete or not."""
    fit(trainer(tmp_path, PenstockIO(), epochs=2))
    os.mkdir(tmp_path / "on_exception.ckpt")
    callbacks = [*keeping_all(tmp_path), OnExceptionCheckpoint(tmp_path)]
    module = fit(trainer(tmp_path, PenstockIO(), epochs=3, callbacks=callbacks))
    assert min(module.losses) == 10


# Background saves, and the time of deletions.


class Gate:
    """Holds a plug-in's background saves until it is opened."""

    def __init__(self, io):
        self.is_open = threading.Event()
        self._begin = io._alone.save_async
        io._alone.save_async = self._save_async

    def _save_async(self, path, state, *, after, **options):
        def held():
            assert self.is_open.wait(60)
            after()

        return self._begin(path, state, after=held, **options)


def test_nothing_is_deleted_before_the_one_after_it_is_durable(tmp_path):
    io = PenstockIO(background=True)
    old, new, last = (tmp_path / name for name in ("old.ckpt", "new.ckpt", "last.ckpt"))
    io.save_checkpoint({"w": torch.ones(3)}, old)
    io.link_checkpoint(str(old), str(last))
    io.wait()
    gate = Gate(io)
    w = torch.zeros(3)
    io.save_checkpoint({"w": w}, new)
    w += 5
    io.remove_checkpoint(old)
    io.link_checkpoint(str(new), str(last))
    assert penstock.load(old)["w"].sum() == 3
    assert last.resolve() == old
    gate.is_open.set()
    io.wait()
    assert not old.exists()
    assert last.resolve() == new
    assert penstock.load(last)["w"].sum() == 0
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "new.ckpt"]


def test_a_save_to_a_name_that_becomes_a_link_leaves_what_it_leads_to(tmp_path):
    io = PenstockIO(background=True)
    first, last = tmp_path / "first.ckpt", tmp_path / "last.ckpt"
    gate = Gate(io)
    io.save_checkpoint({"step": 1}, first)
    io.link_checkpoint(str(first), str(last))
    threading.Timer(0.2, gate.is_open.set).start()
    io.save_checkpoint({"step": 2}, last)
    io.wait()
    assert (penstock.load(first), penstock.load(last)) == ({"step": 1}, {"step": 2})


def test_links_follow_where_a_link_leads_to_the_directory(tmp_path):
    real, alias = tmp_path / "real", tmp_path / "alias"
    real.mkdir()
    alias.symlink_to(real)
    for name in ("a.ckpt", "b.ckpt"):
        penstock.save(real / name, {"name": name})
    directories.link(str(alias / "a.ckpt"), str(alias / "last.ckpt"))
    directories.remove(str(alias / "a.ckpt"), str(alias / "b.ckpt"))
    assert penstock.load(alias / "last.ckpt") == {"name": "b.ckpt"}


def test_after_a_save_that_failed_the_old_one_stays_until_another_is_there(tmp_path):
    io = PenstockIO(background=True)
    old = tmp_path / "old.ckpt"
    io.save_checkpoint({"step": 1}, old)
    io.wait()
    (tmp_path / "file").write_text("no directory")
    io.save_checkpoint({"step": 2}, tmp_path / "file" / "new.ckpt")
    io.remove_checkpoint(old)
    with pytest.raises(StorageError, match="file"):
        io.save_checkpoint({"step": 3}, tmp_path / "newer.ckpt")
    assert penstock.load(old) == {"step": 1}
    io.save_checkpoint({"step": 3}, tmp_path / "newer.ckpt")
    io.teardown()
    assert not old.exists()
    assert penstock.load(tmp_path / "newer.ckpt") == {"step": 3}


def test_the_error_of_the_last_save_comes_at_the_end_of_the_training(tmp_path):
    class Obstacle(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                # Waits for the previous save, as the last one is to fail.
                trainer.strategy.checkpoint_io.wait()
                shutil.rmtree(tmp_path / "ckpt")
                (tmp_path / "ckpt").write_text("no directory")

    callbacks = [*keeping_all(tmp_path / "ckpt"), Obstacle()]
    one = trainer(tmp_path, PenstockIO(background=True), epochs=2, callbacks=callbacks)
    with pytest.raises(StorageError, match="ckpt"):
        fit(one)


@pytest.mark.parametrize("background", [False, True])
def test_where_the_disk_is_full_the_last_one_loads_and_training_may_go_on(tmp_path, background):
    """The disk has room for one checkpoint only."""
    with mounted("tmpfs", tmp_path / "small", 8 * MIB) as small:
        one = trainer(
            small,
            PenstockIO(background=background, on_error="warn"),
            epochs=3,
            callbacks=keeping_all(small),
        )
        with pytest.warns(PenstockWarning, match="is not saved, training goes on") as told:
            module = fit(one, Heavy())
        assert max(module.losses) == 14
        message = next(str(each.message) for each in told if "goes on" in str(each.message))
        assert "free" in message
        steps = saved_steps(small)
        assert list(steps) == [5]
        assert penstock.verify(steps[5]).ok
        with pytest.raises(StorageError):
            fit(trainer(small, PenstockIO(background=background)), Heavy())
        assert penstock.verify(steps[5]).ok


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("saves", [{"save_last": True}, {"save_last": "link"}, {"monitor": "loss"}])
def test_at_no_moment_is_there_none_once_there_was_one(tmp_path, saves, background):
    counts = []
    is_over = threading.Event()

    def watch():
        while not is_over.is_set():
            paths = list(tmp_path.glob("*.ckpt"))
            complete = newest.newest(map(str, paths))
            counts.append(len(complete))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        callbacks = [ModelCheckpoint(dirpath=tmp_path, save_top_k=1, mode="max", **saves)]
        fit(trainer(tmp_path, PenstockIO(background=background), epochs=6, callbacks=callbacks))
    finally:
        is_over.set()
        watcher.join()
    first = next(index for index, count in enumerate(counts) if count)
    assert min(counts[first:]) >= 1
    left = sorted(os.listdir(tmp_path))
    assert not any(name.startswith(".") for name in left), left
    if saves.get("save_last") == "link":
        assert (tmp_path / "last.ckpt").resolve().name == "epoch=5-step=30.ckpt"


def test_links_follow_and_directories_give_way_to_them(tmp_path):
    for name in ("a.ckpt", "b.ckpt", "last.ckpt"):
        penstock.save(tmp_path / name, {"name": name})
    path = str(tmp_path / "last.ckpt")
    directories.link(str(tmp_path / "a.ckpt"), path)
    assert penstock.load(path) == {"name": "a.ckpt"}
    directories.remove(str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt"))
    assert penstock.load(path) == {"name": "b.ckpt"}
    directories.link(str(tmp_path / "gone.ckpt"), path)
    assert penstock.load(path) == {"name": "b.ckpt"}
    directories.remove(path, None)
    directories.remove(str(tmp_path / "gone.ckpt"), None)
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_a_run_that_is_interrupted_saves(tmp_path):
    class Failing(Module):
        def on_train_batch_end(self, outputs, batch, index):
            if self.trainer.global_step == 7:
                raise RuntimeError("interrupted")

    on_exception = OnExceptionCheckpoint(tmp_path)
    on_exception.teardown = lambda *_, **__: None
    one = trainer(tmp_path, PenstockIO(background=True), callbacks=[on_exception])
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(one, Failing())
    assert penstock.inspect(tmp_path / "on_exception.ckpt").step == 7
    again = trainer(tmp_path, PenstockIO(), callbacks=[OnExceptionCheckpoint(tmp_path)])
    module = fit(again, data=loader(StatefulDataLoader))
    assert min(module.losses) == 7


# Lightning's own checkpoints, and other existing files.


def test_a_run_that_lightning_saved_goes_on(tmp_path):
    saves = {"save_last": True}
    straight = fit(trainer(tmp_path, epochs=1, callbacks=keeping_all(tmp_path, **saves)))
    assert (tmp_path / "last.ckpt").is_file()
    one = trainer(tmp_path, PenstockIO(), epochs=2, callbacks=keeping_all(tmp_path, **saves))
    with pytest.warns(PenstockWarning, match="holds no random states"):
        module = fit(one, ckpt_path="last")
    assert min(module.losses) == 5
    assert set(straight.losses).isdisjoint(module.losses)
    # The directory has the file's name now.
    assert penstock.inspect(tmp_path / "last.ckpt").step == 10
    assert (tmp_path / "epoch=0-step=5.ckpt").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {
        "epoch=0-step=5.ckpt",
        "epoch=1-step=10.ckpt",
        "last.ckpt",
    }


@pytest.mark.parametrize("is_link", [False, True])
def test_a_name_that_is_another_s_is_taken_over_when_all_is_durable(tmp_path, is_link):
    path, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    torch.save({"global_step": 1}, other if is_link else path)
    if is_link:
        path.symlink_to(other.name)
    io = PenstockIO()
    io.save_checkpoint({"global_step": 2}, path)
    assert penstock.load(path) == {"global_step": 2}
    assert other.is_file() == is_link
    os.mkdir(tmp_path / "dcp.ckpt")
    (tmp_path / "dcp.ckpt" / ".metadata").write_bytes(b"another's")
    io.save_checkpoint({"global_step": 3}, tmp_path / "dcp.ckpt")
    assert penstock.load(tmp_path / "dcp.ckpt") == {"global_step": 3}
    assert not (tmp_path / "dcp.ckpt" / ".metadata").exists()
    # Killed before the rename: the new checkpoint counts.
    assert directories.place_for(str(tmp_path / "last.ckpt")) == str(path)


def test_what_is_no_checkpoint_is_refused_with_what_is_missing(tmp_path):
    io = PenstockIO()
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint(tmp_path / "nothing.ckpt")
    io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "half.ckpt")
    (tmp_path / "half.ckpt" / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match="half"):
        io.load_checkpoint(tmp_path / "half.ckpt")
    torch.save({"w": torch.ones(1000)}, tmp_path / "torn.ckpt")
    os.truncate(tmp_path / "torn.ckpt", 2000)
    with pytest.raises(CorruptCheckpointError, match="never finished"):
        io.load_checkpoint(tmp_path / "torn.ckpt")
    assert newest.newest([str(tmp_path / "half.ckpt")]) == []
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(UnsupportedPathError):
        io.save_checkpoint({}, "s3://bucket/a.ckpt")
    with pytest.raises(ValueError, match="on_error"):
        PenstockIO(on_error="ignore")


def test_torch_s_own_rules_hold_for_its_files(tmp_path):
    io = PenstockIO()
    torch.save({"config": Config()}, tmp_path / "a.ckpt")
    with pytest.raises(Exception, match="weights_only"):
        io.load_checkpoint(tmp_path / "a.ckpt", weights_only=True if IS_TRUSTING else None)
    assert io.load_checkpoint(tmp_path / "a.ckpt", weights_only=False) == {"config": {}}
    moved = io.load_checkpoint(tmp_path / "a.ckpt", map_location="cpu", weights_only=False)
    assert moved == {"config": {}}


@pytest.mark.parametrize(
    "map_location",
    ["meta", torch.device("meta"), {"cpu": "meta"}, lambda storage, at: storage.cpu()],
)
def test_tensors_go_where_they_are_wanted(tmp_path, map_location):
    io = PenstockIO()
    state = {"w": torch.ones(3), "more": [(torch.ones(1), "plain")]}
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    found = io.load_checkpoint(tmp_path / "a.ckpt", map_location=map_location)
    assert found["w"].is_meta == found["more"][0][0].is_meta == (not callable(map_location))
    assert found["more"][0][1] == "plain"


def test_a_plug_in_goes_to_other_processes_with_its_settings(tmp_path):
    io = PenstockIO(background=True, pickled="hyper_parameters", on_error="warn")
    other = copy.deepcopy(pickle.loads(pickle.dumps(io)))
    assert (other.background, other.pickled, other.on_error) == (True, io.pickled, "warn")
    other.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    assert other.load_checkpoint(tmp_path / "a.ckpt") == {"step": 1}


# Values that only pickle can store.


def test_what_takes_a_pickle_is_named_and_stored_by_choice_only(tmp_path):
    config = Config(lr=0.1)
    refused = Module(config=config)
    with pytest.raises(UnsupportedStateError) as caught:
        fit(trainer(tmp_path, PenstockIO(), epochs=1), refused)
    # Raised before the first step.
    assert refused.losses == {}
    assert caught.value.key == "hyper_parameters.config"
    assert "PenstockIO(pickled=['hyper_parameters'])" in str(caught.value)
    assert saved_steps(tmp_path) == {}

    io = PenstockIO(pickled="hyper_parameters.*")
    module = fit(trainer(tmp_path, io, epochs=1), Module(config=config))
    (path,) = saved_steps(tmp_path).values()
    with pytest.raises(UnsupportedStateError, match="trust=True") as caught:
        io.load_checkpoint(path, weights_only=True)
    assert caught.value.key == "hyper_parameters.config"
    with pytest.raises(UnsupportedStateError, match="trust=True"):
        Module.load_from_checkpoint(path)
    if not IS_TRUSTING:
        loaded = Module.load_from_checkpoint(path, weights_only=False)
        assert type(loaded.hparams.config) is Config
        assert loaded.hparams == module.hparams
    trusting = PenstockIO(trust=True)
    resumed = fit(trainer(tmp_path / "b", trusting, epochs=1), ckpt_path=path)
    assert equal(resumed, module)
    # As the first checkpoints have it.
    state = {"hyper_parameters": {"config": {"penstock.pickled": pickle.dumps(config)}}}
    penstock.save(tmp_path / "old.ckpt", state)
    found = trusting.load_checkpoint(tmp_path / "old.ckpt")
    assert found == {"hyper_parameters": {"config": config}}
    with pytest.raises(UnsupportedStateError, match="trust=True"):
        io.load_checkpoint(tmp_path / "old.ckpt")


class Leaving(Module):
    """Excludes unsupported values from its checkpoints."""

    def on_save_checkpoint(self, checkpoint):
        del checkpoint["hyper_parameters"]["config"]


def test_what_a_hook_leaves_out_or_nobody_saves_is_not_refused(tmp_path):
    fit(trainer(tmp_path, PenstockIO(), epochs=1), Leaving(config=Config(lr=0.1)))
    assert len(saved_steps(tmp_path)) == 1
    unsaved = trainer(tmp_path, PenstockIO(), epochs=1, callbacks=[], enable_checkpointing=False)
    assert fit(unsaved, Module(config=Config(lr=0.1))).losses


# Fabric.


def test_fabric_saves_and_loads(tmp_path):
    io = PenstockIO(background=True)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])

    def begin():
        module = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(module.parameters())
        return fabric.setup(module, optimizer)

    model, optimizer = begin()
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 7}
    fabric.save(tmp_path / "a.ckpt", state)
    other, other_optimizer = begin()
    target = {"model": other, "optimizer": other_optimizer, "step": 0}
    rest = fabric.load(tmp_path / "a.ckpt", target)
    assert (target["step"], rest) == (7, {})
    assert equal(model, other)
    moments, others = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert all(torch.equal(moments[i][key], others[i][key]) for i in moments for key in moments[i])
    io.teardown()
    fabric.save(tmp_path / "raw.ckpt", model.state_dict())
    fabric.load_raw(tmp_path / "raw.ckpt", other)


# Many ranks. The tests of the example cover bitwise resumes.


def said_by(worker, *arguments, environments, popen=forks.LightningPopen):
    """Returns the output of a program's first rank, by the first word of each line."""
    processes = [
        popen(
            [Path(__file__).with_name(worker), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        for environment in environments
    ]
    try:
        ends = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {0}, ends
    return dict(line.split(" ", 1) for line in ends[0][0].splitlines() if " " in line)


def ranks_of(directory, phase, count):
    """Returns the output of `lightning_worker.py` on the first of some ranks."""
    common = {"TORCHELASTIC_RUN_ID": "test"}
    environments = [common | environment for environment in environments_of(count)]
    return said_by("lightning_worker.py", directory, phase, count, environments=environments)


def job_of(directory, phase):
    """Returns the output of `lightning_requeue_worker.py` on the first of two ranks of Slurm."""
    environments = [
        environment | slurm_s(directory, rank, 2)
        for rank, environment in enumerate(environments_of(2))
    ]
    # One case shows that an interpreter that has saved in the background ends well.
    said = said_by(
        "lightning_requeue_worker.py",
        directory,
        phase,
        environments=environments,
        popen=forks.WholeLightningPopen if phase == "train" else forks.LightningPopen,
    )
    assert (directory / "asked").read_text() == "requeue 12345\n"
    return said


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["train", "shard"])
def test_ranks_save_together_when_slurm_s_signal_comes_to_each_at_its_own_moment(tmp_path, phase):
    """The signal reaches one rank while the other waits in a reduction. The model is a group."""
    straight = job_of(tmp_path, phase)
    path = tmp_path / "hpc_ckpt_1.ckpt"
    assert penstock.verify(path).ok
    assert penstock.inspect(path).step == 3
    resumed = job_of(tmp_path, phase)
    assert (straight.pop("begun"), resumed.pop("begun")) == ("0", "3")
    assert resumed == straight
    assert straight["warned"] == "[]"
    ends = [tmp_path / f"epoch=1-step=10{again}.ckpt" for again in ("", "-v1")]
    first, second = (penstock.load(end, keys="state_dict.*") for end in ends)
    weights = first["state_dict"]
    assert all(torch.equal(weights[name], one) for name, one in second["state_dict"].items())
    directory = ends[0]
    if phase == "shard":
        directory = tmp_path / "exported"
        penstock.export(ends[0], directory)
        found = load_file(directory / "model.safetensors")
    else:
        found = loaded_as_a_model(directory)
    assert weights.keys() == {f"net.{name}" for name in found}
    assert all(torch.equal(weights[f"net.{name}"], one) for name, one in found.items())
    assert (directory / "config.json").read_text() == "{}"


@pytest.mark.slow
def test_where_it_comes_outside_of_training_the_first_rank_saves_for_itself(tmp_path):
    job_of(tmp_path, "validate")
    state = penstock.load(tmp_path / "hpc_ckpt_1.ckpt")
    assert state["penstock"]["ranks"] == len(state["penstock"]["states"]) == 1


@pytest.mark.slow
def test_sharded_models_are_saved_by_all_ranks_and_loaded_by_any_number(tmp_path):
    said = ranks_of(tmp_path, "both", 2)
    assert said["theirs"] == "True"
    assert "PenstockModelParallelStrategy" in said["refused"]
    assert said["from"] == "3"
    path = tmp_path / "ours" / "epoch=1-step=6.ckpt"
    assert penstock.inspect(path).world_size == 2
    assert penstock.verify(path).ok
    whole = penstock.load(path, keys="state_dict.*")["state_dict"]["net.0.weight"]
    assert whole.double().sum().item() == float(said["sum"])
    # Its two epochs are over: no step is trained.
    assert ranks_of(tmp_path, path.name, 1)["sum"] == said["sum"]
    # A module that is not sharded loads it as well.
    assert torch.equal(Module.load_from_checkpoint(path).net[0].weight, whole)


def test_importing_the_plug_in_changes_nothing_in_lightning():
    code = """if True:
        import lightning.pytorch.core.saving as saving
        import lightning.pytorch.trainer.trainer as trainer

        def seen():
            return saving.pl_load, trainer._CheckpointConnector, trainer._SignalConnector

        before = seen()
        from penstock.integrations import lightning
        assert seen() == before
        lightning.{call}
        after = seen()
        assert not set(before) & set(after)
        lightning.enable()
        assert seen() == after
    """
    for call in ("PenstockIO()", "PenstockModelParallelStrategy()", "enable()"):
        arguments = ["-c", code.replace("{call}", call)]
        forks.run(arguments, check=True, popen=forks.LightningPopen)
