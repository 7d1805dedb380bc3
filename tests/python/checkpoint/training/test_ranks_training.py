"""Training states of many ranks: under FSDP, tensor parallelism, both, and with neither."""

from __future__ import annotations

import pytest
import torch

import penstock
from compare import assert_same, tensor_bytes
from parallel import Run, gathered

KINDS = ["plain", "fsdp", "tp", "fsdp+tp"]


def tensors(state):
    """Returns all tensors of a state by name, whole."""
    found = {}

    def walk(value, name):
        if isinstance(value, torch.Tensor):
            found[name] = tensor_bytes(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")

    walk(gathered(state), "")
    return found


# Functions that run on every rank.


def save_run(path, kind, seed):
    run = Run(kind, seed)
    penstock.save(path, run.state())
    return tensors(run.state()), run.step()


def resume_run(path, kind, seed):
    """Resumes from a checkpoint of any kind of parallelism."""
    run = Run(kind, seed, steps=1)
    state = run.state()
    penstock.load(path, into=state)
    run.resume(state)
    return tensors(run.state()), run.step()


def load_plain(path):
    run = Run("plain", 9)
    state = run.state()
    penstock.load(path, into=state)
    return tensors(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_as_if_it_had_not_stopped(jobs, disk_path, kind):
    saved = jobs.of(4).call(save_run, disk_path / "ckpt", kind, 1)
    resumed = jobs.of(4).call(resume_run, disk_path / "ckpt", kind, 2)
    assert resumed == saved
    assert load_plain(disk_path / "ckpt") == saved[0][0]
    assert penstock.verify(disk_path / "ckpt").ok


@pytest.mark.parametrize(
    ("saved_as", "resumed_as", "ranks"),
    [("fsdp+tp", "fsdp", 4), ("fsdp", "tp", 2), ("plain", "fsdp+tp", 4), ("tp", "plain", 2)],
)
def test_a_run_goes_on_under_another_parallelism(jobs, disk_path, saved_as, resumed_as, ranks):
    saved = jobs.of(4).call(save_run, disk_path / "ckpt", saved_as, 1)
    resumed = jobs.of(ranks).call(resume_run, disk_path / "ckpt", resumed_as, 2)
    for found, _ in resumed:
        assert found == saved[0][0]


def test_one_process_goes_on_with_what_four_saved_and_the_other_way_round(jobs, disk_path):
    saved = jobs.of(4).call(save_run, disk_path / "of-4", "fsdp+tp", 1)
    assert resume_run(disk_path / "of-4", "plain", 2)[0] == saved[0][0]
    alone = save_run(disk_path / "of-1", "plain", 3)
    for found, _ in jobs.of(4).call(resume_run, disk_path / "of-1", "fsdp+tp", 4):
        assert found == alone[0]


def test_the_whole_state_is_that_of_one_process(jobs, disk_path):
    """Without ``into=``: keys, their order, types."""
    jobs.of(4).call(save_run, disk_path / "of-4", "fsdp", 1)
    penstock.save(disk_path / "of-1", Run("plain", 1).state())
    one, four = penstock.load(disk_path / "of-1"), penstock.load(disk_path / "of-4")
    assert_same(four["optimizer"]["param_groups"], one["optimizer"]["param_groups"])
    assert list(four["model"]) == list(one["model"])
    assert list(four["optimizer"]["state"]) == list(one["optimizer"]["state"])
    assert type(four["model"]) is type(one["model"])
    for name, tensor in one["model"].items():
        assert four["model"][name].shape == tensor.shape
