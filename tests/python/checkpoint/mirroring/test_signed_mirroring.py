"""Mirrors of signed steps, and signatures in buckets."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

import penstock
from penstock import Mirror
from penstock.cli import cli
from penstock.errors import NotSignedError, SignatureError

URL = "s3://bucket/run"
FOR_EVER_SECONDS = 120


def state(step):
    return {"w": np.random.default_rng(step).standard_normal(400_000), "step": step}


@pytest.fixture
def keys(tmp_path):
    return make_key(tmp_path)


def make_key(directory):
    key = ed25519.Ed25519PrivateKey.generate()
    form = (Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    private, public = directory / "key", directory / "key.pub"
    private.write_bytes(key.private_bytes(*form))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private, public


def test_a_signature_goes_to_the_mirror_with_its_step(bucket, tmp_path, keys):
    key, public = keys
    with penstock.CheckpointStore(
        tmp_path / "store", mirror=Mirror(URL), sign=key, signed_by=public
    ) as store:
        store.save(1, state(1))
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
        there = bucket.files / "run" / "step-0000000001"
        for file in Path(store.path(1)).iterdir():
            assert (there / file.name).read_bytes() == file.read_bytes()
        shutil.rmtree(store.path(1))
        assert store.load()["step"] == 1
        for file in there.glob("signed.*"):
            file.unlink()
        with pytest.raises(NotSignedError):
            store.load()


def test_a_checkpoint_in_a_bucket_is_signed(bucket, keys):
    key, public = keys
    penstock.save(f"{URL}/saved", state(1), sign=key)
    assert penstock.load(f"{URL}/saved", signed_by=public)["step"] == 1
    assert penstock.verify(f"{URL}/saved", signed_by=public).ok
    penstock.save(f"{URL}/later", state(2))
    penstock.sign(f"{URL}/later", key)
    assert penstock.load(f"{URL}/later", signed_by=public)["step"] == 2


def test_a_signature_that_is_made_after_the_copy_follows_in_the_next_pass(bucket, tmp_path, keys):
    key, public = keys
    with penstock.CheckpointStore(tmp_path / "store", mirror=Mirror(URL)) as store:
        store.save(1, state(1))
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
        copy = f"{URL}/step-0000000001"
        with pytest.raises(NotSignedError):
            penstock.load(copy, signed_by=public)
        penstock.sign(store.path(1), key)
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
        assert penstock.load(copy, signed_by=public)["step"] == 1
        # A signature by another key takes the place of the first one, there as here.
        other = tmp_path / "other"
        other.mkdir()
        renewed = make_key(other)
        penstock.sign(store.path(1), renewed[0])
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
        assert penstock.load(copy, signed_by=renewed[1])["step"] == 1
        with pytest.raises(SignatureError):
            penstock.load(copy, signed_by=public)


def test_a_new_process_and_the_command_send_signatures_that_the_copy_lacks(bucket, tmp_path, keys):
    key, public = keys
    root = tmp_path / "store"
    with penstock.CheckpointStore(root, mirror=Mirror(URL)) as store:
        for step in (1, 2):
            store.save(step, state(step))
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
        path = store.path(1)
    penstock.sign(path, key)
    with penstock.CheckpointStore(root, mirror=Mirror(URL)) as store:
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert penstock.load(f"{URL}/step-0000000001", signed_by=public)["step"] == 1
    penstock.sign(f"{root}/step-0000000002", key)
    assert CliRunner().invoke(cli, ["mirror", str(root), URL]).exit_code == 0
    assert penstock.load(f"{URL}/step-0000000002", signed_by=public)["step"] == 2
    assert CliRunner().invoke(cli, ["mirror", str(root), URL]).exit_code == 0


def test_a_step_is_deleted_here_only_after_its_signature_is_there(bucket, tmp_path, keys):
    key, public = keys
    root = tmp_path / "store"
    with penstock.CheckpointStore(root, mirror=Mirror(URL)) as store:
        for step in (1, 2):
            store.save(step, state(step))
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
    penstock.sign(f"{root}/step-0000000001", key)
    with penstock.CheckpointStore(root, mirror=Mirror(URL, keep_local=1)) as store:
        store.save(3, state(3))
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
        store.save(4, state(4))
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert not (root / "step-0000000001").exists()
    assert penstock.load(f"{URL}/step-0000000001", signed_by=public)["step"] == 1
