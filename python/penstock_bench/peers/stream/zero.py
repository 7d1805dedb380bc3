"""DeepSpeed's ZeRO-Inference: stage 3 without an optimizer, parameters on storage."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_bench.peers.stream.base import Setting

_BUFFERS = 5
"""Its default."""
_BLOCK_BYTES, _DEPTH = 1 << 20, 32


class Zero:
    """It writes the model anew when it starts; parameters of less than a block stay in memory."""

    joins_early = False

    def prepare(self, setting: Setting) -> None:
        """Nothing that it would take over from another process."""

    def open(self, setting: Setting) -> Any:
        """The module of its engine."""
        import deepspeed
        import torch
        import transformers
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        _alone()
        deepspeed.init_distributed("gloo")
        config = transformers.AutoConfig.from_pretrained(setting.model)
        settings = _settings(setting, config)
        # It has to be there as long as the model.
        self._config = HfDeepSpeedConfig(settings)  # type: ignore[no-untyped-call]
        torch.set_grad_enabled(False)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(setting.model)
        engine, *_ = deepspeed.initialize(model=model.eval(), config=settings)
        self._engine = engine
        return engine.module.eval()

    def report(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class ZeroOnOurs(Zero):
    """The same, its tensors moved by `penstock.offload`."""

    def open(self, setting: Setting) -> Any:
        """The module of its engine."""
        from penstock.integrations import deepspeed

        deepspeed.enable()
        return super().open(setting)


def _settings(setting: Setting, config: Any) -> dict[str, Any]:
    """As its documentation of ZeRO-Inference has it."""
    largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    # All of the memory goes to the buffers: ZeRO-Inference has no other cache.
    count = max(2, min(_BUFFERS, setting.memory_bytes // (largest * 2)))
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {
                "device": "nvme",
                "nvme_path": setting.place,
                "pin_memory": True,
                "buffer_count": count,
                "buffer_size": largest,
            },
        },
        "aio": {
            "block_size": _BLOCK_BYTES,
            "queue_depth": _DEPTH,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def _alone() -> None:
    """Sets the variables of a launcher for one process."""
    # Without GPUs: weights are computed with where they are read to.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_PORT=str(port))
