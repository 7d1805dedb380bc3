"""Checkpoints of three ranks, made by one process, and ways to damage them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import penstock
from penstock import _native

OPTIONS = penstock.Options().to_native()

WHOLES = {
    name: np.arange(24, dtype=np.float32).reshape(6, 4) + 100 * index
    for index, name in enumerate(("model.rows", "model.one", "model.late", "tail"))
}

HELD = {
    "model.rows": [(0, 2), (2, 4), (4, 6)],
    "model.one": [(0, 6), None, None],
    "model.late": [None, None, (0, 6)],
    "tail": [None, (0, 3), (3, 6)],
}
"""The rows of each shared tensor, by rank."""


def leaf(name):
    return {"$": "tensor", "g": name, "dtype": "float32", "shape": [6, 4]}


def tree_of(rank):
    return {
        "model": {"rows": leaf("model.rows"), "one": leaf("model.one"), "late": leaf("model.late")},
        "window": {**leaf("model.rows"), "view": [[2], [5], 1]},
        "tail": [leaf("tail"), {"deep": leaf("tail")}],
        "own": {"$": "tensor", "i": 0},
        "tied": {"$": "tensor", "a": 0},
        "rank": rank,
        "lr": 0.5,
    }


def commit(path, trees, *, boxes=True):
    """Commits a checkpoint of three ranks with these trees; each has its own tensor, and a tie."""
    attempt = _native.Attempt.begin(str(path), overwrite=False)
    votes = []
    for rank, node in enumerate(trees):
        joined = attempt if rank == 0 else _native.Attempt.join(str(path), attempt.id)
        own = np.full(2 + rank, rank, np.float32)
        place = (own.ctypes.data, None, 4, own)
        tensors = [("own", "float32", own.shape, *place, None, None)]
        for name, held in HELD.items():
            if held[rank] is not None and boxes:
                first, end = held[rank]
                data = np.ascontiguousarray(WHOLES[name][first:end])
                place = (data.ctypes.data, None, 4, data)
                box = (name, (6, 4), (first, 0))
                tensors.append((name, "float32", data.shape, *place, box, None))
        text = node if isinstance(node, str) else json.dumps(node, separators=(",", ":"))
        aliases = [("tied", 0, None)]
        job = _native.Job(
            str(path), tensors, aliases, text, options=OPTIONS, arena=None, lazy=True, nice=None
        )
        votes.append((rank, *job.write(joined, rank)["vote"]))
        if rank:
            joined.abandon()
    attempt.commit(votes, step=7, metadata='{"run":"a"}', overwrite=False)
    attempt.abandon()
    return path


def file_of(path, kind, rank):
    return next(Path(path).glob(f"{kind}-{rank:05}*"))


def flip(path, name, rank):
    """Changes a byte of a rank's part of a tensor, or of the rank's own tensor with that name."""
    checkpoint = _native.open(str(path))
    rows, boxes = checkpoint.tensors(), {box.index: box.tensor for box in checkpoint.boxes()}
    entry = next(
        row
        for index, row in enumerate(rows)
        if boxes.get(index, row.name) == name and row.file.startswith(f"shard-{rank:05}-")
    )
    with open(path / entry.file, "r+b") as stream:
        stream.seek(entry.begin)
        byte = stream.read(1)[0]
        stream.seek(entry.begin)
        stream.write(bytes([byte ^ 8]))
