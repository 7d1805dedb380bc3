"""File names that are not UTF-8, which Linux allows, in checkpoints and beside them."""

from __future__ import annotations

import os

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import penstock
from penstock import features, offload
from penstock.cli import cli
from penstock.errors import CheckpointNotFoundError

STRAY = b"\xff"


@pytest.fixture
def root(tmp_path):
    return os.fsencode(tmp_path)


def test_a_checkpoint_that_is_opened_as_a_store_is_named(root):
    path = root + b"/" + STRAY
    penstock.save(path, {"x": torch.ones(3)})
    with pytest.raises(CheckpointNotFoundError, match="is a checkpoint, not a store"):
        penstock.CheckpointStore(path)
    assert penstock.load(path)["x"].sum() == 3


def test_a_stray_in_a_store_is_passed_over(root):
    path = root + b"/store"
    store = penstock.CheckpointStore(path)
    store.save(1, {"x": torch.ones(3, 2)})
    os.mkdir(path + b"/" + STRAY)
    assert store.steps() == [1]
    with pytest.raises(CheckpointNotFoundError, match="its newest step"):
        penstock.load(path)
    assert store.load()["x"].sum() == 6
    with features.open(path) as table:
        assert table.gather([0]).sum() == 2
    for command in ("ls", "inspect", "verify", "scrub"):
        assert CliRunner().invoke(cli, [command, os.fsdecode(path)]).exit_code == 0


def test_files_of_others_are_read_or_named(root):
    os.mkdir(root + b"/others")
    file = root + b"/others/" + STRAY + b".safetensors"
    save_file({"weight": torch.ones(4, 3)}, os.fsdecode(root + b"/plain.safetensors"))
    os.rename(root + b"/plain.safetensors", file)
    for path in (file, root + b"/others"):
        with features.open(path) as table:
            assert table.gather([3]).sum() == 3
    model = offload.stream(
        torch.nn.Linear(3, 4, bias=False),
        weights=os.fsdecode(root + b"/others"),
        memory_bytes=1 << 20,
    )
    with torch.inference_mode():
        assert model(torch.ones(1, 3)).sum() == 12
    penstock.import_model(root + b"/others", root + b"/imported")
    assert penstock.load(root + b"/imported")["model"]["weight"].sum() == 12
    for call in (penstock.load, penstock.verify):
        with pytest.raises(CheckpointNotFoundError, match="a file of safetensors"):
            call(file)
    penstock.save(root + b"/others", {"x": 1})
    assert penstock.load(root + b"/others") == {"x": 1}
