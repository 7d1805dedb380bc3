"""The remedies of errors work: they name existing files, and the right call for them."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from click.testing import CliRunner

import penstock
from conftest import REPOSITORY
from penstock.checkpoint.loading.dcp_files import MARK
from penstock.cli import cli
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StateMismatchError,
)

# Foreign files.


def torch_file(path):
    torch.save({"w": torch.ones(3)}, path / "model.pt")
    return path / "model.pt"


def legacy_torch_file(path):
    torch.save({"w": torch.ones(3)}, path / "model", _use_new_zipfile_serialization=False)
    return path / "model"


def safetensors_file(path):
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return path / "model.safetensors"


def unnamed_safetensors_file(path):
    return safetensors_file(path).rename(path / "weights")


def cut_torch_file(path):
    (path / "model.pt").touch()
    return path / "model.pt"


def hugging_face_of_old(path):
    torch.save({"w": torch.ones(3)}, path / "pytorch_model.bin")
    (path / "config.json").write_text("{}")
    return path


def mark_alone(path):
    (path / ".metadata").write_bytes(MARK)
    return path


def accelerate(path):
    torch_file(path)
    (path / "random_states_0.pkl").touch()
    return path


def hugging_face(path):
    safetensors_file(path)
    (path / "config.json").write_text("{}")
    return path


def weights_alone(path):
    safetensors_file(path)
    return path


def distributed_checkpoint(path):
    state = {"w": torch.ones(3)}
    torch.distributed.checkpoint.save(state, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def deepspeed(path):
    (path / "global_step10").mkdir()
    (path / "latest").write_text("global_step10")
    return path


def deepspeed_step(path):
    (path / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    return path


def shard(path):
    penstock.save(path / "ckpt", {"w": torch.ones(3)})
    return next((path / "ckpt").glob("shard-*"))


FOREIGN = {
    torch_file: "`penstock convert {path} NEW`",
    legacy_torch_file: "`penstock convert {path} NEW`",
    cut_torch_file: "cut or damaged",
    safetensors_file: "`penstock import {above} NEW`",
    unnamed_safetensors_file: "`penstock import {above} NEW`",
    hugging_face: "`penstock import {path} NEW`",
    hugging_face_of_old: "from_pretrained({path!r})",
    weights_alone: "`penstock import {path} NEW`",
    distributed_checkpoint: "`penstock convert {path} NEW`",
    mark_alone: "only the note for tools of DCP is left",
    accelerate: "`penstock convert {path} NEW`",
    deepspeed: "`penstock convert {path} NEW`",
    deepspeed_step: "`penstock convert {path} NEW`",
    shard: "pass the directory that it is in",
}


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_what_others_wrote_is_named_with_its_call(tmp_path, tmp_path_factory, make):
    out = tmp_path_factory.mktemp("salvaged") / "out"
    path = str(make(tmp_path))
    expected = FOREIGN[make].format(path=path, above=os.path.dirname(path))
    calls = (penstock.load, penstock.inspect, penstock.verify, penstock.explain)
    for call in (*calls, lambda path: penstock.salvage(path, out)):
        with pytest.raises(CheckpointNotFoundError, match=re.escape(expected)) as raised:
            call(path)
        assert raised.value.path == path
    said = CliRunner().invoke(cli, ["inspect", path], standalone_mode=False)
    assert expected in str(said.exception)


def test_a_directory_of_other_things_is_nothing_of_all_that(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        penstock.load(tmp_path)
    with pytest.raises(penstock.PenstockError, match="a checkpoint is a directory"):
        penstock.load(tmp_path / "notes.txt")


def test_a_save_that_did_not_finish_is_that_whatever_lies_beside_it(tmp_path):
    penstock.save(tmp_path / "ckpt", {"w": torch.ones(3)})
    (tmp_path / "ckpt" / "manifest.json").unlink()
    torch_file(tmp_path / "ckpt")
    with pytest.raises(IncompleteCheckpointError):
        penstock.load(tmp_path / "ckpt")


# Stores and checkpoints mistaken for each other.


def test_a_store_is_no_checkpoint(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    store.save(7, {"w": np.ones(3)})
    torch_file(tmp_path)
    for call in (penstock.load, penstock.inspect, penstock.verify):
        with pytest.raises(
            CheckpointNotFoundError, match=r"CheckpointStore\(path\)\.load\(\)"
        ) as raised:
            call(tmp_path)
        assert store.path(7) in str(raised.value)


def test_a_checkpoint_is_no_store(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    store.save(7, {"w": np.ones(3)})
    found = r"penstock\.load\(.*step-0000000007'\) loads it, and .*load\(step=7\)"
    with pytest.raises(CheckpointNotFoundError, match=found):
        penstock.CheckpointStore(store.path(7))
    penstock.save(tmp_path / "alone", {"w": np.ones(3)})
    with pytest.raises(CheckpointNotFoundError, match="not a store of them"):
        penstock.CheckpointStore(tmp_path / "alone")
    # A file of that name may belong to another program.
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"short_name":"app"}')
    assert penstock.CheckpointStore(tmp_path / "web").steps() == []


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_checkpoint_is_not_saved_onto_a_store(tmp_path, overwrite):
    store = penstock.CheckpointStore(tmp_path / "store")
    store.save(7, {"w": np.ones(3)})
    before = sorted(os.listdir(store.root))
    with pytest.raises(CheckpointExistsError, match=r"is a store .*\.save\(step, state\)"):
        penstock.save(store.root, {"w": np.zeros(3)}, overwrite=overwrite)
    assert sorted(os.listdir(store.root)) == before
    assert penstock.CheckpointStore(store.root).steps() == [7]


def test_a_store_that_a_checkpoint_was_saved_onto_can_be_had_back(tmp_path):
    # As earlier versions saved it: both in one directory.
    penstock.save(tmp_path / "both", {"w": np.zeros(3)})
    store = penstock.CheckpointStore(tmp_path / "store")
    store.save(7, {"w": np.ones(3)})
    os.rename(store.path(7), tmp_path / "both" / os.path.basename(store.path(7)))
    with pytest.raises(CheckpointNotFoundError, match=r"store of 1 steps.*move") as raised:
        penstock.CheckpointStore(tmp_path / "both")
    assert "step-0000000007" in str(raised.value)
    (tmp_path / "alone").mkdir()
    for name in os.listdir(tmp_path / "both"):
        if name.startswith(("manifest.json", "part-", "shard-")):
            os.rename(tmp_path / "both" / name, tmp_path / "alone" / name)
    assert penstock.load(tmp_path / "alone")["w"].tolist() == [0, 0, 0]
    assert penstock.CheckpointStore(tmp_path / "both").load()["w"].tolist() == [1, 1, 1]


# Mismatched targets.


def trained(steps):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def mismatch(path, target):
    with pytest.raises(StateMismatchError) as raised:
        penstock.load(path, into=target)
    assert str(path) in str(raised.value)
    assert "nothing was changed" in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_fresh_optimizer_is_told_how_to_resume(tmp_path, is_alone):
    state, fresh = trained(2), trained(0)
    if is_alone:
        state, fresh = state["optimizer"], fresh["optimizer"]
    penstock.save(tmp_path / "ckpt", state)
    said = mismatch(tmp_path / "ckpt", fresh)
    assert "state: 2 entries in the checkpoint, none in the target" in said
    for way in ("penstock.Training(", "store.resume(training)", "optimizer.load_state_dict"):
        assert way in said
    assert "keys=" not in said
    assert said.count("load without into=") == 1


@pytest.mark.parametrize(
    ("target", "what", "remedy"),
    [
        ({"w": torch.ones(2, 3), "n": 1}, "w: shape [3] in the checkpoint, [2, 3]", "same model"),
        ({"w": torch.ones(3).half(), "n": 1}, "w: dtype float32", ".to("),
        ({"w": 5, "n": 1}, "w: tensor in the checkpoint", "same model"),
        ({"w": torch.ones(3)}, "n: is in the checkpoint, not in the target", "keys="),
        ({"w": torch.ones(3), "n": 1, "m": 2}, "m: is in the target, not in", "keys="),
        ({"w": torch.ones(3), "n": [1]}, "n: a plain value in the checkpoint", "same model"),
        ({"w": torch.ones(1).expand(3), "n": 1}, "w: the target is expanded", ".clone()"),
        ([1], "dict in the checkpoint, list in the target", "same model"),
    ],
)
def test_each_misfit_is_told_with_a_way_out(tmp_path, target, what, remedy):
    penstock.save(tmp_path / "ckpt", {"w": torch.ones(3), "n": 1})
    said = mismatch(tmp_path / "ckpt", target)
    assert what in said
    assert remedy in said
    assert "load without into=" in said


# Remedies.


def test_no_remedy_names_a_package_that_is_not_published():
    """Penstock is on no index: `pip install penstock` would fetch another project's package.

    With an extra, pip adds to the installed package, which satisfies the requirement.
    """
    told = re.compile(r"pip install --upgrade ['\"]?penstock|pip install ['\"]?penstock(?!\[)")
    for place in ("python", "crates", "docs", "examples"):
        for file in (REPOSITORY / place).rglob("*"):
            if file.suffix in (".py", ".rs", ".md", ".yml", ".pyi", ".sh"):
                found = told.search(Path(file).read_text())
                assert found is None, f"{file}: {found}"
