"""The parts of a model and its optimizer on the ranks of a job: names, types and shapes.

Two views of one model. `dlio_bytes` counts what the checkpoint generator of DLIO and MLPerf Storage
writes, six large tensors a layer and three of the optimizer, so that totals can be held against
published ones. `tensors` gives a realistic state: every matrix by itself, and of each parameter the
two moments and the step that Adam keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODEL_BYTES = 2
"""Bytes of an element of the model: fp16 or bf16."""

_OPTIMIZER_BYTES = 4

_DLIO_GROUPS = 3
"""Tensors of the optimizer: a copy of the parameters and two moments."""

_DLIO_EXTRA_WIDTHS = 5
"""Beside each of them DLIO writes so many times the width, on every rank."""


class Tensor(NamedTuple):
    """One tensor of a rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * (2 if self.dtype == "bfloat16" else 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer and how a job lays it out.

    Attributes:
        vocabulary: Tokens.
        hidden: Width.
        ffn: Width of the feed-forward network.
        layers: Blocks.
        heads: Attention heads.
        kv_heads: Of keys and values.
        tp: Tensor parallelism.
        pp: Pipeline parallelism.
        dp: Data parallelism.
        zero: Stage of ZeRO: from 1 on the optimizer is sharded over ``dp``, from 3 on the model.
        is_gated: Whether the network has a gate, as in Llama.
    """

    vocabulary: int = 128_256
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    is_gated: bool = True

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.dp

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def parameters(self) -> int:
        """Parameters: embedding and head, per block two norms, attention and network, a norm."""
        h, ffn = self.hidden, self.ffn
        attention = h * (h + 2 * self.kv_width) + h * h
        block = 2 * h + attention + (3 if self.is_gated else 2) * h * ffn
        return 2 * self.vocabulary * h + self.layers * block + h

    def stage(self, pp_rank: int) -> range:
        """The blocks of a pipeline stage: as many on each, one more on the first ones."""
        each, more = divmod(self.layers, self.pp)
        first = each * pp_rank + min(pp_rank, more)
        return range(first, first + each + (pp_rank < more))

    def place(self, rank: int) -> tuple[int, int, int]:
        """Which tensor-parallel, pipeline and data-parallel rank a rank is."""
        return rank % self.tp, rank // self.tp % self.pp, rank // (self.tp * self.pp)


_LLAMA_8B = Model(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, dp=8, zero=3)
# 128 heads, as DLIO's own settings have it (the model has 64): that makes its published total.
_LLAMA_70B = Model(
    hidden=8192, ffn=28672, layers=80, heads=128, kv_heads=8, tp=8, dp=8, zero=3
)  # fmt: skip
_LLAMA_405B = Model(
    hidden=16384, ffn=53248, layers=126, heads=128, kv_heads=8, tp=8, pp=32, dp=2, zero=1
)  # fmt: skip

MODELS: dict[str, Model] = {
    "gpt2": Model(
        vocabulary=50_257, hidden=768, ffn=3072, layers=12, heads=12, kv_heads=12, is_gated=False
    ),
    "llama3-8b": _LLAMA_8B,
    "llama3-70b": _LLAMA_70B,
    "llama3-405b": _LLAMA_405B,
    "llama3-405b-tp4-pp2": Model(
        hidden=16384, ffn=53248, layers=126, heads=128, kv_heads=8, tp=4, pp=2
    ),
    "nemotron-340b": Model(
        vocabulary=256_000, hidden=18432, ffn=73728, layers=96, heads=96, kv_heads=8,
        tp=8, pp=12, dp=4, zero=1, is_gated=False,
    ),
    "1t": Model(
        hidden=25872, ffn=98304, layers=128, heads=192, kv_heads=32, tp=8, pp=64, dp=2, zero=1
    ),
}  # fmt: skip
"""Models by name, with the layouts that DLIO and MLPerf Storage give them."""


def dlio_bytes(model: Model) -> int:
    """Bytes of a checkpoint as DLIO's generator makes it, of all ranks.

    Norms are on every tensor-parallel rank; the model is written by one data-parallel rank, or in
    parts by all where it is sharded; the optimizer by all, or by one where it is not sharded.
    """
    h, tp = model.hidden, model.tp
    sharded = model.dp if model.zero >= 3 else 1
    parts = (
        h * (h + 2 * model.kv_width) // tp // sharded,
        h * h // tp // sharded,
        h * (2 if model.is_gated else 1) * model.ffn // tp // sharded,
        h * model.ffn // tp // sharded,
    )
    block = sum(parts) + 2 * (h // sharded)
    ends = 2 * (h * model.vocabulary // tp // sharded) + h // sharded
    elements = (model.layers * block + ends) * tp * sharded
    writers = model.world_size if model.zero >= 1 else model.tp * model.pp
    group = model.parameters // writers + _DLIO_EXTRA_WIDTHS * h
    return elements * _MODEL_BYTES + writers * _DLIO_GROUPS * group * _OPTIMIZER_BYTES


def tensors(model: Model, rank: int) -> Iterator[Tensor]:
    """The tensors that a rank writes: parameters, and two moments and a step of each.

    Matrices are split over tensor-parallel ranks, along rows or columns as Megatron does. Tensors
    that ZeRO shards are split along the first dimension. Without it only the first data-parallel
    rank writes.
    """
    tp_rank, pp_rank, dp_rank = model.place(rank)
    for name, shape, is_norm in _parameters(model, pp_rank):
        if is_norm and tp_rank:
            # Replicated: one writes it.
            continue
        weight = _shard(shape, model.dp, dp_rank, is_sharded=model.zero >= 3)
        if weight is not None:
            yield Tensor(f"model.{name}", "bfloat16", weight)
        moment = _shard(shape, model.dp, dp_rank, is_sharded=model.zero >= 1)
        if moment is not None:
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                yield Tensor(f"optimizer.{name}.{kind}", "float32", moment)
            yield Tensor(f"optimizer.{name}.step", "float32", ())


def _parameters(model: Model, pp_rank: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Names and shapes of one pipeline stage on one tensor-parallel rank, and which are norms."""
    h, tp = model.hidden, model.tp
    if pp_rank == 0:
        yield "embedding.weight", (-(-model.vocabulary // tp), h), False
    for number in model.stage(pp_rank):
        block = f"layers.{number}"
        yield f"{block}.input_norm.weight", (h,), True
        yield f"{block}.attention.q.weight", (h // tp, h), False
        yield f"{block}.attention.k.weight", (-(-model.kv_width // tp), h), False
        yield f"{block}.attention.v.weight", (-(-model.kv_width // tp), h), False
        yield f"{block}.attention.o.weight", (h, h // tp), False
        yield f"{block}.output_norm.weight", (h,), True
        if model.is_gated:
            yield f"{block}.ffn.gate.weight", (model.ffn // tp, h), False
        yield f"{block}.ffn.up.weight", (model.ffn // tp, h), False
        yield f"{block}.ffn.down.weight", (h, model.ffn // tp), False
    if pp_rank == model.pp - 1:
        yield "norm.weight", (h,), True
        yield "head.weight", (-(-model.vocabulary // tp), h), False


def _shard(
    shape: tuple[int, ...], dp: int, dp_rank: int, *, is_sharded: bool
) -> tuple[int, ...] | None:
    """The part of a tensor that a data-parallel rank writes; None for nothing."""
    if not is_sharded:
        return shape if dp_rank == 0 else None
    rows = -(-shape[0] // dp)
    mine = min(shape[0], rows * (dp_rank + 1)) - rows * dp_rank
    return (mine, *shape[1:]) if mine > 0 else None
