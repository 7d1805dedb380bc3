"""Parts of Lightning that expect a checkpoint to be a file, and find a directory."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from torch.utils.data import DataLoader, TensorDataset

import penstock
from integrations.lightnings import Module, fit, trainer
from penstock.errors import PenstockWarning
from penstock.integrations.lightning import PenstockIO, loggers


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|torchdata|mlflow|wandb|pydantic")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def trained(directory, logger, *, background, **saves):
    """Trains two epochs, saves each, and returns the callback that saved."""
    saves = {"save_top_k": -1, "filename": "{epoch}"} | saves
    callback = ModelCheckpoint(dirpath=directory / "checkpoints", **saves)
    io = PenstockIO(background=background)
    options = {"logger": logger, "callbacks": [callback]}
    fit(trainer(directory, io, epochs=2, **options))
    return callback


@pytest.fixture
def mlflow():
    """Ends MLflow's threads, which it leaves to the end of the process."""
    yield pytest.importorskip("mlflow")
    for one in gc.get_objects():
        if isinstance(one, ThreadPoolExecutor) and "Mlflow" in one._thread_name_prefix:
            one.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("log_model", "background"), [(True, False), ("all", True)])
def test_mlflow_has_each_checkpoint_whole(tmp_path, monkeypatch, mlflow, log_model, background):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address = (tmp_path / "runs").as_uri()
    logger = MLFlowLogger(
        "run", tracking_uri=address, artifact_location=f"{tmp_path}/artifacts", log_model=log_model
    )
    trained(tmp_path, logger, background=background)
    client = mlflow.MlflowClient(address)
    for name in ("epoch=0", "epoch=1"):
        path = client.download_artifacts(logger.run_id, f"{name}/{name}.ckpt", str(tmp_path))
        assert penstock.verify(path)
        kept = penstock.load(tmp_path / "checkpoints" / f"{name}.ckpt")["state_dict"]
        found = Module.load_from_checkpoint(path).state_dict()
        assert all(torch.equal(found[key], kept[key]) for key in kept)


@pytest.mark.slow
def test_wandb_has_each_checkpoint_whole(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # Not by `offline=True`, with which Lightning uploads no model.
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        for log_model in (True, "all"):
            directory = tmp_path / str(log_model)
            directory.mkdir()
            check_wandb(directory, log_model)
            wandb.finish()
    finally:
        wandb.teardown()


def check_wandb(directory, log_model):
    uploaded = []
    logger = WandbLogger("run", save_dir=str(directory), log_model=log_model, project="penstock")
    log = logger.experiment.log_artifact

    def noted(artifact, aliases):
        uploaded.append((artifact, aliases))
        return log(artifact, aliases=aliases)

    logger.experiment.log_artifact = noted
    trained(directory, logger, background=True, monitor="loss")
    assert len(uploaded) == 2
    assert ["latest", "best"] in [aliases for _, aliases in uploaded]
    for artifact, _ in uploaded:
        name = artifact.metadata["original_filename"]
        saved = directory / "checkpoints" / name
        sizes = {f"model.ckpt/{one.name}": one.stat().st_size for one in saved.iterdir()}
        entries = artifact.manifest.entries
        assert {path: entry.size for path, entry in entries.items()} == sizes


def test_neptune_says_that_it_uploads_none(tmp_path):
    class NeptuneLogger:
        _log_model_checkpoints = True

        def after_save_checkpoint(self, callback):
            raise AssertionError("it takes files only")

    loggers._replace_neptune(NeptuneLogger)
    loggers._replace_neptune(NeptuneLogger)
    path = tmp_path / "last.ckpt"
    penstock.save(path, {"step": 1})
    callback = types.SimpleNamespace(last_model_path=str(path), current_score=None)
    with pytest.warns(PenstockWarning, match="none is uploaded"):
        NeptuneLogger().after_save_checkpoint(callback)


class Scaled(lightning.LightningModule):
    """A model whose outputs depend on an argument."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.save_hyperparameters()
        self.scale = scale
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def test_step(self, batch, index):
        self.log("scale", self.scale)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(2, 1)))

    test_dataloader = train_dataloader


class Odd(Scaled):
    """A model that stores none of its arguments."""

    def __init__(self, scale: float = 1.0):
        super().__init__(scale)
        self._hparams.clear()
        self._hparams_initial.clear()


def commanded(*words, directory, kind=Scaled):
    """Runs a command of `LightningCLI` with Penstock, and returns the CLI."""
    from lightning.pytorch.cli import LightningCLI

    defaults = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "default_root_dir": str(directory),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": [PenstockIO()],
        "callbacks": [ModelCheckpoint(dirpath=directory, filename="one")],
    }
    return LightningCLI(
        kind,
        Data,
        args=list(map(str, words)),
        trainer_defaults=defaults,
        save_config_callback=None,
    )


@pytest.mark.parametrize("command", ["test", "validate", "fit"])
def test_a_command_builds_the_model_that_a_checkpoint_was_saved_of(tmp_path, monkeypatch, command):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    if not hasattr(LightningCLI, "_parse_ckpt_path"):
        pytest.skip("this version of Lightning reads no hyper-parameters of a checkpoint")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(Scaled, "validation_step", Scaled.test_step, raising=False)
    monkeypatch.setattr(Data, "val_dataloader", Data.train_dataloader, raising=False)
    commanded("fit", "--model.scale=7", directory=tmp_path)
    path = tmp_path / "one.ckpt"
    assert path.is_dir()
    cli = commanded(command, f"--ckpt_path={path}", directory=tmp_path)
    assert cli.model.scale == 7
    assert str(cli.config[command].ckpt_path) == str(path)


CONFIGURED = """
import lightning.pytorch as lightning
import torch
from lightning.pytorch.cli import LightningCLI


class Scaled(lightning.LightningModule):
    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def test_step(self, batch, index):
        print("scale", self.hparams.scale)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2))

    test_dataloader = train_dataloader


LightningCLI(Scaled, Data, save_config_callback=None)
"""

PLUGGED = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  plugins:
    - class_path: penstock.integrations.lightning.PenstockIO
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: ., filename: one}
"""


def test_a_program_that_names_the_plug_in_in_its_configuration_tests_the_saved_model(tmp_path):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    if not hasattr(LightningCLI, "_parse_ckpt_path"):
        pytest.skip("this version of Lightning reads no hyper-parameters of a checkpoint")
    (tmp_path / "train.py").write_text(CONFIGURED)
    (tmp_path / "plugged.yaml").write_text(PLUGGED)

    def run(*words):
        command = [sys.executable, "train.py", *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    run("fit", "--config=plugged.yaml", "--model.scale=7")
    assert (tmp_path / "one.ckpt").is_dir()
    assert "scale 7" in run("test", "--config=plugged.yaml", "--ckpt_path=one.ckpt")


def test_a_command_takes_a_checkpoint_without_hyper_parameters(tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    commanded("fit", "--model.scale=7", directory=tmp_path, kind=Odd)
    path = tmp_path / "one.ckpt"
    assert "hyper_parameters" not in penstock.load(path)
    cli = commanded("test", f"--ckpt_path={path}", directory=tmp_path, kind=Odd)
    assert cli.model.scale == 1


class Settings:
    """Hyper-parameters in a custom class, like OmegaConf's."""

    def __init__(self, scale):
        self.scale = scale


class NewerSettings(Settings):
    """A newer version of the class that does not accept the saved state."""


def _unfit(values):
    raise ValueError("not with this version")


@pytest.mark.parametrize(
    ("kind", "unflatten", "error", "why"),
    [
        (Settings, lambda values: Settings(**values), "UnsupportedStateError", "plain values"),
        (NewerSettings, _unfit, "StateMismatchError", "not with this version"),
    ],
)
def test_a_command_tests_no_other_model_in_silence(
    tmp_path, monkeypatch, kind, unflatten, error, why
):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    if not hasattr(LightningCLI, "_parse_ckpt_path"):
        pytest.skip("this version of Lightning reads no hyper-parameters of a checkpoint")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    penstock.register_type(kind, vars, unflatten)

    class Configured(Odd):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["hyper_parameters"] = kind(7.0)

    commanded("fit", "--model.scale=7", directory=tmp_path, kind=Configured)
    with pytest.raises(getattr(penstock.errors, error), match=why):
        commanded(
            "test", f"--ckpt_path={tmp_path / 'one.ckpt'}", directory=tmp_path, kind=Configured
        )
