"""DeepSpeed's mixtures of experts, with a file for each expert, and loss scales."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deepspeeds import attach, config_of, deepspeed_here

import penstock

WIDTH = 8
STEPS = 4
EXPERTS = 4


class Layers(torch.nn.Module):
    """Two mixtures of experts between other layers; their gates draw random numbers."""

    def __init__(self, ranks):
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Linear(16, WIDTH))
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.mixed = MoE(WIDTH, expert, EXPERTS, ranks, k=1, noisy_gate_policy="RSample")
        self.mixed_again = MoE(
            WIDTH, torch.nn.Linear(WIDTH, WIDTH), EXPERTS, ranks, k=2, use_residual=True
        )
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        """Returns the loss."""
        found, one, _ = self.mixed(self.first(batch))
        found, other, _ = self.mixed_again(found)
        return self.last(found).float().square().mean() + 0.1 * (one + other)


def build(stage, dtype, ranks, how):
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    deepspeed = deepspeed_here()
    torch.manual_seed(11)
    model = Layers(ranks)
    parameters = {"params": list(model.parameters()), "name": "parameters"}
    # A scale that changes within these few steps.
    scale = {"initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=split_params_into_different_moe_groups_for_optimizer(parameters),
        config=config_of(stage, dtype, **(scale if dtype == "fp16" else {})),
    )
    torch.manual_seed(20 + dist.get_rank())
    attach(engine, **how)
    return engine


def train(engine, steps):
    """Returns each step's loss and loss scale."""
    found = []
    for _ in range(steps):
        batch = torch.randn(WIDTH, WIDTH).to(engine.module.last.weight.dtype)
        loss = engine(batch)
        engine.backward(loss)
        scale = getattr(engine.optimizer, "cur_scale", 1)
        engine.step()
        found.append((loss.item(), scale))
    return found


def saved(directory, *kind):
    engine = build(*kind)
    train(engine, 3)
    engine.save_checkpoint(directory, client_state={"epoch": 7})
    found = train(engine, STEPS)
    engine.destroy()
    return found


def resumed(directory, *kind):
    engine = build(*kind)
    path, client_state = engine.load_checkpoint(directory)
    assert (path is not None, client_state["epoch"]) == (True, 7)
    found = train(engine, STEPS)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks", "how"),
    [
        (0, "fp32", 2, {}),
        (2, "bf16", 1, {"background": True}),
        (1, "fp16", 2, {"background": True, "lazy": True}),
    ],
)
def test_experts_and_loss_scales_go_on_bit_for_bit(jobs, tmp_path, stage, dtype, ranks, how):
    """On two ranks each has half of the experts; on one, all."""
    directory = str(tmp_path)
    wanted = jobs.of(2).call(saved, directory, stage, dtype, ranks, how)
    tag = tmp_path / "global_step3"
    names = {path.name for path in tag.glob("layer_*_expert_*_model_states.pt")}
    assert len(names) == 2 * EXPERTS
    assert names < penstock.load(tag, keys="files.*")["files"].keys()
    assert jobs.of(2).call(resumed, directory, stage, dtype, ranks, how) == wanted
    assert (len({scale for _, scale in wanted[0]}) > 1) == (dtype == "fp16")
