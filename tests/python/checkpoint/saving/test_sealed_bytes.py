"""The bytes that sealed checkpoints move: which are read, and what a trace shows of sealing."""

from __future__ import annotations

import json

import numpy as np
import pytest

import penstock

pytestmark = pytest.mark.quick

MIB = 1 << 20
KEY = "5e" * 32


def state():
    draw = np.random.default_rng(3)
    sizes = {"a": 5 * MIB, "b": 100, "c": 3 * MIB + 777, "d": 2 * MIB, "e": 10}
    return {name: draw.integers(0, 255, size, np.uint8) for name, size in sizes.items()}


@pytest.fixture
def saved(disk_path):
    path = disk_path / "ckpt"
    penstock.save(path, state(), sealing=penstock.Sealing([KEY]))
    return path


def events_of(path, function):
    with penstock.trace(path):
        function()
    return json.loads(path.read_text())


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("keys", [["a"], ["b"], ["c"], ["a", "e"], ["d", "b"], ["e"]])
def test_a_part_of_a_sealed_checkpoint_reads_its_chunks_and_nothing_else(saved, keys, direct):
    tensors = {one.name: one for one in penstock.inspect(saved, identities=[KEY]).tensors}
    (file,) = {tensors[name].file for name in keys}
    file_bytes = (saved / file).stat().st_size
    chunks = {
        chunk
        for name in keys
        for chunk in range(tensors[name].begin // MIB, -(-tensors[name].end // MIB))
    }
    chunk_bytes = sum(min(MIB, file_bytes - chunk * MIB) for chunk in chunks)
    assert chunk_bytes < file_bytes
    # In new memory, in that of the caller, and in parts of it that do not lie together.
    strided = {name: np.zeros((len(value), 2), np.uint8)[:, 0] for name, value in state().items()}
    for into in (None, {name: np.zeros_like(value) for name, value in state().items()}, strided):
        reports = []
        given = None if into is None else {name: into[name] for name in keys}
        options = penstock.Options(direct=direct)
        loaded = penstock.load(
            saved, identities=[KEY], keys=keys, into=given, options=options, report=reports.append
        )
        assert reports[0].bytes_read == chunk_bytes
        # The header is clear.
        assert chunk_bytes - 2 * MIB < reports[0].opened_bytes <= chunk_bytes
        for name in keys:
            np.testing.assert_array_equal(loaded[name], state()[name])


def test_a_trace_shows_when_chunks_are_sealed_and_opened(disk_path):
    path, sealing = disk_path / "ckpt", penstock.Sealing([KEY])
    found = {
        "seal": lambda: penstock.save(path, state(), sealing=sealing),
        "open sealed": lambda: penstock.load(path, identities=[KEY]),
    }
    for name, function in found.items():
        spans = [one for one in events_of(disk_path / "trace.json", function) if one["ph"] == "X"]
        assert sum(one["dur"] for one in spans if one["name"] == name) > 0
    clear = events_of(disk_path / "trace.json", lambda: penstock.save(disk_path / "clear", state()))
    assert not {"seal", "open sealed"} & {one["name"] for one in clear}
