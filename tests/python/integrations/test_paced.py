"""Saves that are made when they are due, by Lightning and by the Trainer of transformers."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from lightnings import Module, fit, loader, trainer
from test_transformers import begun
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import TrainerCallback

import forks
import penstock
from penstock.checkpoint.steps.pace import Pace
from penstock.cli import cli
from penstock.integrations.lightning import PacedCheckpoint, PenstockIO
from penstock.integrations.transformers import Settings
from penstock.planning.records import history
from penstock.plugin import PacedRun
from ranks import environments_of

STARTERS = {"lightning": forks.LightningPopen, "transformers": forks.TrainerPopen}


def kinds(directory):
    return [one["kind"] for one in history.entries(str(directory))]


def steps_of(directory):
    return [one["step"] for one in history.entries(str(directory)) if one["kind"] == "save"]


def assert_plans(directory):
    """One command answers how often to save."""
    result = CliRunner().invoke(cli, ["plan", str(directory)])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("save every")


# Lightning.


def lightning_run(directory, save_every, *, steps, ckpt_path=None, **options):
    callback = PacedCheckpoint(dirpath=directory, save_every=save_every)
    one = trainer(
        directory,
        PenstockIO(background=True),
        epochs=-1,
        max_steps=steps,
        callbacks=[callback],
        **options,
    )
    fit(one, data=loader(StatefulDataLoader), ckpt_path=ckpt_path)


def test_lightning_saves_after_as_many_steps_as_given(tmp_path):
    lightning_run(tmp_path, 4, steps=10)
    assert steps_of(tmp_path) == [4, 8]
    # The older one is deleted.
    (path,) = tmp_path.glob("*.ckpt")
    assert penstock.inspect(path).step == 8
    lightning_run(tmp_path, 4, steps=17, ckpt_path="last")
    assert steps_of(tmp_path) == [4, 8, 12, 16]
    starts = [one for one in history.entries(str(tmp_path)) if one["kind"] == "start"]
    assert starts[1]["step"] == 8
    assert starts[1]["load_seconds"] > 0
    assert kinds(tmp_path).count("end") == 2
    assert history.summarize(str(tmp_path)).failures == 0


def test_accumulated_batches_of_lightning_are_one_step(tmp_path):
    lightning_run(tmp_path, 2, steps=5, accumulate_grad_batches=3)
    assert steps_of(tmp_path) == [2, 4]


def test_lightning_finds_its_interval(tmp_path):
    lightning_run(tmp_path, "auto", steps=50)
    assert steps_of(tmp_path) == [20, 40]
    assert_plans(tmp_path)


def test_an_error_during_a_background_save_ends_the_same_run(tmp_path, monkeypatch):
    """The save goes on until it is waited for, or the run has ended."""
    is_over = threading.Event()
    wait, close, saved = PenstockIO.wait, PacedRun.close, PacedRun.saved

    def waiting(io):
        if io.is_saving:
            is_over.set()
        wait(io)

    def closing(*arguments):
        close(*arguments)
        is_over.set()

    def saving(*arguments):
        is_over.wait(60)
        saved(*arguments)

    monkeypatch.setattr(PenstockIO, "wait", waiting)
    monkeypatch.setattr(PacedRun, "close", closing)
    monkeypatch.setattr(PacedRun, "saved", saving)
    callbacks = [PacedCheckpoint(dirpath=tmp_path, save_every=5)]
    with pytest.raises(ZeroDivisionError):
        fit(trainer(tmp_path, PenstockIO(background=True), callbacks=callbacks), Failing())
    assert kinds(tmp_path) == ["start", "save", "end"]
    end = list(history.entries(str(tmp_path)))[-1]
    assert end["error"] == "ZeroDivisionError"


class Failing(Module):
    def training_step(self, batch, index):
        if self.trainer.global_step == 5:
            raise ZeroDivisionError
        return super().training_step(batch, index)


def test_an_error_in_lightning_ends_the_run_as_a_failure(tmp_path):
    callback = PacedCheckpoint(dirpath=tmp_path, save_every=2)
    with pytest.raises(ZeroDivisionError):
        fit(trainer(tmp_path, PenstockIO(), callbacks=[callback]), Failing())
    (end,) = [one for one in history.entries(str(tmp_path)) if one["kind"] == "end"]
    assert end["error"] == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"save_every": 0}, "save_every=0"),
        ({"failures_per_hour": -1.0}, "failures_per_hour"),
        ({"every_n_train_steps": 5}, "every_n_train_steps"),
        ({"every_n_epochs": 1}, "every_n_epochs"),
        ({"save_last": True}, "save_last='link'"),
    ],
)
def test_arguments_that_contradict_are_refused(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        PacedCheckpoint(dirpath=tmp_path, **wrong)


def test_without_penstock_s_plug_in_the_remedy_is_named(tmp_path):
    with pytest.raises(penstock.PenstockError, match=r"plugins=\[PenstockIO\(\)\]"):
        fit(trainer(tmp_path, callbacks=[PacedCheckpoint(dirpath=tmp_path)]))


# The Trainer of transformers.


def trainer_run(directory, save_every, steps, *, resume=None, **further):
    way = {"background": True, "save_every": save_every}
    one = begun(directory, steps, way=way, save_strategy="no", save_total_limit=2, **further)
    one.train(resume_from_checkpoint=resume)


def test_the_trainer_saves_after_as_many_steps_as_given(tmp_path):
    trainer_run(tmp_path, 4, 10)
    # And after the last step.
    assert steps_of(tmp_path) == [4, 8, 10]
    assert sorted(one.name for one in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-8",
    ]
    trainer_run(tmp_path, 4, 16, resume=True)
    assert steps_of(tmp_path) == [4, 8, 10, 14, 16]
    starts = [one for one in history.entries(str(tmp_path)) if one["kind"] == "start"]
    assert starts[1]["load_seconds"] > 0
    assert kinds(tmp_path).count("end") == 2
    assert history.summarize(str(tmp_path)).failures == 0
    assert_plans(tmp_path)


class Stopping(TrainerCallback):
    """Stops the training at an event after a step."""

    def __init__(self, event, step):
        self.step = step
        setattr(self, event, self.stop)

    def stop(self, _, state, control, **__):
        control.should_training_stop |= state.global_step >= self.step


@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate", "on_epoch_end"])
def test_the_last_step_is_saved_where_a_callback_stops_the_trainer(tmp_path, event):
    way = {"save_every": 4}
    further = {"save_strategy": "no", "eval_strategy": "epoch"}
    one = begun(tmp_path, 20, way=way, callbacks=[Stopping(event, 6)], **further)
    one.eval_dataset = one.train_dataset
    one.train()
    assert steps_of(tmp_path) == [4, 6]


def test_the_trainer_goes_on_as_the_run_before(tmp_path, monkeypatch):
    """Its steps count from the loaded one, and their number is that of the history."""
    trainer_run(tmp_path, "auto", 3)
    monkeypatch.setattr(Pace, "_remembered", lambda _: 4)
    trainer_run(tmp_path, "auto", 8, resume=True)
    assert steps_of(tmp_path) == [3, 7, 8]


def test_accumulated_batches_of_the_trainer_are_one_step(tmp_path):
    trainer_run(tmp_path, 2, 4, gradient_accumulation_steps=2)
    assert steps_of(tmp_path) == [2, 4]


def test_a_strategy_of_the_trainer_beside_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="save_strategy='no'"):
        begun(tmp_path, way={"save_every": "auto"})
    with pytest.raises(ValueError, match="save_every='often'"):
        Settings(save_every="often")


# Two ranks, one of them slower.


@pytest.mark.slow
@pytest.mark.parametrize("framework", list(STARTERS))
def test_ranks_save_after_the_same_steps(tmp_path, framework):
    worker = Path(__file__).with_name("paced_worker.py")
    processes = [
        STARTERS[framework](
            [worker, framework, tmp_path, 120],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TORCHELASTIC_RUN_ID": "test"} | environment,
        )
        for environment in environments_of(2)
    ]
    try:
        ends = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {0}, ends
    first, second = (
        [line for line in out.splitlines() if line.startswith("saved")] for out, _ in ends
    )
    assert first == second
    steps = list(map(int, first[0].split()[1:]))
    assert steps == steps_of(tmp_path)
    assert steps[:2] == [20, 40]
    assert len(steps) > 3
