"""Models streamed from sealed and signed checkpoints: the same bits, and no exchanged byte."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from towers import Tower, copy_of

import penstock
from penstock.errors import (
    CorruptCheckpointError,
    NotSealedError,
    NotSignedError,
    SealedError,
    SignatureError,
    TamperedError,
    UnsupportedStateError,
    WrongKeyError,
)
from penstock.sealing import Sealing

pytestmark = pytest.mark.quick

MIB = 1 << 20
KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32
OTHER = "PENSTOCK-SECRET-KEY-1" + "77" * 32

GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a text anywhere, it leaves the CRC-64 as it was."""


class Stack(torch.nn.Module):
    """Blocks of more than a chunk each, which do not begin with one."""

    def __init__(self, blocks=5, width=700):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x):
        x = self.first(x) + self.shift
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def stack(seed=0):
    torch.manual_seed(seed)
    return Stack().requires_grad_(False).eval()


def xored(file, at, by):
    data = bytearray(file.read_bytes())
    for place, byte in enumerate(by, at):
        data[place] ^= byte
    # In place, as an attacker would write it, and not as another file.
    with file.open("r+b") as opened:
        opened.write(data)


def shard_of(path):
    return min(Path(path).glob("shard-*"))


def streamed(model, path, memory_bytes, **settings):
    settings = {"identities": [KEY], **settings}
    return penstock.offload.stream(model, weights=path, memory_bytes=memory_bytes, **settings)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, {"model": stack().state_dict(), "step": 3}, sealing=Sealing([KEY]))
    return path


X = torch.randn(4, 700, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("memory_bytes", [3 * MIB, 5 * MIB, 8 * MIB, 64 * MIB])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_outputs_have_the_same_bits(saved, memory_bytes, direct):
    wanted = stack()(X)
    io = penstock.offload.TensorIO(direct=direct)
    model = streamed(stack(1), saved, memory_bytes, io=io)
    for _ in range(4):
        assert torch.equal(model(X), wanted)
    assert torch.equal(model.shift, stack().shift)


def test_small_blocks_share_chunks(tmp_path):
    torch.manual_seed(5)
    tower = Tower().requires_grad_(False).eval()
    penstock.save(tmp_path / "ckpt", tower.state_dict(), sealing=Sealing([KEY]))
    x = torch.randn(3, 32)
    wanted = tower(x)
    model = streamed(copy_of(tower).requires_grad_(False), tmp_path / "ckpt", 120_000)
    for _ in range(3):
        assert torch.equal(model(x), wanted)


def test_a_store_gives_its_newest_step(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "run", sealing=Sealing([KEY]))
    for step in range(2):
        store.save(step, stack(step).state_dict())
    assert torch.equal(streamed(stack(7), tmp_path / "run", 5 * MIB)(X), stack(1)(X))


def test_files_of_many_shards(tmp_path):
    options = penstock.Options(shard_bytes=MIB, extent_bytes=MIB)
    penstock.save(tmp_path / "c", stack().state_dict(), sealing=Sealing([KEY]), options=options)
    model = streamed(stack(1), tmp_path / "c", 5 * MIB)
    assert torch.equal(model(X), stack()(X))


def test_threads_and_a_shared_budget(saved):
    wanted = stack()(X)
    budget = penstock.offload.Budget(12 * MIB)
    models = [streamed(stack(seed), saved, budget) for seed in (1, 2)]
    found = []
    threads = [threading.Thread(target=lambda one=one: found.append(one(X))) for one in models * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, wanted) for one in found)
    assert len(found) == 6


def test_the_report_counts_what_is_read_around(saved):
    model = streamed(stack(1), saved, 5 * MIB)
    for _ in range(3):
        model(X)
    report = penstock.offload.report(model)
    assert report.read_bytes > 0
    assert report.gb_per_second


# Who may read, and what.


def test_without_a_key_it_stays_closed(saved):
    with pytest.raises(SealedError):
        streamed(stack(1), saved, 5 * MIB, identities=None)
    with pytest.raises(WrongKeyError):
        streamed(stack(1), saved, 5 * MIB, identities=[OTHER])


def test_the_environment_opens_it(saved, monkeypatch):
    monkeypatch.setenv("PENSTOCK_IDENTITIES", KEY)
    assert torch.equal(streamed(stack(1), saved, 5 * MIB, identities=None)(X), stack()(X))


def test_clear_weights_in_its_place_are_refused(saved, tmp_path):
    shutil.rmtree(saved)
    penstock.save(saved, stack().state_dict())
    (tmp_path / "files").mkdir()
    save_file(stack().state_dict(), tmp_path / "files" / "model.safetensors")
    for path in (saved, tmp_path / "files"):
        with pytest.raises(NotSealedError):
            streamed(stack(1), path, 5 * MIB)
        streamed(stack(1), path, 5 * MIB, identities=None)(X)


def test_a_device_is_refused_by_name(saved, monkeypatch):
    from penstock.offload.streaming import model as module

    monkeypatch.setattr(module, "_device_of", lambda device: torch.device("cuda", 0))
    with pytest.raises(UnsupportedStateError, match="sealed weights"):
        streamed(stack(1), saved, 5 * MIB, device="cuda")


# Tampering and damage.


@pytest.mark.parametrize("memory_bytes", [3 * MIB, 8 * MIB])
@pytest.mark.parametrize("at", [MIB + 11, 4 * MIB + 5, 9 * MIB])
def test_tampering_before_the_run(saved, memory_bytes, at):
    xored(shard_of(saved), at, GENERATOR)
    with pytest.raises(TamperedError) as caught:
        streamed(stack(1), saved, memory_bytes)(X)
    assert caught.value.file == shard_of(saved).name
    assert caught.value.tensor is not None


def test_tampering_in_the_middle_of_a_run_is_an_error_at_that_block(saved):
    model = streamed(stack(1), saved, 3 * MIB)
    wanted = stack()(X)
    assert torch.equal(model(X), wanted)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(1))
    xored(shard_of(saved), 9 * MIB, GENERATOR)

    def calls():
        # The first blocks may have been read ahead, in the call before.
        for _ in range(3):
            assert torch.equal(model(X), wanted)

    with pytest.raises(TamperedError):
        calls()
    assert len(seen) % len(model.blocks) != 0
    # The right bytes come back with their file.
    xored(shard_of(saved), 9 * MIB, GENERATOR)
    assert torch.equal(model(X), wanted)


def test_exchanged_chunks_are_tampering(saved):
    file = shard_of(saved)
    data = file.read_bytes()
    swapped = data[2 * MIB : 3 * MIB] + data[MIB : 2 * MIB]
    file.write_bytes(data[:MIB] + swapped + data[3 * MIB :])
    with pytest.raises(CorruptCheckpointError):
        streamed(stack(1), saved, 3 * MIB)(X)


def test_a_damaged_byte_is_no_tampering(saved):
    xored(shard_of(saved), 4 * MIB + 5, b"\1")
    with pytest.raises(CorruptCheckpointError) as caught:
        streamed(stack(1), saved, 3 * MIB)(X)
    assert not isinstance(caught.value, TamperedError)


def test_no_tampered_byte_is_in_memory(saved):
    """The memory of a chunk that does not open is zeros."""
    from penstock.offload.streaming.weights import sealed_read

    kept = []
    original = sealed_read.SealedReader.begin

    def begin(self, spans, memory, file):
        kept.append((spans, memory))
        return original(self, spans, memory, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed_read.SealedReader, "begin", begin)
        xored(shard_of(saved), 4 * MIB + 5, GENERATOR)
        with pytest.raises(TamperedError):
            streamed(stack(1), saved, 64 * MIB)(X)
    for spans, memory in kept:
        for span in spans:
            first = max(span.offset, 4 * MIB)
            last = min(span.offset + span.nbytes, 5 * MIB)
            if first < last:
                part = memory[span.place + first - span.offset : span.place + last - span.offset]
                assert not part.any()


def test_an_interrupted_call_leaves_nothing_behind(saved):
    model = streamed(stack(1), saved, 3 * MIB)

    class Stop(BaseException):
        pass

    def stop(*_):
        raise Stop

    handle = model.blocks[2].register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        model(X)
    handle.remove()
    assert torch.equal(model(X), stack()(X))


# Signatures.


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


def checked(path, key, memory_bytes=5 * MIB, **further):
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
    model = checked(path, key, **opened)
    for _ in range(3):
        assert torch.equal(model(x), stack()(x))


@pytest.mark.parametrize("seals", [False, True])
def test_an_exchange_between_two_passes_is_noticed(tmp_path, key, seals):
    path, given = tmp_path / "ckpt", {"sealing": Sealing([KEY])} if seals else {}
    penstock.save(path, {"model": stack().state_dict()}, **given, sign=key)
    x = torch.randn(3, 700)
    opened = {"identities": [KEY]} if seals else {}
    # Two of the six blocks fit, so that each pass reads again.
    model = checked(path, key, **opened)
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
        checked(path, key)
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    penstock.sign(path, other)
    with pytest.raises(SignatureError):
        checked(path, key)
    files.mkdir()
    save_file(Stack().state_dict(), files / "model.safetensors")
    with pytest.raises(NotSignedError, match="signed_by="):
        checked(files, key)
