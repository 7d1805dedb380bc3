"""Tensors made of other tensors, saved by two ranks: loaded by one, and by two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import penstock
from compare import assert_same
from penstock.errors import UnsupportedStateError

pytestmark = pytest.mark.slow
"""The ranks import torchao, which takes longer than the tests themselves."""


def quantized(seed: int) -> Any:
    """Returns torchao's quantized weight of eight bits."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    quantize_(model, Int8WeightOnlyConfig())
    return model.state_dict()["0.weight"]


def made(seed: int) -> dict[str, Any]:
    values = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))
    # The seed changes values, not which elements are nonzero.
    values = (values + 1) * (torch.arange(24).view(4, 6) % 5 == 0)
    rows = [values[:2].clone(), values[:3].clone()]
    return {
        "quantized": quantized(seed),
        "nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "coo": values.to_sparse(),
        "csr": values.to_sparse_csr(),
    }


def state(rank: int) -> dict[str, Any]:
    """Half of the state is the same on all ranks, and half is a rank's own."""
    shared = made(0)
    shared["tied"] = shared["quantized"]
    return {"all": shared, "own": penstock.PerRank(made(1 + rank))}


def save(path: str) -> None:
    penstock.save(path, state(dist.get_rank()))


def load(path: str) -> None:
    """Loads this rank's state, as new tensors and into existing ones."""
    rank = dist.get_rank()
    wanted = {"all": state(rank)["all"], "own": made(1 + rank)}
    assert_same(penstock.load(path), wanted)
    into = {"all": made(7), "own": made(8)}
    into["all"]["tied"] = into["all"]["quantized"]
    penstock.load(path, into=into)
    assert_same(into, wanted)


def test_two_ranks_save_them_and_one_or_two_load_them(jobs: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "ckpt")
    jobs.of(2).call(save, path)
    assert penstock.verify(path).ok
    jobs.of(2).call(load, path)
    for rank in (0, 1):
        found = penstock.load(path, rank=rank)
        assert_same(found, {"all": state(0)["all"], "own": made(1 + rank)})
        assert found["all"]["tied"] is found["all"]["quantized"]
    into = {"all": made(7)}
    into["all"]["tied"] = into["all"]["quantized"]
    penstock.load(path, into=into, keys="all.*")
    assert_same(into["all"], state(0)["all"])


def test_what_all_ranks_hold_is_stored_once(jobs: Any, tmp_path: Any) -> None:
    jobs.of(2).call(save, str(tmp_path / "ckpt"))
    names = [one.name for one in penstock.inspect(tmp_path / "ckpt").tensors]
    assert names.count("all.quantized.qdata") == 1
    assert names.count("own.quantized.qdata") == 2


def distributed(path: str, placement: Any) -> None:
    """A moment of torchao's optimizers for a parameter that FSDP has sharded."""
    mesh = init_device_mesh("cpu", (2,))
    local = OptimState8bit.zeros((4, 256), signed=True, block_size=256)
    moment = DTensor.from_local(local, mesh, [placement], run_check=False)
    penstock.save(path, {"state": {"exp_avg": moment}})


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_one_that_is_the_local_tensor_of_a_dtensor_is_refused_by_name(
    jobs: Any, tmp_path: Any, placement: Any
) -> None:
    with pytest.raises(UnsupportedStateError, match=r"to_local\(\)") as caught:
        jobs.of(2).call(distributed, str(tmp_path / "ckpt"), placement)
    assert caught.value.key == "state.exp_avg"
    assert not (tmp_path / "ckpt" / "manifest.json").exists()
