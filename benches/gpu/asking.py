"""Rows by id: asked for by the host, packed and copied; and asked for by kernels of the GPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benches.gpu.run import remove, seconds_of
from penstock import features
from penstock.machine import gpus

if TYPE_CHECKING:
    from benches.gpu.run import Run

_ROW_ITEMS = 1024
"""Rows of a page, which direct reads reach without a copy."""
_SMALL_ROWS, _ROWS = 1 << 10, 1 << 20
_SMALL_BATCH, _BATCH = 256, 16 << 10
_SMALL_POSTS, _POSTS = 200, 20_000


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
    path = run.disk / "table"
    table = np.arange(rows, dtype=np.float32)[:, None].repeat(_ROW_ITEMS, axis=1)
    features.write(path, table)
    del table
    generator = np.random.default_rng(1)
    out = run.device.put(torch.empty(batch, _ROW_ITEMS))
    try:
        with features.open(path) as opened, opened.on_device("cuda:0") as served:
            memory = np.empty((batch, _ROW_ITEMS), np.float32)
            for _ in run.each_round("rows from the disk"):
                ids = generator.integers(0, rows, batch)
                asked = run.device.put(torch.from_numpy(ids))
                run.device.synchronize()
                by_processor = seconds_of(partial(opened.gather, ids, out=memory))
                by_gpu = seconds_of(partial(_asked, run, served, asked, out))
                served.check()
                _check(memory, ids)
                _check(run.device.read(out).numpy(), ids)
                run.results.add("ring_reads", by_processor / by_gpu)
                run.results.figure("reads of 4 KiB by the processor, 1/s", batch / by_processor)
                run.results.figure("reads of 4 KiB that the GPU asks for, 1/s", batch / by_gpu)
    finally:
        remove(path)


def _asked(run: Run, served: features.DeviceFeatures, ids: Any, out: Any) -> None:
    served.gather(ids, out=out)
    run.device.synchronize()


def _check(found: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> None:
    if not bool((found == ids.astype(np.float32)[:, None]).all()):
        raise RuntimeError("rows are not those that were asked for")
