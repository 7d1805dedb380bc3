"""Sealed checkpoints of transformers' Trainer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import penstock
from penstock.errors import CannotSealError, NotSealedError, SealedError, TamperedError
from penstock.integrations.transformers import attach, newest_checkpoint
from sealed_marks import KEY, NAME, NUMBER, TEXT, assert_hidden, sealing, tamper


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = (torch.arange(8) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


def begun(directory, steps=4, *, seals=True, opens=True, attaches=True, **further):
    set_seed(7)
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 8, "vocab_size": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, hidden=TEXT))
    model.register_buffer(NAME, torch.full((64,), NUMBER))
    arguments = {
        "max_steps": steps,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **further,
    }
    trainer = Trainer(model, TrainingArguments(str(directory), **arguments), train_dataset=Rows())
    if not attaches:
        return trainer
    keys = {"sealing": sealing() if seals else None, "identities": [KEY] if opens else None}
    return attach(trainer, background=True, **keys)


def left_in_memory():
    return {name for name in os.listdir("/dev/shm") if name.startswith("penstock-")}


def test_run_is_sealed_with_its_small_files_and_resumes(tmp_path):
    before = left_in_memory()
    begun(tmp_path / "run").train()
    assert_hidden(tmp_path / "run", "global_step", "vocab_size", "log_history")
    again = begun(tmp_path / "run", steps=6)
    again.train(resume_from_checkpoint=True)
    straight = begun(tmp_path / "straight", steps=6)
    straight.train()
    pairs = zip(again.model.parameters(), straight.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert [one["step"] for one in again.state.log_history if "loss" in one] == [1, 2, 3, 4, 5, 6]
    assert left_in_memory() == before


def test_clear_is_refused_and_tampering_leads_to_no_older_one(tmp_path):
    begun(tmp_path / "run").train()
    newest = Path(newest_checkpoint(tmp_path / "run", identities=[KEY]))
    assert newest.name == "checkpoint-4"
    with pytest.raises(SealedError):
        begun(tmp_path / "run", opens=False).train(resume_from_checkpoint=True)
    tamper(newest)
    with pytest.raises(TamperedError):
        begun(tmp_path / "run", steps=6).train(resume_from_checkpoint=True)
    # The manifest tells of another change already.
    text = (newest / "manifest.json").read_text()
    (newest / "manifest.json").write_text(text.replace('"step": 4', '"step": 9'))
    with pytest.raises((TamperedError, penstock.errors.CorruptCheckpointError)):
        begun(tmp_path / "run", steps=6).train(resume_from_checkpoint=str(newest))
    assert newest.exists()
    for name, attaches in (("clear", True), ("theirs", False)):
        begun(tmp_path / name, seals=False, opens=False, attaches=attaches).train()
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / name / "checkpoint-4", newest)
        with pytest.raises(NotSealedError):
            begun(tmp_path / "run", steps=6).train(resume_from_checkpoint=True)


def test_what_would_stay_clear_is_refused_before_the_training(tmp_path):
    with pytest.raises(SealedError, match="load_best_model_at_end"):
        best = {"load_best_model_at_end": True, "save_strategy": "best"}
        begun(tmp_path, opens=False, **best, metric_for_best_model="loss")
    trainer = begun(tmp_path / "hub", attaches=False)
    trainer.args.push_to_hub = True
    with pytest.raises(CannotSealError, match="push_to_hub"):
        attach(trainer, sealing=sealing())
    assert not (tmp_path / "hub").exists() or not any((tmp_path / "hub").iterdir())
