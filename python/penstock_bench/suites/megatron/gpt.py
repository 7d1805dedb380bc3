"""A small GPT of Megatron-Core: its model, data parallelism and distributed optimizer on gloo.

Nothing is imitated but the GPU (`without_gpu`): tensor parallelism, the gradient buffers, the
optimizer whose state the data parallel ranks share, and the indexed dataset are Megatron-Core's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from penstock.offload import TensorIO
from penstock_bench.workloads.without_gpu import host_for_cuda

if TYPE_CHECKING:
    from pathlib import Path

_SEED = 1234
_TOKEN = np.dtype(np.int32)


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batches.

    Attributes:
        layers: Number of layers.
        hidden: Width, of which there are 64 for each head of attention.
        vocabulary: Number of different tokens.
        sequence: Tokens of a sample, which are read from the dataset at once, 4 bytes each.
        batch: Samples of a rank in a step.
    """

    layers: int
    hidden: int
    vocabulary: int
    sequence: int
    batch: int


def write_dataset(prefix: Path, size: Size, samples: int) -> None:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx`` with Megatron-Core's builder, of random tokens."""
    draw = np.random.default_rng(_SEED)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=_TOKEN.type)
    for _ in range(samples):
        tokens = draw.integers(0, size.vocabulary, size.sequence + 1, _TOKEN)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


class TracedReader:
    """Reads an indexed dataset as Megatron-Core does without a memory map: one request a sample.

    The requests are Penstock's, through the page cache, so that a trace shows them.

    Args:
        path: The ``.bin`` file.
    """

    def __init__(self, path: str) -> None:
        self._io = TensorIO(direct="off", io_threads=1)
        self._file = self._io.open(path)

    def read(self, dtype: type[np.number[Any]], count: int, offset: int) -> np.ndarray[Any, Any]:
        """Returns some tokens from an offset in bytes on."""
        tokens = np.empty(count, dtype)
        self._io.read(tokens, self._file, int(offset)).result()
        return tokens

    def close(self) -> None:
        """Ends the reads."""
        self._file.close()
        self._io.close()


class Trainer:
    """One rank of a training.

    Args:
        rank: Which rank this is.
        ranks: Number of ranks.
        tensor_parallel: Ranks that share each layer; the rest is data parallelism.
        port: TCP port of the job's store.
        size: The size of the model.
        data: Path of the dataset without suffix.
    """

    def __init__(
        self, rank: int, ranks: int, tensor_parallel: int, port: int, size: Size, data: str
    ) -> None:
        host_for_cuda()
        _keep_steps()
        torch.set_num_threads(1)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        model_parallel_cuda_manual_seed(_SEED)
        self._size = size
        self.iteration = 0
        self._dataset = IndexedDataset(data, mmap=False)
        self.reader = self._dataset.bin_reader = TracedReader(f"{data}.bin")
        self._order = np.random.default_rng(_SEED).permutation(len(self._dataset))
        config = _config(size)
        specification = get_gpt_layer_local_spec(normalization="RMSNorm")
        self._model = GPTModel(
            config,
            specification,
            vocab_size=size.vocabulary,
            max_sequence_length=size.sequence,
            share_embeddings_and_output_weights=False,
        ).bfloat16()
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self._parallel = DistributedDataParallel(config, buffers, self._model)
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            [self._parallel],
        )

    def step(self) -> float:
        """Trains on the next batch and returns its loss."""
        tokens = self._tokens()
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        length = self._size.sequence
        places = torch.arange(length).expand_as(inputs)
        hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        self._parallel.zero_grad_buffer()
        self._optimizer.zero_grad()
        loss = self._parallel(inputs, places, hidden, labels=labels).mean()
        loss.backward()
        finalize_model_grads([self._parallel])
        self._optimizer.step()
        self.iteration += 1
        return float(loss.detach())

    def _tokens(self) -> torch.Tensor:
        """The batch of this rank, read by the first of its tensor parallel ranks."""
        size = self._size
        shape = size.batch, size.sequence + 1
        group = parallel_state.get_tensor_model_parallel_group()
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            replicas = parallel_state.get_data_parallel_world_size()
            replica = parallel_state.get_data_parallel_rank()
            first = (self.iteration * replicas + replica) * size.batch
            ids = self._order.take(range(first, first + size.batch), mode="wrap")
            tokens = torch.from_numpy(np.stack([self._dataset[int(one)] for one in ids])).long()
        else:
            tokens = torch.empty(shape, dtype=torch.int64)
        dist.broadcast(tokens, parallel_state.get_tensor_model_parallel_src_rank(), group)
        return tokens

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """The sharded state of model, optimizer and iteration."""
        if is_loading:
            # PyTorch's Adam has no state before its first step.
            self._parallel.zero_grad_buffer()
            self._optimizer.step()
        model = self._model.sharded_state_dict()
        optimizer = self._optimizer.sharded_state_dict(
            model,
            is_loading=is_loading,
            metadata={"distrib_optim_sharding_type": "fully_reshardable"},
        )
        return {"model": model, "optimizer": optimizer, "iteration": self.iteration}

    def restore(self, loaded: dict[str, Any]) -> None:
        """Continues from a loaded state."""
        self._model.load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])
        self.iteration = loaded["iteration"]

    def close(self) -> None:
        """Leaves the job."""
        self.reader.close()
        dist.barrier()
        dist.destroy_process_group()


def _keep_steps() -> None:
    """Lets the distributed optimizer load into PyTorch's Adam.

    Its state of a parameter has a "step", which Megatron-Core has set before, and then expects
    among the loaded tensors, too: with Apex and Transformer Engine there is none.
    """
    assign = DistributedOptimizer._set_main_param_and_optimizer_states
    if hasattr(assign, "__wrapped__"):
        return

    @wraps(assign)
    def assign_all(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        step = self.optimizer.state[main].get("step")
        assign(self, model_param, tensors if step is None else {"step": step, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = assign_all


def _config(size: Size) -> TransformerConfig:
    """A gated model without biases and dropout, in bfloat16."""
    return TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.hidden // 64,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
