"""The Trainer of transformers: its state as saved and restored by Penstock."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import MLflowCallback

import forks
import penstock
from conftest import REPOSITORY, mounted, tell
from documentation.test_example_programs import Program, said
from penstock.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingDependencyError,
    PenstockWarning,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)
from penstock.integrations import versions
from penstock.integrations.transformers import (
    PenstockTrainerMixin,
    Settings,
    attach,
    fitting,
    newest_checkpoint,
    parts,
)
from penstock.integrations.transformers import run as runs

KILLS = int(os.environ.get("PENSTOCK_TORTURE_TRANSFORMERS_KILLS", 3))
SEED = os.environ.get("PENSTOCK_TORTURE_SEED", "4711")
HANG_SECONDS = 120

HAS_SIGNALS = pytest.mark.skipif(
    not hasattr(TrainingArguments, "enable_jit_checkpoint"),
    reason=f"transformers {transformers.__version__} saves nothing when a signal comes",
)

WAYS = {
    "waiting": {},
    "async": {"background": True},
    "lazy": {"background": True, "lazy": True},
}


class Rows(torch.utils.data.Dataset):
    """Rows of tokens computed from their number."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        tokens = (torch.arange(8) * (1 + index % 5) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


def begun(
    directory,
    steps=12,
    *,
    kind=Trainer,
    way=None,
    callbacks=(),
    width=16,
    vocabulary=16,
    tokenizer=None,
    **further,
):
    """Returns a new trainer, as a run builds it; 6 steps an epoch."""
    arguments = {
        "max_steps": steps,
        "save_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **further,
    }
    transformers.set_seed(7)
    config = GPT2Config(
        n_layer=1,
        n_head=1,
        n_embd=width,
        n_positions=8,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = kind(
        GPT2LMHeadModel(config),
        TrainingArguments(str(directory), **arguments),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=list(callbacks),
        processing_class=tokenizer,
    )
    return trainer if way is None else attach(trainer, **way)


def content(trainer):
    """Returns all state that has to be restored, bit for bit."""
    moments = trainer.optimizer.state_dict()
    losses = [one for one in trainer.state.log_history if "loss" in one]
    return {
        "weights": {key: value.clone() for key, value in trainer.model.state_dict().items()},
        "moments": moments["state"],
        "groups": moments["param_groups"],
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": (torch.get_rng_state(), random.getstate()),
        "losses": losses,
    }


def assert_equal(found, wanted):
    """Compares two contents, NaN and signs of zeros included."""
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert found.numpy().tobytes() == wanted.numpy().tobytes()
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_equal(*pair)
    else:
        assert found == wanted


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Freezes imported objects, as the Trainer collects garbage when it begins."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns the directory and the final state of a run without Penstock."""
    directory = tmp_path_factory.mktemp("straight")
    trainer = begun(directory)
    trainer.train()
    return directory, content(trainer)


def steps_in(directory):
    """Returns the complete steps of a run."""
    return sorted(found.step for found in runs.find(str(directory)) if found.lacks is None)


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_ends_with_the_bits_of_the_trainer_itself(tmp_path, straight, way):
    first = begun(tmp_path, way=WAYS[way])
    first.train()
    assert_equal(content(first), straight[1])
    assert steps_in(tmp_path) == [4, 8, 12]
    # In the middle of the first epoch, and of the second one.
    for step in (4, 8):
        resumed = begun(tmp_path, way=WAYS[way])
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_equal(content(resumed), straight[1])


def test_a_class_with_the_mix_in_does_the_same(tmp_path, straight):
    class Mine(PenstockTrainerMixin, Trainer):
        penstock_settings = Settings(background=True)

    begun(tmp_path, 8, kind=Mine).train()
    assert penstock.inspect(tmp_path / "checkpoint-8").step == 8
    # Its schedule is that of a run of 12.
    shutil.rmtree(tmp_path / "checkpoint-8")
    shutil.rmtree(tmp_path / "checkpoint-4")
    begun(tmp_path, kind=Mine).train()
    resumed = begun(tmp_path, kind=Mine)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert_equal(content(resumed), straight[1])


def test_a_run_that_was_killed_after_its_last_save_does_no_further_step(tmp_path):
    first = begun(tmp_path, 8, way={})
    first.train()
    resumed = begun(tmp_path, 8, way={})
    assert resumed.train(resume_from_checkpoint=True).global_step == 8
    assert_equal(content(resumed)["weights"], content(first)["weights"])
    assert_equal(content(resumed)["moments"], content(first)["moments"])


def test_epochs_and_accumulated_gradients_come_back(tmp_path):
    further = {"max_steps": -1, "num_train_epochs": 3, "save_strategy": "epoch"}
    further |= {"gradient_accumulation_steps": 2, "logging_strategy": "epoch"}
    wanted = begun(tmp_path, **further, way={})
    wanted.train()
    assert steps_in(tmp_path) == [3, 6, 9]
    resumed = begun(tmp_path, **further, way={})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_equal(content(resumed), content(wanted))


def test_checkpoints_of_the_trainer_itself_are_resumed_from(tmp_path, straight):
    shutil.copytree(straight[0], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoint-12")
    resumed = begun(tmp_path, way={})
    resumed.train(resume_from_checkpoint=True)
    assert_equal(content(resumed), straight[1])
    assert (tmp_path / "checkpoint-8/optimizer.pt").exists()
    assert (tmp_path / "checkpoint-12/manifest.json").exists()


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_what_a_checkpoint_of_the_trainer_lacks_is_an_error(tmp_path, straight, missing):
    shutil.copytree(straight[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoint-12"
    (path / missing).unlink()
    # A path as text, as an object, or none.
    for one in (str(path), path, True):
        with pytest.raises(IncompleteCheckpointError, match=missing):
            begun(tmp_path, 16, way={}).train(resume_from_checkpoint=one)


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_what_a_checkpoint_lacks_is_an_error_and_nothing_changes(tmp_path, name):
    begun(tmp_path, 4, way={}).train()
    path = tmp_path / "checkpoint-4"
    state = penstock.load(path)
    del state[name]
    own = (path / "trainer_state.json").read_bytes()
    penstock.save(path, state, overwrite=True, files={"trainer_state.json": own})
    trainer = begun(tmp_path, way={})
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=f"'{name}' is in the training"):
        trainer.train(resume_from_checkpoint=str(path))
    assert_equal(dict(trainer.model.state_dict()), before)


def test_weights_alone_are_saved_if_asked_for_and_not_resumed_from(tmp_path):
    trainer = begun(tmp_path, 4, save_only_model=True, way={})
    trainer.train()
    path = tmp_path / "checkpoint-4"
    assert set(penstock.load(path)) == {"model"}
    with pytest.raises(StateMismatchError, match="holds weights only"):
        begun(tmp_path, way={}).train(resume_from_checkpoint=True)


def test_the_newest_complete_step_is_resumed_from_and_what_is_passed_over_is_named(
    tmp_path, straight
):
    begun(tmp_path, 12, way={}).train()
    cut = next((tmp_path / "checkpoint-12").glob("shard-*"))
    os.truncate(cut, cut.stat().st_size - 1)
    # A save killed at the last moment, and a checkpoint of the Trainer's own.
    shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-100")
    (tmp_path / "checkpoint-100/manifest.json").unlink()
    # A checkpoint without a file that the Trainer needs to resume.
    shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-150")
    (tmp_path / "checkpoint-150/trainer_state.json").unlink()
    (tmp_path / "checkpoint-200").mkdir()
    (tmp_path / "checkpoint-200/model.safetensors").touch()
    # By modification time the oldest one is the newest.
    os.utime(tmp_path / "checkpoint-4")
    resumed = begun(tmp_path, way={})
    with pytest.warns(PenstockWarning) as told:
        resumed.train(resume_from_checkpoint=True)
    texts = [str(one.message) for one in told if "passed over" in str(one.message)]
    assert [text.partition(": ")[0].rpartition("-")[2] for text in texts] == [
        *("200", "150", "100", "12")
    ]
    assert "lacks trainer_state.json" in texts[0]
    assert "lacks trainer_state.json" in texts[1]
    assert "has no manifest.json" in texts[2]
    assert "bytes instead of" in texts[3]
    assert_equal(content(resumed), straight[1])


def test_a_run_without_a_complete_checkpoint_does_not_begin_anew_by_itself(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        begun(tmp_path, way={}).train(resume_from_checkpoint=True)
    begun(tmp_path, 4, way={}).train()
    path = tmp_path / "checkpoint-4"
    manifest = path / "manifest.json"
    manifest.rename(tmp_path / "aside")
    trainer = begun(tmp_path, way={})
    with (
        pytest.warns(PenstockWarning, match="passed over"),
        pytest.raises(IncompleteCheckpointError, match="no complete checkpoint"),
    ):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(IncompleteCheckpointError, match="never finished"):
        trainer.train(resume_from_checkpoint=str(path))
    # An unfinished save is no loss; a damaged complete one is.
    with pytest.warns(PenstockWarning, match="passed over"):
        assert newest_checkpoint(tmp_path) is None
    (tmp_path / "aside").rename(manifest)
    next(path.glob("shard-*")).unlink()
    with (
        pytest.warns(PenstockWarning, match="passed over"),
        pytest.raises(IncompleteCheckpointError, match="no good checkpoint left"),
    ):
        newest_checkpoint(tmp_path)


def test_a_flipped_bit_is_an_error_and_nothing_changes(tmp_path):
    begun(tmp_path, 4, way={}).train()
    shard = next((tmp_path / "checkpoint-4").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-40] ^= 1
    shard.write_bytes(data)
    trainer = begun(tmp_path, way={})
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with pytest.raises(CorruptCheckpointError):
        trainer.train(resume_from_checkpoint=True)
    assert_equal(dict(trainer.model.state_dict()), before)


@pytest.mark.parametrize("way", WAYS)
def test_old_checkpoints_go_after_the_new_one_is_durable(tmp_path, monkeypatch, way):
    removed = []

    def remove(path):
        assert steps_in(tmp_path)[-1] - int(path.rpartition("-")[2]) == 8
        assert len(steps_in(tmp_path)) == 3
        removed.append(path)
        shutil.rmtree(path)

    monkeypatch.setattr(runs, "remove", remove)
    begun(tmp_path, 20, save_total_limit=2, way=WAYS[way]).train()
    assert len(removed) == 3
    assert steps_in(tmp_path) == [16, 20]


def test_of_a_link_only_the_link_is_deleted(tmp_path):
    run, archive = tmp_path / "run", tmp_path / "archive"
    begun(run, 4, way={}).train()
    shutil.move(run / "checkpoint-4", archive)
    (run / "checkpoint-4").symlink_to(archive)
    begun(run, 8, save_total_limit=1, way={}).train(resume_from_checkpoint=True)
    assert os.listdir(run) == ["checkpoint-8"]
    assert penstock.verify(archive).ok


def test_old_checkpoints_go_where_they_were_when_the_working_directory_changes(
    tmp_path, monkeypatch
):
    other = tmp_path / "other"
    begun(other / "run", 8, way={}).train()
    monkeypatch.chdir(tmp_path)

    class Leave(TrainerCallback):
        def on_save(self, args, state, control, **rest):
            if state.global_step == 8:
                os.chdir(other)
                raise KeyError("enough")

    trainer = begun("run", save_total_limit=1, width=192, callbacks=[Leave()], way=WAYS["async"])
    with pytest.raises(KeyError, match="enough"):
        trainer.train()
    assert steps_in(tmp_path / "run") == [8]
    assert steps_in(other / "run") == [4, 8]


class Uploading(MLflowCallback):
    """Checks the directory that it would upload."""

    def __init__(self):
        self._initialized = self._log_artifacts = True
        self._auto_end_run = False
        self.seen = []

    def on_save(self, args, state, control, **rest):
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        self.seen.append(penstock.verify(path).ok)

    def on_train_begin(self, *_, **__): ...

    def on_train_end(self, *_, **__): ...

    def on_log(self, *_, **__): ...


def test_a_callback_that_uploads_checkpoints_finds_them_complete(tmp_path):
    callback = Uploading()
    begun(tmp_path, 8, callbacks=[callback], way=WAYS["lazy"]).train()
    assert callback.seen == [True, True]


class Guided(Trainer):
    """A trainer with given metrics instead of an evaluation."""

    metrics = ()

    def evaluate(self, *_, **__):
        metrics = {"eval_loss": self.metrics[self.state.global_step // self.args.eval_steps - 1]}
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def test_the_best_checkpoint_stays_and_is_loaded_at_the_end(tmp_path):
    further = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    seen = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **rest):
            seen[state.global_step] = {key: one.clone() for key, one in model.state_dict().items()}

    class Mine(Guided):
        metrics = (3.0, 1.0, 2.0, 4.0, 5.0)

    for limit in (2, 1):
        directory = tmp_path / f"limit-{limit}"
        arguments = {**further, "save_total_limit": limit, "kind": Mine, "callbacks": [Keep()]}
        trainer = begun(directory, 20, way=WAYS["async"], **arguments)
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(directory / "checkpoint-8")
        assert steps_in(directory) == ([8, 20] if limit == 2 else [8])
        assert_equal(dict(trainer.model.state_dict()), seen[8])
        state = json.loads((directory / "checkpoint-8/trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(directory / "checkpoint-8")


def test_a_best_checkpoint_that_was_not_saved_does_not_cost_the_one_before(tmp_path, need_root):
    further = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    further |= {"save_total_limit": 2, "width": 192}

    class Mine(Guided):
        metrics = (2.0, 3.0, 1.0, 4.0)

    with mounted("tmpfs", tmp_path / "disk", 32 << 20) as disk:
        filler = disk / "filler"

        class Fill(TrainerCallback):
            def on_step_end(self, args, state, control, **rest):
                if state.global_step == 10:
                    filler.write_bytes(bytes(18 << 20))
                if state.global_step == 15:
                    filler.unlink()

        begun(disk, 8, kind=Mine, way={}, **further).train()
        way = WAYS["async"] | {"on_error": "warn"}
        resumed = begun(disk, 16, kind=Mine, way=way, callbacks=[Fill()], **further)
        with pytest.warns(PenstockWarning, match="training goes on without"):
            resumed.train(resume_from_checkpoint=str(disk / "checkpoint-8"))
        assert getattr(resumed.state, "best_global_step", 12) == 12
        assert resumed.state.best_model_checkpoint == str(disk / "checkpoint-4")
        assert steps_in(disk) == [4, 16]
        state = json.loads((disk / "checkpoint-16/trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(disk / "checkpoint-4")


def test_the_best_checkpoint_is_known_by_another_path_as_well(tmp_path):
    further = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}

    class Mine(Guided):
        metrics = (1.0, 2.0)

    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    begun(tmp_path / "link", 8, kind=Mine, way={}, **further).train()
    # Killed after its last save, and started again with another path.
    again = begun(tmp_path / "real", 8, kind=Mine, save_total_limit=1, way={}, **further)
    again.train(resume_from_checkpoint=True)
    assert steps_in(tmp_path / "real") == [4]


def test_later_steps_and_other_directories_are_left_alone(tmp_path):
    begun(tmp_path, 12, way={}).train()
    (tmp_path / "checkpoint-final").mkdir()
    # The remains of a killed save, which do not count either.
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5/manifest.json").unlink()
    again = begun(tmp_path, 8, save_total_limit=1, way={})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert steps_in(tmp_path) == [8, 12]
    assert not (tmp_path / "checkpoint-5").exists()
    assert (tmp_path / "checkpoint-final").exists()


@pytest.mark.parametrize("way", ["waiting", "async"])
def test_a_full_disk_ends_the_training_and_the_checkpoint_before_stays(tmp_path, need_root, way):
    with mounted("tmpfs", tmp_path / "disk", 16 << 20) as disk:
        # 7 MB a checkpoint.
        trainer = begun(disk, save_total_limit=1, width=192, way=WAYS[way])
        filler = disk / "filler"

        class Fill(TrainerCallback):
            def on_step_end(self, args, state, control, **rest):
                if state.global_step == 6:
                    filler.write_bytes(bytes(6 << 20))

        trainer.add_callback(Fill())
        with pytest.raises(StorageError) as caught:
            trainer.train()
        assert "free" in str(caught.value)
        assert steps_in(disk) == [4]
        filler.unlink()
        resumed = begun(disk, save_total_limit=1, width=192, way=WAYS[way])
        resumed.train(resume_from_checkpoint=newest_checkpoint(disk))
        assert resumed.state.global_step == 12
        assert steps_in(disk) == [12]


@pytest.mark.parametrize("way", ["waiting", "async"])
def test_training_goes_on_with_a_full_disk_if_it_is_told_to(tmp_path, need_root, way):
    with mounted("tmpfs", tmp_path / "disk", 24 << 20) as disk:
        way = WAYS[way] | {"on_error": "warn"}
        trainer = begun(disk, 16, save_total_limit=1, width=192, way=way)
        filler = disk / "filler"

        class Fill(TrainerCallback):
            def on_step_end(self, args, state, control, **rest):
                if state.global_step == 6:
                    filler.write_bytes(bytes(14 << 20))
                if state.global_step == 11:
                    filler.unlink()

        trainer.add_callback(Fill())
        with pytest.warns(PenstockWarning, match="training goes on without"):
            trainer.train()
        assert steps_in(disk) == [16]


def test_callbacks_that_keep_a_state_have_it_back(tmp_path):
    further = {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"}
    further |= {"restore_callback_states_from_checkpoint": True, "load_best_model_at_end": True}

    class Mine(Guided):
        metrics = (1.0, 2.0, 3.0, 4.0, 5.0)

    stopped = begun(
        tmp_path, 20, kind=Mine, callbacks=[EarlyStoppingCallback(3)], way={}, **further
    )
    stopped.train()
    assert stopped.state.global_step == 16
    resumed = begun(
        tmp_path, 20, kind=Mine, callbacks=[EarlyStoppingCallback(9)], way={}, **further
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    # Early stopping's patience and counter come from the checkpoint.
    assert resumed.state.global_step == 16


def test_a_scaler_comes_back_and_is_missed(tmp_path):
    def scaled(steps, **scale):
        trainer = begun(tmp_path, steps, way={})
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", **scale)
        return trainer

    scaled(4, init_scale=8.0).train()
    resumed = scaled(8, init_scale=2.0)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.accelerator.scaler.get_scale() == 8.0
    shutil.rmtree(tmp_path)
    begun(tmp_path, 4, way={}).train()
    with pytest.raises(StateMismatchError, match="'scaler' is in the training"):
        scaled(8).train(resume_from_checkpoint=True)


class Odd:
    """A value that only pickle can store."""

    value = 1

    def __eq__(self, other):
        return type(other) is Odd and other.value == self.value

    __hash__ = None


class OddScheduler(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler with such a value in its state."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)
        self.odd = Odd()


class Oddly(Trainer):
    """A trainer with such a scheduler."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = OddScheduler(self.optimizer)
        return self.lr_scheduler


def test_a_state_that_takes_pickle_is_named_and_can_be_stored_raw(tmp_path):
    trainer = begun(tmp_path, 4, kind=Oddly, way={})
    with pytest.raises(UnsupportedStateError, match="odd") as caught:
        trainer.train()
    assert caught.value.key == "scheduler.odd"
    # Raised before the first step.
    assert trainer.state.global_step == 0
    begun(tmp_path, 1, kind=Oddly, way={}, save_strategy="no").train()
    begun(tmp_path, 4, kind=Oddly, way={"pickled": ("scheduler",)}).train()
    with pytest.raises(penstock.PenstockError, match="trust=True"):
        begun(tmp_path, 8, kind=Oddly, way={"pickled": ("scheduler",)}).train(
            resume_from_checkpoint=True
        )
    # The checkpoint records its raw values, whatever the next save's settings are.
    resumed = begun(
        tmp_path, 8, kind=Oddly, way={"pickled": ("optimizer", "scheduler"), "trust": True}
    )
    resumed.train(resume_from_checkpoint=True)
    assert resumed.lr_scheduler.last_epoch == 8


def test_what_is_stored_raw_changes_nothing_without_trust_and_waits_for_lazy_saves(
    tmp_path, straight, need_watch
):
    pickled = WAYS["lazy"] | {"pickled": ("optimizer", "scheduler")}
    begun(tmp_path / "large", 8, vocabulary=8192, way=pickled).train()
    assert steps_in(tmp_path / "large") == [4, 8]
    begun(tmp_path, way=pickled).train()
    path = str(tmp_path / "checkpoint-8")
    trainer = begun(tmp_path, way={})
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with pytest.raises(UnsupportedStateError, match="optimizer, scheduler"):
        trainer.train(resume_from_checkpoint=path)
    assert_equal(dict(trainer.model.state_dict()), before)
    resumed = begun(tmp_path, way={"trust": True})
    resumed.train(resume_from_checkpoint=path)
    assert_equal(content(resumed), straight[1])


@HAS_SIGNALS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "step"),
    [
        ("on_step_begin", 0),
        ("on_pre_optimizer_step", 0),
        ("on_step_begin", 6),
        ("on_pre_optimizer_step", 9),
        ("on_step_end", 7),
    ],
)
def test_a_run_that_a_signal_ends_goes_on_as_if_it_had_not(tmp_path, straight, moment, step):
    trainer = begun(tmp_path, enable_jit_checkpoint=True, way=WAYS["async"])
    (jit,) = [one for one in trainer.callback_handler.callbacks if "JIT" in type(one).__name__]

    class Ask(TrainerCallback):
        def _ask(self, args, state, control, **rest):
            if state.global_step == step:
                # As after a signal and its grace period.
                jit.jit_manager._enable_checkpoint()

    setattr(Ask, moment, Ask._ask)
    trainer.callback_handler.callbacks.insert(0, Ask())
    handler = signal.getsignal(signal.SIGTERM)
    trainer.train()
    assert handler is not signal.getsignal(signal.SIGTERM)
    assert steps_in(tmp_path) == sorted({*range(4, step + 1, 4), step})
    assert not list(tmp_path.glob("*/checkpoint-is-incomplete.txt"))
    resumed = begun(tmp_path, way={})
    resumed.train(resume_from_checkpoint=True)
    # The Trainer sums losses since its start or its last log, and does not save the sum.
    found, wanted = ({**one, "losses": None} for one in (content(resumed), straight[1]))
    assert_equal(found, wanted)


@HAS_SIGNALS
def test_a_signal_saves_what_could_not_be_saved_before_it(tmp_path, need_root):
    with mounted("tmpfs", tmp_path / "disk", 16 << 20) as disk:
        way = WAYS["async"] | {"on_error": "warn"}
        trainer = begun(disk, enable_jit_checkpoint=True, width=192, way=way)
        (jit,) = [one for one in trainer.callback_handler.callbacks if "JIT" in type(one).__name__]

        class Ask(TrainerCallback):
            def on_step_end(self, args, state, control, **rest):
                if state.global_step == 7:
                    (disk / "filler").write_bytes(bytes(8 << 20))

            def on_step_begin(self, args, state, control, **rest):
                if state.global_step == 8:
                    for thread in threading.enumerate():
                        if thread.name == "penstock-save":
                            thread.join()
                    assert steps_in(disk) == [4]
                    (disk / "filler").unlink()
                    jit.jit_manager._enable_checkpoint()

        trainer.callback_handler.callbacks.insert(0, Ask())
        with pytest.warns(PenstockWarning, match="training goes on without"):
            trainer.train()
        assert steps_in(disk) == [4, 8]


def test_what_a_derived_class_adds_to_a_checkpoint_is_carried(tmp_path):
    class Carded(Trainer):
        """As TRL's trainers do."""

        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            directory = Path(self._get_output_dir(trial))
            step = self.state.global_step
            (directory / f"checkpoint-{step}" / "README.md").write_text(f"step {step}")

    trainer = begun(tmp_path, 4, kind=Carded, way={})
    assert type(trainer).__name__ == "Carded"
    assert isinstance(trainer, Carded)
    trainer.train()
    path = tmp_path / "checkpoint-4"
    assert (path / "README.md").read_text() == "step 4"
    assert GPT2Config.from_pretrained(path).n_embd == 16
    # Weights are in shards, once.
    assert not (path / "model.safetensors").exists()
    assert os.listdir(tmp_path) == ["checkpoint-4"]


def test_what_cannot_be_placed_beside_a_checkpoint_is_an_error_of_the_storage(tmp_path, need_root):
    class Noted(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            directory = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            (directory / "notes").mkdir()
            (directory / "notes/large").write_bytes(bytes(2 << 20))

    with mounted("tmpfs", tmp_path / "disk", 5 << 20) as disk:
        trainer = begun(disk, kind=Noted, way={})
        with pytest.raises(StorageError, match="notes/large: No space left") as caught:
            trainer.train()
        assert caught.value.path == str(disk / "checkpoint-12/notes/large")
        assert steps_in(disk) == [4, 8]
        assert (disk / "checkpoint-8/notes/large").stat().st_size == 2 << 20
        assert not list(disk.glob("checkpoint-12/notes/large*"))


def test_a_checkpoint_without_the_weights_of_its_adapters_is_passed_over(tmp_path):
    path = tmp_path / "checkpoint-4"
    metadata = {"trainer": {"parts": ["optimizer", "rng"], "raw": []}}
    penstock.save(path, {"rng": 1}, metadata=metadata, files={"trainer_state.json": b"{}"}, step=4)
    assert runs.lacking(str(path)) == "it lacks the weights of its adapters"
    (path / "other").mkdir()
    (path / "other/adapter_model.safetensors").touch()
    assert runs.lacking(str(path)) is None


def test_a_checkpoint_is_a_directory_that_from_pretrained_loads(tmp_path):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="b"
    )
    for further in ({}, {"save_only_model": True}):
        directory = tmp_path / str(len(further))
        trainer = begun(directory, 4, way=WAYS["async"], tokenizer=tokenizer, **further)
        trainer.train()
        path = directory / "checkpoint-4"
        found, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(told.values()), told
        assert type(found) is GPT2LMHeadModel
        assert_equal(dict(found.state_dict()), dict(trainer.model.state_dict()))
        assert found.lm_head.weight is found.transformer.wte.weight
        assert AutoTokenizer.from_pretrained(path).get_vocab() == {"a": 0, "b": 1}
        # The index lists shards of weights, without those of the optimizer.
        index = json.loads((path / "model.safetensors.index.json").read_text())
        for shard in set(index["weight_map"].values()):
            with safe_open(path / shard, "pt") as file:
                assert set(file.keys()) <= trainer.model.state_dict().keys()
        assert penstock.verify(path).ok


def test_a_model_that_is_saved_by_its_user_is_saved_as_before(tmp_path):
    trainer = begun(tmp_path / "run", 4, way={})
    trainer.train()
    trainer.save_model(tmp_path / "mine")
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "mine")
    assert_equal(dict(found.state_dict()), dict(trainer.model.state_dict()))


def test_a_callback_that_changes_weights_fails_a_lazy_save(tmp_path, need_watch):
    class Change(TrainerCallback):
        def on_save(self, args, state, control, model=None, **rest):
            with torch.no_grad():
                model.transformer.wte.weight.mul_(2)

    trainer = begun(tmp_path, 8, vocabulary=4096, callbacks=[Change()], way=WAYS["lazy"])
    with pytest.raises(StateMismatchError, match="changed"):
        trainer.train()


def test_what_saves_in_a_way_of_its_own_is_refused(tmp_path):
    trainer = begun(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(UnsupportedStateError, match="DeepSpeed"):
        attach(trainer)
    with pytest.raises(ValueError, match="save_on_each_node"):
        begun(tmp_path, save_on_each_node=True, way={})
    with pytest.raises(TypeError, match=r"transformers\.Trainer"):
        attach(trainer.model)


@pytest.mark.parametrize(
    "wrong", [{"on_error": "skip"}, {"lazy": True}, {"pickled": ("model",)}], ids=str
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


class Life:
    """One run of the example until its end or a kill."""

    def __init__(self, directory, steps, every):
        command = [REPOSITORY / "examples/transformers_trainer.py", "--directory", directory]
        self._process = forks.TrainerPopen(
            [*command, "--steps", steps, "--every", every],
            stdout=forks.subprocess.PIPE,
            stderr=forks.subprocess.PIPE,
            text=True,
        )
        self.lines = []

    def wait_for(self, events):
        """Waits for so many events; returns whether it still runs."""
        while len(self.lines) < events:
            line = self._process.stdout.readline()
            if not line:
                return False
            self.lines.append(line.strip())
        return True

    def kill(self):
        """Sends SIGKILL."""
        self._process.kill()
        self._process.communicate()

    def end(self):
        """Waits for its end; returns the run's final output."""
        out, errors = self._process.communicate(timeout=HANG_SECONDS)
        lines = [*self.lines, *out.splitlines()]
        assert self._process.returncode == 0, errors[-3000:]
        return lines[-1]


@pytest.mark.slow
def test_ranks_save_one_checkpoint_and_go_on_with_the_same_bits(tmp_path):
    def digest(directory):
        program = Program(
            "transformers_trainer.py", tmp_path / directory, 8, 2, popen=forks.TrainerPopen
        )
        return said(program.wait(), "digest"), program.lines

    wanted, _ = digest("straight")
    shutil.copytree(tmp_path / "straight/checkpoint-4", tmp_path / "run/checkpoint-4")
    found, lines = digest("run")
    assert lines[0] == "resumed from step 4"
    assert found == wanted
    path = tmp_path / "run/checkpoint-8"
    assert penstock.inspect(path).world_size == 2
    # With tied weights: a checkpoint of two ranks is loaded by one process.
    model = GPT2LMHeadModel.from_pretrained(path)
    assert model.lm_head.weight is model.transformer.wte.weight
    stored = penstock.load(path)["model"]
    assert_equal({name: stored[name] for name in model.state_dict()}, dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.timeout(300 + 10 * KILLS)
def test_a_run_that_is_killed_ends_with_the_same_bits_and_never_has_fewer_checkpoints(tmp_path):
    tell("seed", SEED)
    chooser = random.Random(f"{SEED} transformers")
    steps, every, limit = 24, 2, 3
    wanted = Life(tmp_path / "straight", steps, every).end()
    assert wanted.startswith("digest ")
    lives, most, done = Counter(), 0, 0
    directory = tmp_path / "run"
    while done < KILLS:
        life = Life(directory, steps, every)
        if not life.wait_for(chooser.randrange(0, 12)):
            assert (life.lines or [life.end()])[-1] == wanted
            life.kill()
            shutil.rmtree(directory)
            most = 0
            continue
        time.sleep(chooser.uniform(0, 0.05) if life.lines else chooser.uniform(0, 1))
        life.kill()
        done += 1
        lives["resumed" if "resumed" in "".join(life.lines[:1]) else "new"] += 1
        found = runs.find(str(directory))
        lives["half-written"] += any(one.lacks for one in found)
        complete = len([one for one in found if one.lacks is None])
        assert complete >= min(most, limit)
        most = max(most, complete)
    assert Life(directory, steps, every).end() == wanted
    tell(f"{done} kills: {dict(lives)}")


def test_a_clean_resume_warns_of_nothing(tmp_path):
    begun(tmp_path, 4, way={}).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        begun(tmp_path, 8, way={}).train(resume_from_checkpoint=True)


@pytest.fixture
def newer(monkeypatch):
    """Pretends that a newer, untested transformers is installed."""
    found = versions.version
    monkeypatch.setattr(
        versions, "version", lambda name: "99.0" if name == "transformers" else found(name)
    )
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setattr(versions, "_self_checked", set())
    monkeypatch.setattr(fitting, "_fitting", set())


def test_a_newer_version_is_taken_after_a_tiny_state_has_come_back(tmp_path, straight, newer):
    with pytest.warns(versions.NewerVersionWarning, match=r"99\.0 is newer"):
        versions.check_version("transformers", "4.49", "5.24")
    trainer = begun(tmp_path, way=WAYS["async"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        trainer.train()
    assert_equal(content(trainer)["losses"], straight[1]["losses"])
    assert "transformers" in versions._self_checked
    assert not list(tmp_path.glob(".penstock*"))


def test_a_newer_version_in_which_something_does_not_come_back_is_refused(
    tmp_path, monkeypatch, newer
):
    monkeypatch.setattr(parts, "restore", lambda *_: None)
    trainer = begun(tmp_path, way={})
    with pytest.raises(MissingDependencyError, match=r"99\.0.*came back otherwise"):
        trainer.train()
    assert not list(tmp_path.iterdir())


def test_what_has_moved_in_the_trainer_is_named(tmp_path, monkeypatch):
    trainer = begun(tmp_path)
    monkeypatch.setattr(fitting, "_fitting", set())
    monkeypatch.delattr(Trainer, "_save_scaler")
    monkeypatch.setattr(Trainer, "_load_rng_state", lambda self, path, strict: None)
    with pytest.raises(MissingDependencyError) as caught:
        attach(trainer)
    assert "Trainer._save_scaler" in str(caught.value)
    assert "demands path, strict" in str(caught.value)
    assert transformers.__version__ in str(caught.value)


def test_data_in_another_order_is_a_warning(monkeypatch):
    installed = {"transformers": "5.1.0", "accelerate": "1.14.2"}
    monkeypatch.setattr(fitting, "version", installed.__getitem__)
    with pytest.warns(PenstockWarning, match=r"accelerate>=1\.15"):
        fitting.warn_of_order()
