"""Mirrors of signed steps, and signatures in buckets."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

import penstock
from penstock import Mirror
from penstock.errors import NotSignedError

URL = "s3://bucket/run"
FOR_EVER_SECONDS = 120


def state(step):
    return {"w": np.random.default_rng(step).standard_normal(400_000), "step": step}


@pytest.fixture
def keys(tmp_path):
    key = ed25519.Ed25519PrivateKey.generate()
    form = (Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    private, public = tmp_path / "key", tmp_path / "key.pub"
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
