"""Programs for a CUDA device that run on the host."""

from __future__ import annotations

import os

import pytest

import forks

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
