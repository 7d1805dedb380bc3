"""Ranks save one checkpoint together, the first one signs it, and ranks of any number load it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from torch.distributed.tensor import Shard

import penstock
from dtensors import Layout, cleared, local_bytes, plain, rank, sharded
from penstock.errors import RankError, SignatureError

pytestmark = pytest.mark.quick

# Functions that run on every rank.


def layouts(dim):
    line = list(range(dist.get_world_size()))
    return {
        "rows": Layout(line, [Shard(dim)], (13, 5), torch.float32),
        "large": Layout(line, [Shard(dim)], (1500, 700), torch.float32),
    }


def save(path, key, background, signing_ranks):
    state = {name: sharded(name, layout) for name, layout in layouts(0).items()}
    state["p"] = plain(rank())
    sign = key if rank() in signing_ranks else None
    if background is None:
        penstock.save(path, state, sign=sign)
        return
    with penstock.CheckpointStore(path.parent, sign=sign) as store:
        pending = store.save_async(1, state, lazy=background == "lazy")
        pending.stage()
        pending.result()


def save_refused(path, key, signing_ranks):
    with pytest.raises(RankError, match="sign="):
        save(path, key, None, signing_ranks)


def load(path, public):
    expected = {name: sharded(name, layout) for name, layout in layouts(1).items()}
    state = cleared(expected)
    names = ["rows", "large"]
    penstock.load(path, into=state, keys=names, signed_by=public)
    assert local_bytes(state) == local_bytes(expected)


def load_refused(path, public):
    with pytest.raises(SignatureError):
        penstock.load(path, signed_by=public)


# The tests.


def make_key(directory, name):
    key = ed25519.Ed25519PrivateKey.generate()
    form = (Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (directory / name).write_bytes(key.private_bytes(*form))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (directory / f"{name}.pub").write_bytes(public)
    return directory / name, directory / f"{name}.pub"


@pytest.mark.parametrize("background", [None, "eager", "lazy"])
def test_ranks_sign_and_load(jobs, disk_path, background):
    path = disk_path / "store" / "step-0000000001"
    key, public = make_key(disk_path, "key")
    jobs.of(4).call(save, path, key, background, range(4))
    jobs.of(4).call(load, path, public)
    jobs.of(2).call(load, path, public)
    jobs.of(2).call(load_refused, path, make_key(disk_path, "other")[1])
    assert penstock.verify(path, signed_by=public).ok
    for part in path.glob("part-*"):
        assert all("blake3" in file for file in json.loads(part.read_bytes())["files"])


@pytest.mark.parametrize("signing_ranks", [[0], [1]])
def test_ranks_that_differ_in_signing_save_nothing(jobs, disk_path, signing_ranks):
    path = disk_path / "store" / "step-0000000001"
    key, _ = make_key(disk_path, "key")
    jobs.of(2).call(save_refused, path, key, signing_ranks)
    assert not (path / "manifest.json").exists()
