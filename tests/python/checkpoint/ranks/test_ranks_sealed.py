"""Ranks seal one checkpoint together, and ranks of any number load it."""

from __future__ import annotations

import pytest

import penstock
from compare import assert_same
from dtensors import as_loaded, cleared, dtensors, local_bytes, plain, rank, whole_dtensors
from penstock.errors import NotSealedError, RankError, SealedError
from penstock.sealing import Sealing
from ranks import IMPATIENT

pytestmark = pytest.mark.quick

KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32


def save(path, background):
    state = {"d": dtensors(), "p": plain(rank())}
    sealing = Sealing([KEY])
    if not background:
        return penstock.save(path, state, sealing=sealing, metadata={"a": 1})
    with penstock.CheckpointStore(path.parent, sealing=sealing) as store:
        return store.save_async(1, state, lazy=background == "lazy").result()


def load(path):
    expected = {"d": dtensors(), "p": as_loaded(plain(rank()))}
    state = cleared(expected)
    loaded = penstock.load(path, into=state, identities=[KEY])
    assert local_bytes(state) == local_bytes(expected)
    assert_same(loaded["p"], expected["p"])
    whole = penstock.load(path, identities=[KEY])
    assert_same(whole["d"], whole_dtensors())


def load_resharded(path):
    state = {"d": cleared(dtensors())}
    penstock.load(path, into=state, keys="d.*", identities=[KEY])
    assert local_bytes(state["d"]) == local_bytes(dtensors())


def save_mixed(path, sealing_rank):
    sealing = Sealing([KEY]) if rank() == sealing_rank else None
    penstock.save(path, {"a": rank()}, sealing=sealing, options=IMPATIENT)


@pytest.mark.parametrize("background", [None, "eager", "lazy"])
def test_ranks_seal_and_load(job, lone_job, tmp_path, background):
    path = tmp_path / "step-0000000001"
    job.call(save, path, background)
    job.call(load, path)
    lone_job.call(load_resharded, path)
    assert penstock.verify(path).ok
    with pytest.raises(SealedError):
        penstock.load(path)


@pytest.mark.parametrize("sealing_rank", [0, 1])
def test_ranks_that_differ_in_sealing_save_nothing(job, tmp_path, sealing_rank):
    path = tmp_path / "ckpt"
    outcomes = job.outcomes(save_mixed, path, sealing_rank)
    assert all(isinstance(one, RankError) for one in outcomes)
    assert not (path / "manifest.json").exists()
    penstock.save(path, {"a": 1}, overwrite=True)
    with pytest.raises(NotSealedError):
        penstock.load(path, identities=[KEY])
