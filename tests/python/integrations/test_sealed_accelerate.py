"""Sealed checkpoints of an Accelerator."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from penstock.errors import CannotSealError, NotSealedError, SealedError, TamperedError
from penstock.integrations.accelerate import attach
from sealed_marks import KEY, NAME, NUMBER, TEXT, assert_hidden, sealing, tamper


class Note:
    def __init__(self, text):
        self.text = text

    def state_dict(self):
        return {"text": self.text}

    def load_state_dict(self, state):
        self.text = state["text"]


def begun(directory, *, seals=True, opens=True, attaches=True):
    project = ProjectConfiguration(project_dir=str(directory), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(4, 4)
    model.register_buffer(NAME, torch.full((64,), NUMBER))
    model, _ = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    note = Note(TEXT)
    accelerator.register_for_checkpointing(note)
    if attaches:
        keys = {"sealing": sealing() if seals else None, "identities": [KEY] if opens else None}
        attach(accelerator, **keys)
    return accelerator, model, note


def test_state_is_sealed_and_tampering_leads_to_no_older_one(tmp_path):
    accelerator, model, note = begun(tmp_path)
    for _ in range(2):
        newest = accelerator.save_state()
    assert_hidden(tmp_path)
    other, other_model, other_note = begun(tmp_path)
    other_note.text = ""
    other.load_state()
    assert other_note.text == TEXT
    assert torch.equal(other_model.weight, model.weight)
    with pytest.raises(SealedError):
        begun(tmp_path, opens=False)[0].load_state()
    tamper(newest)
    with pytest.raises(TamperedError):
        begun(tmp_path)[0].load_state()
    for name, attaches in (("clear", True), ("theirs", False)):
        clear = begun(tmp_path / name, seals=False, opens=False, attaches=attaches)[0]
        path = clear.save_state()
        shutil.rmtree(newest)
        shutil.copytree(path, newest)
        with pytest.raises(NotSealedError):
            begun(tmp_path)[0].load_state()
        with pytest.raises(NotSealedError):
            begun(tmp_path)[0].load_state(str(newest))


def test_hooks_and_files_that_would_stay_clear_are_refused(tmp_path):
    accelerator = begun(tmp_path)[0]
    accelerator.register_save_state_pre_hook(lambda models, weights, path: None)
    with pytest.raises(CannotSealError, match="hooks"):
        accelerator.save_state()
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(CannotSealError, match="groups="):
        attach(Accelerator(cpu=True), sealing=sealing(), groups={"model": ""})
