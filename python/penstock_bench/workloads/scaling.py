"""A model cut down to the room there is, with its layout and as much of its shape as can stay."""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.common.machine.cgroups import cgroup_directories
from penstock_bench.workloads.models import tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_bench.workloads.models import Model

_FFN_MULTIPLE = 8
"""The feed-forward width of a rank is a multiple of this."""


class Scaled(NamedTuple):
    """A model and what was done to it.

    The factor is its bytes as a part of those of the whole model, on the same ranks.
    """

    model: Model
    factor: float
    nbytes: int
    full_bytes: int
    how: str


def scaled(model: Model, ranks: Sequence[int], target_bytes: int) -> Scaled:
    """The largest cut of a model whose ranks write no more than so many bytes.

    Blocks go first, and with them rows of the vocabulary: every matrix keeps its size. Only where
    one block a stage is still too large is the width cut, by whole attention heads. The smallest
    there is may be larger than asked for.
    """
    full_bytes = rank_bytes(model, ranks)
    found = model
    if full_bytes > target_bytes:
        heads = [n for n in range(1, model.heads + 1) if not _width(model, n) % model.tp]

        def least(number: int) -> int:
            return rank_bytes(_cut(model, number, model.pp), ranks)

        # Of all widths whose smallest model fits the largest one; else the smallest there is.
        chosen = heads[max(bisect_right(heads, target_bytes, key=least) - 1, 0)]

        def with_layers(layers: int) -> int:
            return rank_bytes(_cut(model, chosen, layers), ranks)

        counts = range(model.pp, model.layers + 1)
        layers = counts[max(bisect_right(counts, target_bytes, key=with_layers) - 1, 0)]
        found = _cut(model, chosen, layers)
    nbytes = rank_bytes(found, ranks)
    return Scaled(found, nbytes / full_bytes, nbytes, full_bytes, _in_words(model, found))


def rank_bytes(model: Model, ranks: Sequence[int]) -> int:
    """Bytes of tensors that these ranks hold."""
    return sum(one.nbytes for rank in ranks for one in tensors(model, rank))


def taking_part(model: Model, processes: int) -> list[int]:
    """So many ranks of a model's layout that have something to write, from all over it.

    Raises:
        ValueError: It has fewer.
    """
    writing = writing_ranks(model)
    if processes > len(writing):
        raise ValueError(
            f"{processes} processes, and of the layout tp {model.tp} x pp {model.pp} x dp "
            f"{model.dp} with ZeRO {model.zero} only {len(writing)} ranks write"
        )
    return [writing[index * len(writing) // processes] for index in range(processes)]


def writing_ranks(model: Model) -> range:
    """The ranks that write: without ZeRO only the first replica."""
    return range(model.world_size if model.zero else model.tp * model.pp)


def memory_bytes() -> int:
    """Memory that may be used now: what the kernel calls available, within the control groups."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
    for place in cgroup_directories():
        limit, used = _number(place / "memory.max"), _number(place / "memory.current")
        if limit is not None and used is not None:
            free = min(free, max(limit - used, 0))
    return free


def default_processes(model: Model) -> int:
    """A process for each core, and none that has nothing to write."""
    return min(len(writing_ranks(model)), len(os.sched_getaffinity(0)))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _width(model: Model, heads: int) -> int:
    # Not every model's width is a multiple of its heads.
    return model.hidden if heads == model.heads else model.hidden // model.heads * heads


def _cut(model: Model, heads: int, layers: int) -> Model:
    """A model of so many heads and blocks, its other sizes in proportion."""
    hidden = _width(model, heads)
    part = hidden / model.hidden
    unit = _FFN_MULTIPLE * model.tp
    vocabulary = round(model.vocabulary * part * layers / model.layers)
    return dataclasses.replace(
        model,
        hidden=hidden,
        heads=heads,
        kv_heads=max(1, round(model.kv_heads * part)),
        ffn=model.ffn if part == 1 else max(1, round(model.ffn * part / unit)) * unit,
        layers=layers,
        vocabulary=max(vocabulary, unit),
    )


def _in_words(model: Model, cut: Model) -> str:
    if cut == model:
        return "the whole model"
    words = [
        f"{cut.layers} of {model.layers} blocks",
        f"{cut.vocabulary:,} of {model.vocabulary:,} tokens",
    ]
    if cut.hidden == model.hidden:
        return f"{', '.join(words)}; matrices have their real sizes"
    words.insert(0, f"width {cut.hidden:,} of {model.hidden:,}")
    smaller = model.hidden * model.ffn / (cut.hidden * cut.ffn)
    times = f"{smaller:,.0f}" if smaller >= 10 else f"{smaller:.1f}"
    return f"{', '.join(words)}; matrices are {times} times smaller than real ones"
