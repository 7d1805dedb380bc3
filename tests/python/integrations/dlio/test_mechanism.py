"""`penstock.integrations.dlio.Checkpointing`: DLIO's states saved and loaded by Penstock."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("dlio_benchmark", reason="DLIO has its own environment: scripts/dlio test")

import torch
from dlio_programs import (
    IS_RELEASE,
    TINY_HERE,
    mechanism,
    mpirun,
    tensors_of,
)

import penstock
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingDependencyError,
    StateMismatchError,
)
from penstock.integrations.dlio import Checkpointing, fitting
from penstock.integrations.dlio.states import states_of

HERE = Path(__file__).parent

of_repository = pytest.mark.skipif(IS_RELEASE, reason="DLIO 2.0.0 has no such models")


@pytest.fixture
def make(monkeypatch, disk_path):
    """Makes the mechanism of a run in this process, anew at each call."""

    def made(*settings):
        monkeypatch.setattr(Checkpointing, "_instance", None)
        return mechanism(disk_path, *TINY_HERE, *settings)

    return made


@pytest.fixture
def path(disk_path):
    """The directory of the checkpoint of epoch 1, step 3."""
    return disk_path / "checkpoints" / "global_epoch1_step3"


def test_two_ranks_save_load_and_fail_together(tmp_path):
    done = mpirun(2, str(HERE / "mechanism_worker.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    (held,) = [line for line in done.stdout.splitlines() if line.startswith("HELD")]
    assert len(json.loads(held.removeprefix("HELD"))) == 4


def test_an_error_of_any_class_fails_both_ranks():
    done = mpirun(2, str(HERE / "ranks_worker.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("HELD") == 2


def test_all_tensors_of_a_run_are_stored_under_the_names_of_dlios_files(make, path):
    ours = make()
    ours.save_checkpoint(1, 3)
    states = states_of(ours, 0)
    stored = penstock.load(path)["rank_0"]
    assert stored.keys() == states.keys()
    expected, found = tensors_of(states), tensors_of(stored)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    prefix = "model-0" if IS_RELEASE else "zero_pp_rank_0_mp_rank_0_model_states"
    assert prefix in stored


def test_a_second_save_replaces_the_first(make, path):
    ours = make()
    ours.save_checkpoint(1, 3)
    first = penstock.inspect(path).id
    ours.checkpoint(1, 3)
    assert penstock.inspect(path).id != first
    assert penstock.verify(path).ok


def lose_shard(path):
    next(path.glob("shard-*")).unlink()


def lose_part(path):
    next(path.glob("part-*")).unlink()


def cut_shard(path):
    shard = next(path.glob("shard-*"))
    os.truncate(shard, shard.stat().st_size - 1)


def flip_bit(path):
    shard = next(path.glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 4
    shard.write_bytes(data)


def never_finish(path):
    (path / "manifest.json").unlink()


DAMAGE = {
    lose_shard: CorruptCheckpointError,
    lose_part: CorruptCheckpointError,
    cut_shard: CorruptCheckpointError,
    flip_bit: CorruptCheckpointError,
    never_finish: IncompleteCheckpointError,
    shutil.rmtree: CheckpointNotFoundError,
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__)
def test_bad_checkpoints_are_named_errors(make, path, damage):
    ours = make()
    ours.save_checkpoint(1, 3)
    damage(path)
    with pytest.raises(DAMAGE[damage], match="global_epoch1_step3"):
        ours.load_checkpoint(1, 3)


def test_another_number_of_ranks_is_refused_with_the_number_to_start(make, path):
    ours = make()
    penstock.save(path, {"rank_0": {}}, metadata={"dlio": {"ranks": 4}})
    with pytest.raises(StateMismatchError, match=r"by 4 ranks.*has 1.*mpirun -np 4"):
        ours.load_checkpoint(1, 3)
    penstock.save(path, {"w": torch.ones(3)}, overwrite=True)
    with pytest.raises(StateMismatchError, match="not saved by DLIO"):
        ours.load_checkpoint(1, 3)


@of_repository
@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("model.transformer.hidden_size=256", r"layer|model_states"),
        ("model.num_layers=3", r"model_states\.\d+"),
        ("model.model_datatype=fp32", r"float16.*float32"),
    ],
)
def test_another_model_is_refused_with_the_tensor_that_differs(make, setting, key):
    make().save_checkpoint(1, 3)
    other = make(f"++workload.{setting}")
    before = {name: one.clone() for name, one in tensors_of(states_of(other, 0)).items()}
    with pytest.raises(StateMismatchError, match=key):
        other.load_checkpoint(1, 3)
    after = tensors_of(states_of(other, 0))
    assert all(torch.equal(before[name], after[name]) for name in before)


OPTIMIZER = "zero_pp_rank_0_mp_rank_0_optim_states"


class Rank:
    """The attributes of DLIO's mechanism on a rank, with the number of a layer for its tensors."""

    def __init__(self, stage, *, pipeline=1, data_rank=0, rank=0):
        self.rank_to_checkpoint = rank
        self.model_parallelism_rank = rank
        self.data_parallelism_rank = data_rank
        self.model_state = None
        self.layer_state = {"0": {"0": 0}, "1": {"0": 1}}
        self.optimization_state = {"0": 2}
        self.args = SimpleNamespace(zero_stage=stage, pipeline_parallelism=pipeline, num_layers=2)

    def get_layer_index(self):
        return 0, 1


@of_repository
@pytest.mark.parametrize(
    ("rank", "names"),
    [
        (Rank(3), ["zero_pp_rank_0_mp_rank_0_model_states", OPTIMIZER]),
        (Rank(1), ["model_0_model_states", OPTIMIZER]),
        (
            Rank(1, pipeline=2),
            ["layer_0-model_0_model_states", "layer_1-model_0_model_states", OPTIMIZER],
        ),
        (Rank(1, data_rank=1), ["zero_pp_rank_1_mp_rank_0_optim_states"]),
        (Rank(0, rank=1), []),
    ],
)
def test_each_rank_saves_the_states_of_dlios_files(rank, names):
    assert list(states_of(rank, 0)) == names


@pytest.mark.skipif(not IS_RELEASE, reason="DLIO's repository counts layers in another way")
def test_the_release_saves_each_layer_by_itself(make, path):
    ours = make()
    ours.checkpoint(1, 3)
    stored = penstock.load(path)["rank_0"]
    assert sorted(stored) == ["layer-0-0", "layer-1-0", "model-0", "optimizer-0"]
    nbytes = sum(one.nbytes for one in tensors_of(stored).values())
    assert nbytes == 3001 + 3 * (5000 + 4096) + 2 * (7000 + 100)


def test_a_changed_dlio_is_refused_by_name(monkeypatch):
    from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
    from dlio_benchmark.utils.utility import DLIOMPI

    monkeypatch.delattr(DLIOMPI, "comm")
    name = "checkpoint" if IS_RELEASE else "load_checkpoint"
    monkeypatch.delattr(PyTorchCheckpointing, name)
    if not IS_RELEASE:
        monkeypatch.delattr(PyTorchCheckpointing.__mro__[1], name)
    with pytest.raises(MissingDependencyError, match=r"no .*comm"):
        fitting.check()
