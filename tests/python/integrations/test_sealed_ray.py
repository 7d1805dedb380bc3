"""Sealed checkpoints of Ray Train."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

pytest.importorskip("ray")

import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import penstock
from penstock.errors import NotSealedError, SealedError, TamperedError
from penstock.integrations import ray as pr
from sealed_marks import KEY, NAME, NUMBER, TEXT, assert_hidden, sealing, tamper


def trained(root, steps, *, seals=True, opens=(KEY,)):
    """Resumes a run that reports every step; returns the step it resumed from."""
    found = []

    def train():
        hidden = np.full(64, NUMBER, "float32")
        training = penstock.Training(**{NAME: hidden}, note=TEXT, count=0)
        resumed = pr.resume(training, storage_path=root, identities=opens or None)
        found.append(resumed)
        for step in range((resumed or 0) + 1, steps + 1):
            training.count = step
            keys = sealing() if seals else None
            pr.report({"loss": 1 / step}, training, step=step, storage_path=root, sealing=keys)

    DataParallelTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=0),
        run_config=ray.train.RunConfig(name="run", storage_path=str(root)),
    ).fit()
    return found[0]


def test_run_seals_resumes_and_goes_back_for_no_tampering(tmp_path):
    trained(tmp_path, 2)
    assert_hidden(tmp_path / "run")
    assert trained(tmp_path, 3) == 2
    newest = max((tmp_path / "run").glob("penstock-*"))
    assert penstock.load(newest, identities=[KEY])["count"] == 3
    with pytest.raises(SealedError):
        trained(tmp_path, 3, opens=())
    tamper(newest)
    with pytest.raises(TamperedError):
        trained(tmp_path, 3)
    assert newest.exists()
    shutil.rmtree(newest)
    trained(tmp_path / "clear", 3, seals=False, opens=())
    shutil.copytree(max((tmp_path / "clear" / "run").glob("penstock-*")), newest)
    with pytest.raises(NotSealedError):
        trained(tmp_path, 3)
