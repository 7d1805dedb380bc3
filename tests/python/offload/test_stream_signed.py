"""Models streamed from signed checkpoints: no byte is computed with that nobody has signed."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest
import torch
from safetensors.torch import save_file
from test_stream_sealed import GENERATOR, KEY, Stack, shard_of, stack, xored

import penstock
from penstock.errors import (
    NotSignedError,
    SignatureError,
)
from penstock.sealing import Sealing

pytestmark = pytest.mark.quick

MIB = 1 << 20


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


def streamed(path, key, memory_bytes=5 * MIB, **further):
    model = stack(1)
    return penstock.offload.stream(
        model, weights=path, memory_bytes=memory_bytes, signed_by=f"{key}.pub", **further
    )


@pytest.mark.parametrize("seals", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_signed_weights_compute_the_same(tmp_path, key, seals, later):
    path, given = tmp_path / "ckpt", {"sealing": Sealing([KEY])} if seals else {}
    signed = {} if later else {"sign": key}
    penstock.save(path, {"model": stack().state_dict()}, **given, **signed)
    if later:
        penstock.sign(path, key)
    x = torch.randn(3, 700)
    opened = {"identities": [KEY]} if seals else {}
    model = streamed(path, key, **opened)
    for _ in range(3):
        assert torch.equal(model(x), stack()(x))


@pytest.mark.parametrize("seals", [False, True])
def test_an_exchange_between_two_passes_is_noticed(tmp_path, key, seals):
    path, given = tmp_path / "ckpt", {"sealing": Sealing([KEY])} if seals else {}
    penstock.save(path, {"model": stack().state_dict()}, **given, sign=key)
    x = torch.randn(3, 700)
    opened = {"identities": [KEY]} if seals else {}
    # Two of the six blocks fit, so that each pass reads again.
    model = streamed(path, key, **opened)
    assert torch.equal(model(x), stack()(x))
    file = shard_of(path)
    status = file.stat()
    # The digest stays, and so do size and time of the file.
    xored(file, 6 * MIB + 4096, GENERATOR)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    # A block that was in memory is read again in the pass after the next.
    with contextlib.suppress(SignatureError):
        model(x)
    with pytest.raises(SignatureError):
        model(x)


def test_weights_that_nobody_has_signed_are_refused(tmp_path, key):
    path, files = tmp_path / "ckpt", tmp_path / "files"
    penstock.save(path, {"model": stack().state_dict()})
    with pytest.raises(NotSignedError):
        streamed(path, key)
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    penstock.sign(path, other)
    with pytest.raises(SignatureError):
        streamed(path, key)
    files.mkdir()
    save_file(Stack().state_dict(), files / "model.safetensors")
    with pytest.raises(NotSignedError, match="signed_by="):
        streamed(files, key)
