"""DeepSpeed in the ranks of a job, with Penstock as its checkpoint engine."""

from __future__ import annotations

import os

import torch.distributed as dist


def deepspeed_here():
    """Initializes DeepSpeed in a rank of a job, as its launcher does."""
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    import deepspeed

    # DeepSpeed would compile its own op for collectives.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It refuses processors without half-precision instructions, which are only slower.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    return deepspeed


def config_of(stage, dtype, **further):
    """Returns a configuration of DeepSpeed.

    Args:
        stage: Stage of ZeRO.
        dtype: DeepSpeed's name of a type.
        further: Settings of that type.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **further}
    return config


def attach(engine, **how):
    from penstock.integrations.deepspeed import checkpoint_engine

    checkpoint_engine.attach(engine, **how)
