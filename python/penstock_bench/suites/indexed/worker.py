"""Rows and samples of an indexed dataset, in a process of its own."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

SEQUENCE_TOKENS = 2048
MICRO_BATCH, ROW_BATCH = 4, 64
MODULES = ("megatron.core.datasets.gpt_dataset", "megatron.core.datasets.indexed_dataset")
"""Imported before a process is forked, so that a control group counts what is read."""

_MEAN_TOKENS = 800
_CHUNK_ROWS = 20_000


@dataclass(frozen=True)
class Task:
    """One process.

    Attributes:
        kind: Which of `penstock_bench.suites.indexed.__main__.READERS`.
        way: ``"rows"`` by id, or ``"gpt"``: samples of a GPT dataset, batch after batch.
        directory: Of the dataset.
        group: The file by which the process joins the group that limits its memory; None for none.
        data_bytes: Approximate size of the dataset.
        batches: That are timed.
        seconds_max: After which no further batch is read.
        seed: Of what is read.
    """

    kind: str
    way: str
    directory: str
    group: str | None
    data_bytes: int
    batches: int
    seconds_max: float
    seed: int

    @property
    def prefix(self) -> str:
        """Path of the dataset, without suffix."""
        return f"{self.directory}/texts"


def prepare(task: Task) -> dict[str, Any]:
    """Makes the dataset, and the indices of the GPT dataset: each document is one row."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{task.prefix}.bin", dtype=np.int32)
    left = task.data_bytes // 4
    while left > 0:
        lengths = random.lognormal(np.log(_MEAN_TOKENS) - 0.5, 1, _CHUNK_ROWS).astype(int) + 1
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), left)) + 1]
        tokens = random.integers(1, 50_000, lengths.sum(), np.int32)
        builder.data_file.write(tokens.tobytes())
        first = len(builder.sequence_lengths)
        builder.sequence_lengths.extend(lengths.tolist())
        builder.document_indices.extend(range(first + 1, first + len(lengths) + 1))
        left -= int(lengths.sum())
    builder.finalize(f"{task.prefix}.idx")
    return {"samples": len(_gpt(task))}


def run(task: Task) -> dict[str, Any]:
    """Reads batches, and counts what is in them; ``heads`` are their first tokens."""
    if task.group is not None:
        Path(task.group).write_text("0")
    batches = _gpt_batches if task.way == "gpt" else _row_batches
    with contextlib.ExitStack() as stack:
        if task.kind == "penstock" and task.way == "gpt":
            from penstock.integrations.megatron import enable

            stack.enter_context(enable(datasets=True))
        found = iter(batches(task, stack))
        # The dataset is open, and so are its indices.
        next(found)
        samples = nbytes = 0
        heads: list[int] = []
        spent, begun = time.process_time(), time.perf_counter()
        for count, tokens in found:
            samples += count
            heads.append(int(tokens[0]))
            nbytes += tokens.nbytes
            if time.perf_counter() - begun > task.seconds_max:
                break
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - spent
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "nbytes": nbytes,
        "samples": samples,
        "heads": heads,
    }


def _row_batches(task: Task, stack: contextlib.ExitStack) -> Iterator[tuple[int, Any]]:
    """Rows drawn at random, as one array for each batch."""
    if task.kind == "penstock":
        from penstock.features import open_indexed

        texts = stack.enter_context(open_indexed(task.prefix))
        for ids, found in texts.stream(_ids(len(texts), task)):
            yield len(ids), found.values
        return
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    own = IndexedDataset(task.prefix, mmap=task.kind == "mmap")
    for ids in _ids(len(own), task):
        yield len(ids), np.concatenate([own[index] for index in ids])


def _ids(rows: int, task: Task) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(task.seed)
    return [random.integers(0, rows, ROW_BATCH) for _ in range(task.batches + 1)]


def _gpt_batches(task: Task, stack: contextlib.ExitStack) -> Iterator[tuple[int, Any]]:
    """Samples in the order of Megatron-LM's sampler, fetched as a worker of a loader does it."""
    dataset = _gpt(task)
    fetch = getattr(dataset, "__getitems__", None) or (lambda ids: [dataset[one] for one in ids])
    first = int(np.random.default_rng(task.seed).integers(len(dataset) // 2))
    for batch in range(task.batches + 1):
        start = (first + batch * MICRO_BATCH) % (len(dataset) - MICRO_BATCH)
        samples = fetch(list(range(start, start + MICRO_BATCH)))
        yield len(samples), np.concatenate([one["tokens"].numpy() for one in samples])


def _gpt(task: Task) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE_TOKENS,
        tokenizer=SimpleNamespace(vocab_size=100_000, eod=0, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=f"{task.directory}/cache",
        mmap_bin_files=task.kind != "file",
        split="1,0,0",
        blend=([task.prefix], None),
    )
    low = GPTDataset.build_low_level_dataset(task.prefix, config)
    documents = np.arange(len(low), dtype=np.int32)
    return GPTDataset(low, task.prefix, documents, None, Split.train, config)
