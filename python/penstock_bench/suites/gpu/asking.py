"""Rows by id: asked for by the host, packed and copied; and asked for by kernels of the GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock import features
from penstock.common.machine import gpus
from penstock_bench.harness.fio import FioError
from penstock_bench.suites.gather import random_reads
from penstock_bench.suites.gather.random_reads import Region
from penstock_bench.suites.gpu.run import remove, seconds_of

if TYPE_CHECKING:
    from penstock_bench.suites.gpu.run import Run

_ROW_ITEMS = 1024
"""Rows of a page, which direct reads reach without a copy."""
_SMALL_ROWS, _ROWS = 1 << 10, 256 << 10
_SMALL_BATCH, _BATCH, _MANY = 256, 16 << 10, 128 << 10
_SMALL_POSTS, _POSTS = 200, 20_000


def gather(run: Run) -> None:
    """Ids of the host, rows into memory of the GPU: of a cache that has all, and of the disk."""
    for row_items, row in ((_ROW_ITEMS // 4, "gather_1k"), (_ROW_ITEMS, "gather_4k")):
        _from_memory(run, row_items, row)
    _from_disk(run)


def _from_memory(run: Run, row_items: int, row: str) -> None:
    rows, batch = (_SMALL_ROWS, _SMALL_BATCH) if run.is_small else (_ROWS, _MANY)
    row_bytes = 4 * row_items
    path = run.memory / "table"
    features.write(path, _table(rows, row_items))
    generator = np.random.default_rng(2)
    out = run.device.put(torch.empty(batch, row_items))
    nbytes = batch * row_bytes
    try:
        with features.open(path, cache=features.Cache(2 * rows * row_bytes)) as opened:
            opened.pin(np.arange(rows))
            # All of them are cached, and the cache is pinned, before anything counts.
            for first in range(0, rows, batch):
                _gathered(run, opened, np.arange(first, first + batch), out)
            for _ in run.each_round(f"cached rows of {row_bytes} bytes"):
                ids = generator.integers(0, rows, batch)
                ours = seconds_of(partial(_gathered, run, opened, ids, out))
                _check(run.device.read(out).numpy(), ids)
                by_kernel = gpus.packing(0, rows=rows, row_bytes=row_bytes, count=batch)
                by_copy = nbytes / run.link("to_device") / 1e9
                run.results.add(row, min(by_kernel, by_copy) / ours)
                name = f"cached rows of {row_bytes} bytes"
                run.results.figure(f"{name}, by kernels, GB/s", nbytes / by_kernel / 1e9)
                run.results.figure(f"{name}, ours, GB/s", nbytes / ours / 1e9)
    finally:
        remove(path)


def _from_disk(run: Run) -> None:
    rows, batch = (_SMALL_ROWS, _SMALL_BATCH) if run.is_small else (_ROWS, _BATCH)
    path = _on_disk(run, rows)
    generator = np.random.default_rng(3)
    out = run.device.put(torch.empty(batch, _ROW_ITEMS))
    try:
        with features.open(path) as opened:
            (segment,) = opened.source.segments
            region = Region(Path(segment.path), segment.offset, 4 * rows * _ROW_ITEMS, 4096)
            load = random_reads.best(region)
            for _ in run.each_round("rows from the disk"):
                ids = generator.integers(0, rows, batch)
                by_fio = random_reads.measured(region, load, batch)
                ours = seconds_of(partial(_gathered, run, opened, ids, out))
                _check(run.device.read(out).numpy(), ids)
                run.results.add("gather_disk", batch / ours / by_fio.requests_per_second)
                run.results.figure("rows of 4 KiB from the disk into the GPU, 1/s", batch / ours)
    except FioError as error:
        run.results.skip("gather_disk", str(error))


def _on_disk(run: Run, rows: int) -> Path:
    """A table that is written once a run."""
    path = run.disk / "table"
    if not path.exists():
        features.write(path, _table(rows, _ROW_ITEMS))
    return path


def _gathered(run: Run, opened: Any, ids: Any, out: Any) -> None:
    opened.gather(ids, out=out)
    run.device.synchronize()


def _table(rows: int, row_items: int) -> np.ndarray[Any, Any]:
    """Each row of its own number."""
    return np.arange(rows, dtype=np.float32)[:, None].repeat(row_items, axis=1)


def ring(run: Run) -> None:
    """Requests that the GPU makes: answered at once, and read from the disk."""
    posts = _SMALL_POSTS if run.is_small else _POSTS
    for _ in run.each_round("requests of the GPU"):
        run.results.add("ring_latency", gpus.posts(0, warps=1, posts=posts) / posts * 1e6)
        many = 20 * posts
        run.results.add("ring_rate", many / gpus.posts(0, warps=4096, posts=many))
    _reads(run)


def _reads(run: Run) -> None:
    """The same rows of a table on the disk, gathered by the processor and by kernels."""
    rows, batch = (_SMALL_ROWS, _SMALL_BATCH) if run.is_small else (_ROWS, _BATCH)
    path = _on_disk(run, rows)
    generator = np.random.default_rng(1)
    out = run.device.put(torch.empty(batch, _ROW_ITEMS))
    with features.open(path) as opened, opened.on_device("cuda:0") as served:
        memory = np.empty((batch, _ROW_ITEMS), np.float32)
        for _ in run.each_round("rows from the disk"):
            ids = generator.integers(0, rows, batch)
            asked = run.device.put(torch.from_numpy(ids))
            run.device.synchronize()
            by_processor = seconds_of(partial(opened.gather, ids, out=memory))
            by_gpu = seconds_of(partial(_gathered, run, served, asked, out))
            served.check()
            _check(memory, ids)
            _check(run.device.read(out).numpy(), ids)
            run.results.add("ring_reads", by_processor / by_gpu)
            run.results.figure("reads of 4 KiB by the processor, 1/s", batch / by_processor)
            run.results.figure("reads of 4 KiB that the GPU asks for, 1/s", batch / by_gpu)


def _check(found: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> None:
    if not bool((found == ids.astype(np.float32)[:, None]).all()):
        raise RuntimeError("rows are not those that were asked for")
