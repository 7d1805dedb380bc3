"""Groups on many ranks: one shard per rank with whole tensors, and pieces merged by an export."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import Replicate, Shard

import penstock
from compare import assert_same
from dtensors import LINE, Layout, rank, sharded, values

GROUPS = {"model": ""}
INDEX = "model.safetensors.index.json"

LAYOUTS = {
    "module.rows": Layout(LINE, [Shard(0)], (9, 3)),
    "module.columns": Layout(LINE, [Shard(1)], (3, 10)),
    "module.whole": Layout(LINE, [Replicate()], (4, 4)),
    "module.half": Layout(LINE, [Shard(0)], (6, 3), torch.bfloat16),
}


def weights(files):
    found = {}
    for path in files:
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert name not in found
                found[name] = opened.get_tensor(name)
    return dict(sorted(found.items()))


def whole():
    return {name: values(name, one.shape, one.dtype) for name, one in LAYOUTS.items()}


def save_replicas(path):
    torch.manual_seed(1)
    model = {f"module.w{index}": torch.randn(1500, 1000) for index in range(3)}
    model["module.tied"] = model["module.w1"]
    state = {"model": model, "moments": [torch.randn(1500, 1000)], "own": torch.full((2,), rank())}
    return penstock.save(path, state, groups=GROUPS, files={"config.json": b"{}"}).fallbacks


def test_ranks_that_hold_the_same_write_each_tensor_whole(jobs, tmp_path):
    path = tmp_path / "c"
    jobs.of(4).call(save_replicas, str(path))
    assert (path / "config.json").read_bytes() == b"{}"
    torch.manual_seed(1)
    expected = {f"w{index}": torch.randn(1500, 1000) for index in range(3)}
    files = set(json.loads((path / INDEX).read_text())["weight_map"].values())
    assert len(files) == 3
    assert_same(weights(path / name for name in sorted(files)), expected)
    assert penstock.verify(path).ok
    salvaged = tmp_path / "salvaged"
    assert not penstock.salvage(path, salvaged).is_partial
    files = set(json.loads((salvaged / INDEX).read_text())["weight_map"].values())
    assert_same(weights(salvaged / name for name in sorted(files)), expected)


def save_pieces(path, groups, options):
    state = {"model": {name: sharded(name, layout) for name, layout in LAYOUTS.items()}}
    report = penstock.save(path, state, groups=groups, options=options)
    return [str(one) for one in report.fallbacks if one.kind == "unindexed"]


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_pieces_make_no_index_and_are_put_together(jobs, tmp_path, groups):
    path = tmp_path / "c"
    found = jobs.of(4).call(save_pieces, str(path), groups, penstock.Options())
    assert len(found[0]) == (groups is not None)
    assert all("lies there in pieces" in reason for reason in found[0])
    assert not (path / INDEX).exists()
    assert_same(penstock.load(path)["model"], whole())
    assert penstock.verify(path).ok
    report = penstock.export(path, tmp_path / "out", memory_bytes=400)
    assert report.way == "copy"
    # A salvaged copy is complete: nothing is damaged.
    assert not penstock.salvage(path, tmp_path / "salvaged").is_partial
    penstock.export(tmp_path / "salvaged", tmp_path / "from salvaged")
    expected = {name.removeprefix("module."): one for name, one in whole().items()}
    for name in ("out", "from salvaged"):
        files = sorted((tmp_path / name).glob("*.safetensors"))
        assert_same(weights(files), dict(sorted(expected.items())))
