"""Sealed tags of DeepSpeed."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("deepspeed")

import torch
from deepspeeds import attach, config_of, deepspeed_here

import penstock
from penstock.errors import CannotSealError, NotSealedError, SealedError, TamperedError
from sealed_marks import KEY, NAME, NUMBER, TEXT, assert_hidden, sealing, tamper


def build(seals=True, opens=True):
    deepspeed = deepspeed_here()
    model = torch.nn.Sequential()
    model.add_module(NAME, torch.nn.Linear(16, 16))
    torch.nn.init.constant_(model.get_submodule(NAME).bias, NUMBER)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(2, "fp32")
    )
    attach(
        engine, sealing=sealing() if seals else None, identities=[KEY] if opens else None
    )
    return engine


def saved(directory, seals):
    engine = build(seals, opens=seals)
    engine.save_checkpoint(directory, client_state={"note": TEXT})
    # DeepSpeed writes it on the first rank.
    if seals and torch.distributed.get_rank() == 0:
        with pytest.raises(CannotSealError, match="outside of a tag"):
            engine.save_16bit_model(f"{directory}-whole")
    engine.destroy()


def loaded(directory, seals=False, opens=True):
    engine = build(seals, opens)
    path, client_state = engine.load_checkpoint(directory)
    bias = engine.module.get_submodule(NAME).bias
    assert client_state["note"] == TEXT and torch.all(bias == NUMBER)
    engine.destroy()
    return path


def test_tag_is_sealed_and_clear_refused(jobs, tmp_path):
    path = str(tmp_path / "run")
    ranks = jobs.of(2)
    ranks.call(saved, path, True)
    assert_hidden(tmp_path)
    ranks.call(loaded, path)
    with pytest.raises(SealedError):
        ranks.call(loaded, path, True, False)
    from penstock.integrations.deepspeed.checkpoint_engine import to_torch

    for asked in ({}, {"unseal": True}, {"identities": [KEY]}):
        with pytest.raises(SealedError, match="unseal=True and identities="):
            to_torch(path, tmp_path / "clear", **asked)
    assert not (tmp_path / "clear").exists()
    to_torch(path, tmp_path / "clear", unseal=True, identities=[KEY])
    tag = tmp_path / "run" / "global_step0"
    tamper(tag)
    with pytest.raises((TamperedError, penstock.errors.RankError)):
        ranks.call(loaded, path)
    shutil.rmtree(tag)
    shutil.copytree(tmp_path / "clear" / tag.name, tag)
    with pytest.raises(NotSealedError):
        ranks.call(loaded, path)
    ranks.call(saved, str(tmp_path / "other"), False)
    with pytest.raises(NotSealedError):
        ranks.call(loaded, str(tmp_path / "other"))
