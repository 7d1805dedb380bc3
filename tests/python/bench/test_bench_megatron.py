"""Suites that run Megatron-Core: a small GPT, its checkpoints and their figures."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("matplotlib", reason="comes with make bench", exc_type=ImportError)
pytest.importorskip("megatron.core.dist_checkpointing")

import forks
from penstock_bench.harness import process
from penstock_bench.harness.options import free_port
from penstock_bench.results.samples import Sample, Samples
from penstock_bench.suites.megatron import __main__ as suite
from penstock_bench.suites.megatron import run
from penstock_bench.suites.megatron.checkpoints import LIBRARIES, bytes_by_rank
from penstock_bench.suites.megatron.gpt import Size, write_dataset
from ranks import IMPORTS

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

TINY = Size(layers=1, hidden=128, vocabulary=128, sequence=32, batch=1)
RANKS = 2


def test_bytes_are_those_of_the_ranks_files(tmp_path):
    for name, size in {
        "shard-00000-00.abc.safetensors": 5,
        "shard-00010-00.abc.safetensors": 7,
        "__10_0.distcp": 2,
        "__10_1.distcp": 4,
        "manifest.json": 9,
        "common.pt": 9,
    }.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert bytes_by_rank(tmp_path) == {0: 5, 10: 13}


def outcome(durable, call=0.1, peak_bytes=0, load_seconds=1.0):
    figures = {"durable": durable, "call": [call] * len(durable), "peak_bytes": [peak_bytes]}
    return {"nbytes": 10, "load_seconds": load_seconds, **figures}


def test_the_slowest_rank_counts_and_the_first_save_is_apart():
    found = suite.slowest([outcome([9.0, 2.0, 2.0], peak_bytes=3), outcome([8.0, 1.0, 4.0])])
    assert (found["first_seconds"], found["seconds"], found["peak_bytes"]) == (9.0, 3.0, 3)


def test_bars_compare_within_a_round():
    results = Samples({}, {}, {})
    for index, slow in enumerate((1.0, 3.0)):
        for library, seconds in (("penstock", 1.0), ("torch_dist", 4.0)):
            for mode in ("sync large", "async large"):
                figures = suite.slowest([outcome([2 * seconds * slow, seconds * slow])])
                results.add(Sample(library, index, mode), figures)
    exchanged = [
        {"library": "penstock", "tensors": tensors, "received_bytes": 1000}
        for tensors in (16, 4096)
    ]
    found = {one.title: one for one in suite.bars(results, exchanged)}
    assert found["durable save / torch_dist"].found.median == 0.25
    assert found["first save / later saves"].found.median == 2
    assert found["first save / later saves"].is_met is False
    assert found["bytes between ranks, 4096 / 16 tensors"].is_met
    assert found["extra host memory / 256 MiB, small shards"].found is None


def train(place, library, name, tensor_parallel, begin):
    """Trains three steps, saves after the second; returns the losses."""
    port = free_port()
    tasks = [
        run.Task(
            library=library,
            is_parallel=True,
            is_async=begin is None,
            rank=rank,
            ranks=RANKS,
            tensor_parallel=tensor_parallel,
            port=port,
            size=TINY,
            data=str(place / "tokens"),
            directory=str(place / name),
            begin=begin,
            trace=None,
            steps=3,
            interval=2,
        )
        for rank in range(RANKS)
    ]
    found = process.run(run.run, tasks, place, timeout_seconds=400)
    assert not [one["error"] for one in found if "error" in one]
    return [one["losses"] for one in found]


@pytest.mark.slow
def test_a_gpt_goes_on_at_another_geometry_as_from_megatrons_own_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_preloaded", IMPORTS)
    write_dataset(tmp_path / "tokens", TINY, 64)
    later = {}
    for library in LIBRARIES:
        train(tmp_path, library, library, 2, None)
        begin = str(tmp_path / library / "iter_0000002")
        later[library] = train(tmp_path, library, f"{library}-later", 1, begin)
    # To the last bit: the same state in the same geometry.
    assert later["penstock"] == later["torch_dist"]


STEP = """
import torch
from penstock_bench.workloads.without_gpu import host_for_cuda

host_for_cuda()
weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
weight.grad = torch.ones(4)
optimizer = torch.optim.Adam([weight])
optimizer.step()
print(weight.device, torch.cuda.is_available())
"""


@pytest.mark.parametrize("check", ["0", "1"])
def test_an_optimizer_steps_however_pytorch_looks_for_devices(check):
    # Accelerate sets it for the process and its children.
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": check}
    done = forks.run(["-c", STEP], env=environment, popen=forks.RankPopen)
    assert done.stdout.split() == ["cpu", "False"], done.stderr
