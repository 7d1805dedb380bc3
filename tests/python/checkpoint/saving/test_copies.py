"""Copies of a state: their places beside those of its tensors in a shard."""

from __future__ import annotations

import random

import torch

import penstock
from format_reader import Checkpoint
from penstock.plugin import CopyMemory, Piece

LINE_BYTES = 64
PAGE_BYTES = 4096


def test_copies_lie_as_their_tensors_do_in_a_shard(tmp_path):
    """A save can write from the copies only where they are at the same places in a page."""
    draw = random.Random(7)
    sizes = [1, 7, 64, 100, 128, 4032, 4096, 4097, 8192, 8256, 12288]
    tensors = [torch.ones(draw.choice(sizes), dtype=torch.uint8) for _ in range(300)]
    penstock.save(tmp_path / "saved", {f"{index:03}": one for index, one in enumerate(tensors)})
    rows = {row["name"]: row for row in Checkpoint(tmp_path / "saved").part["tensors"]}
    assert {row["file"] for row in rows.values()} == {0}

    pieces = [Piece(one.data_ptr(), one.nbytes, one) for one in tensors]
    places = CopyMemory().copy(pieces, threads=1)
    # Smaller ones are in the file at multiples of their element's size, and copied there.
    shifts = {
        rows[f"{index:03}"]["range"][0] - places[index]
        for index, one in enumerate(tensors)
        if one.nbytes % LINE_BYTES == 0
    }
    assert len(shifts) == 1
    assert shifts.pop() % PAGE_BYTES == 0
