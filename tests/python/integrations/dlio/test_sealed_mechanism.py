"""DLIO's states sealed by the keys that the environment names."""

from __future__ import annotations

import pytest

pytest.importorskip("dlio_benchmark", reason="DLIO has its own environment: scripts/dlio test")

import torch
from dlio_programs import TINY_HERE, mechanism, tensors_of

from penstock.errors import NotSealedError, TamperedError
from penstock.integrations.dlio import Checkpointing
from penstock.integrations.dlio.states import states_of
from sealing.marks import FLOATS, KEY, NUMBER, assert_hidden, tamper


def test_environment_seals_and_refuses_clear(monkeypatch, disk_path):
    (disk_path / "key.txt").write_text(KEY)
    monkeypatch.setattr(Checkpointing, "_instance", None)
    ours = mechanism(disk_path, *TINY_HERE)
    held = tensors_of(states_of(ours, 0)).values()
    for tensor in held:
        if tensor.dtype == torch.float32:
            tensor.fill_(NUMBER)
    ours.save_checkpoint(1, 3)
    monkeypatch.setenv("PENSTOCK_IDENTITIES", str(disk_path / "key.txt"))
    monkeypatch.setenv("PENSTOCK_RECIPIENTS", str(disk_path / "key.txt"))
    with pytest.raises(NotSealedError):
        ours.load_checkpoint(1, 3)
    ours.save_checkpoint(1, 4)
    path = disk_path / "checkpoints" / "global_epoch1_step4"
    assert_hidden(path, "optim_states", "rank_0", FLOATS)
    ours.load_checkpoint(1, 4)
    tamper(path)
    with pytest.raises(TamperedError):
        ours.load_checkpoint(1, 4)
