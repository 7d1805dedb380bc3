"""Sealed checkpoints of torchtitan's runs."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torchtitan")

import penstock
from penstock.errors import CannotSealError, KeyFileError, NotSealedError, SealedError, TamperedError
from penstock.sealing import generate
from sealed_marks import assert_hidden, tamper
from titan import begun, end, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


@pytest.fixture
def keys(tmp_path):
    public = generate(tmp_path / "keys.txt")
    return {"sealing": [public], "identities": [str(tmp_path / "keys.txt")]}


def test_run_is_sealed_and_goes_back_for_no_tampering(tmp_path, keys):
    folder = tmp_path / "run"
    trained(folder, 4, async_mode="async", **keys)
    assert_hidden(folder, "tok_embeddings.weight", "ntokens_seen")
    run = begun(folder, **keys)
    assert run.checkpointer.load(step=-1)
    assert run.step == 4
    end(run)
    store = penstock.CheckpointStore(folder / "checkpoint")
    with pytest.raises(SealedError):
        trained(folder, 4)
    tamper(store.path(4))
    with pytest.raises(TamperedError):
        trained(folder, 4, **keys)
    assert store.steps() == [2, 4]
    shutil.rmtree(store.path(4))
    store.save(4, {"a": 1})
    with pytest.raises(NotSealedError):
        trained(folder, 4, **keys)


def test_clear_last_step_and_secrets_in_a_config_are_refused(tmp_path, keys):
    with pytest.raises(CannotSealError, match="last_save_in_hf"):
        begun(tmp_path / "run", **keys, last_save_in_hf=True, last_save_model_only=True)
    secret = (tmp_path / "keys.txt").read_text().splitlines()[-1]
    with pytest.raises(KeyFileError, match="file") as caught:
        begun(tmp_path / "run", identities=[secret])
    assert secret not in str(caught.value)
    assert not (tmp_path / "run").exists()
