"""Lightning with `PenstockIO`: resumed runs, and supported versions of Lightning."""

from __future__ import annotations

import warnings
from collections import deque

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset

import penstock
from integrations.lightnings import Module, equal, fit, trainer
from penstock.errors import MissingDependencyError, StateMismatchError
from penstock.integrations import versions
from penstock.integrations.lightning import PenstockIO, connector, fitting, loggers, resume_position


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|torchdata")
        yield


class Unscheduled(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Added(Callback):
    """Adds a scheduler when training begins, as some callbacks do."""

    def on_train_start(self, trainer, module):
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1, 0.9)
        kind = type(trainer.lr_scheduler_configs[0])
        trainer.lr_scheduler_configs.append(kind(scheduler))


@pytest.mark.parametrize("kind", [Module, Unscheduled])
def test_a_run_that_averages_weights_goes_on(tmp_path, kind):
    def run(name, ckpt_path=None):
        averages = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=2)
        saves = ModelCheckpoint(dirpath=tmp_path / name, filename="{epoch}", save_top_k=-1)
        one = trainer(tmp_path, PenstockIO(), epochs=5, callbacks=[averages, saves])
        return fit(one, kind(), ckpt_path=ckpt_path)

    straight = run("straight")
    for epoch in range(4):
        resumed = run(f"from-{epoch}", tmp_path / "straight" / f"epoch={epoch}.ckpt")
        assert resumed.losses == {
            step: loss for step, loss in straight.losses.items() if step in resumed.losses
        }
        assert equal(resumed, straight)


def test_schedulers_that_a_callback_adds_are_not_those_of_the_module(tmp_path):
    def run(name, kind, callbacks, **options):
        saves = ModelCheckpoint(dirpath=tmp_path / name, filename="{epoch}", save_top_k=-1)
        one = trainer(tmp_path, PenstockIO(), callbacks=[*callbacks, saves], **options)
        return fit(one, kind(), ckpt_path=options.pop("path", None))

    run("run", Module, [Added()], epochs=1)
    path = tmp_path / "run" / "epoch=0.ckpt"
    assert len(penstock.load(path)["lr_schedulers"]) == 2
    for callbacks in ([Added()], []):
        fit(trainer(tmp_path, PenstockIO(), epochs=2, callbacks=callbacks), ckpt_path=path)
    with pytest.raises(StateMismatchError, match="schedulers"):
        fit(trainer(tmp_path, PenstockIO(), epochs=2), Unscheduled(), ckpt_path=path)


class Drained(IterableDataset):
    """A queue: items are consumed. Five items are an epoch."""

    def __init__(self, items):
        self.queue = deque(items)

    def __iter__(self):
        for _ in range(5):
            if not self.queue:
                return
            yield torch.full((8,), float(self.queue.popleft()))


class Seeing(Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, index):
        self.seen += [int(one) for one in batch[:, 0]]
        return super().training_step([batch], index)


@pytest.mark.parametrize("saves", [{}, {"every_n_train_steps": 5}])
def test_a_resume_takes_each_item_of_a_queue_once(tmp_path, saves):
    def run(name, items, epochs, ckpt_path=None):
        callback = ModelCheckpoint(
            dirpath=tmp_path / name, filename="{step}", save_top_k=-1, **saves
        )
        one = trainer(tmp_path, PenstockIO(), epochs=epochs, callbacks=[callback])
        data = DataLoader(Drained(items), batch_size=1)
        return fit(one, Seeing(), data, ckpt_path=ckpt_path).seen

    assert run("straight", range(15), 3) == [*range(15)]
    for step in (5, 10):
        path = tmp_path / "straight" / f"step={step}.ckpt"
        assert run(f"from-{step}", range(step, 15), 3, path) == [*range(step, 15)]


def test_a_whole_checkpoint_is_good_where_ranks_have_no_group_yet(tmp_path):
    fit(trainer(tmp_path, PenstockIO(), epochs=1))
    (path,) = tmp_path.glob("*.ckpt")
    strategy = DDPStrategy(process_group_backend="gloo")
    one = trainer(tmp_path, PenstockIO(), strategy=strategy, devices=2)
    assert one.world_size == 2
    one._checkpoint_connector.resume_start(path)
    assert one._checkpoint_connector._loaded_checkpoint["global_step"] == 5


def test_one_rank_warns_for_all(monkeypatch):
    saved = {"ranks": 4, "states": [{"rng": rank} for rank in range(4)]}
    monkeypatch.setattr(resume_position.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(resume_position.dist, "get_world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(resume_position.dist, "get_rank", lambda rank=rank: rank)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert resume_position._own(saved, "last.ckpt") == {"rng": rank}
            assert resume_position._own(None, "last.ckpt") == {}
        assert len(told) == (2 if rank == 0 else 0)


# Versions.


@pytest.fixture
def newer(monkeypatch):
    """Pretends that a newer, untested Lightning is installed."""
    found = versions.version
    monkeypatch.setattr(
        versions, "version", lambda name: "99.0" if name == "lightning" else found(name)
    )
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setattr(versions, "_self_checked", set())


def test_a_newer_version_is_taken_after_a_tiny_run_has_gone_on(tmp_path, newer):
    with pytest.warns(versions.NewerVersionWarning, match=r"99\.0 is newer"):
        versions.check_version("lightning", "2.5", "2.6")
    before = torch.get_rng_state()
    io = PenstockIO()
    assert versions._self_checked == {"lightning"}
    assert torch.equal(torch.get_rng_state(), before)
    fit(trainer(tmp_path, io, epochs=1))
    assert len([*tmp_path.glob("*.ckpt")]) == 1


def test_a_newer_version_in_which_something_does_not_come_back_is_refused(monkeypatch, newer):
    def forget(self):
        pass

    monkeypatch.setattr(connector.Connector, "restore_optimizers_and_schedulers", forget)
    with pytest.raises(MissingDependencyError, match=r"99\.0.* otherwise"):
        PenstockIO()


def test_what_has_moved_in_lightning_is_named(monkeypatch):
    monkeypatch.setattr(WandbLogger, "_scan_and_log_checkpoints", loggers._upload_files)
    fitting.check()
    monkeypatch.delattr(ModelCheckpoint, "_find_last_checkpoints")
    monkeypatch.setattr("lightning.pytorch.loops.fit_loop._FitLoop.setup_data", lambda self: None)
    with pytest.raises(MissingDependencyError) as caught:
        fitting.check()
    assert "ModelCheckpoint._find_last_checkpoints" in str(caught.value)
    assert "uses no _load_combined_loader_states" in str(caught.value)
    assert lightning.__version__ in str(caught.value)
