"""Saves that write aligned tensors from their own memory: the same files, never a damaged one."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

import penstock
from compare import assert_same
from penstock.sealing import Sealing

MIB = 1 << 20
HUGE = 2 * MIB

torch.set_num_threads(1)


def aligned(*sizes, skip=0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
    """Tensors of bytes, one behind the other in huge pages, ``skip`` bytes behind a page."""
    memory = mmap.mmap(-1, sum(sizes) + skip + HUGE, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE + skip
    tensors = whole[start : start + sum(sizes)].split(sizes)
    for seed, tensor in enumerate(tensors):
        tensor.random_(generator=torch.Generator().manual_seed(seed))
    return list(tensors)


def weights(**options):
    """A state of whole pages, of other sizes, and of small tensors."""
    sizes = (24 * MIB, 9 * MIB, 7 * MIB + 4096)
    tensors = {f"w{index}": tensor for index, tensor in enumerate(aligned(*sizes, **options))}
    return {**tensors, "odd": torch.arange(300_007.0), "step": 7}


@pytest.fixture
def uncopied(disk_path):
    """Skips a test where nothing is saved without a copy."""
    report = penstock.save(disk_path / "probe", weights())
    if report.zero_copy_bytes == 0:
        pytest.skip(f"saves copy here: {report.choices}, {report.fallbacks}")


@pytest.mark.quick
def test_aligned_tensors_are_written_without_a_copy_unless_told_not_to(
    disk_path, uncopied, monkeypatch
):
    state = weights()
    report = penstock.save(disk_path / "on", state)
    assert 36 * MIB < report.zero_copy_bytes < report.tensor_bytes
    assert "without a copy" in str(report)
    given = penstock.save(disk_path / "off", state, options=penstock.Options(zero_copy=False))
    monkeypatch.setenv("PENSTOCK_ZERO_COPY", "off")
    of_environment = penstock.save(disk_path / "of_environment", state)
    assert given.zero_copy_bytes == of_environment.zero_copy_bytes == 0
    assert "without a copy" not in str(given)
    for name in ("on", "off", "of_environment"):
        assert penstock.verify(disk_path / name).ok
        assert_same(penstock.load(disk_path / name), state)
    shards = [
        b"".join(file.read_bytes() for file in (disk_path / name).glob("*.safetensors"))
        for name in ("on", "off")
    ]
    assert shards[0] == shards[1]


def test_tensors_that_only_the_device_takes_are_written_without_a_copy(disk_path, uncopied):
    state = weights(skip=512)
    report = penstock.save(disk_path / "ckpt", state)
    why = [choice for choice in report.choices if "zero_copy" in choice]
    if any("multiples of" in choice for choice in why):
        pytest.skip(f"the disk needs more: {why}")
    assert report.zero_copy_bytes > 36 * MIB
    assert why == []
    assert_same(penstock.load(disk_path / "ckpt"), state)


def test_what_does_not_suit_is_copied_and_the_report_says_why(disk_path, uncopied):
    shared = weights(flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    plain = {"w": torch.empty(32 * MIB, dtype=torch.uint8).random_()}
    strided = {"w": aligned(32 * MIB)[0].view(4096, 8192).t()}
    for name, state, reason in (
        ("shared", shared, "huge pages"),
        ("odd", weights(skip=1), "multiples of"),
        ("plain", plain, ""),
        ("strided", strided, "multiples of"),
    ):
        report = penstock.save(disk_path / name, state)
        assert report.zero_copy_bytes == 0, name
        why = [choice for choice in report.choices if choice.startswith("zero_copy=off: ")]
        assert len(why) == 1
        assert reason in why[0]
        assert_same(penstock.load(disk_path / name), state)
    small = penstock.save(disk_path / "small", {"w": aligned(MIB)[0]})
    assert not [choice for choice in small.choices if "zero_copy" in choice]


def test_a_tensor_that_changes_during_a_save_does_not_damage_it(disk_path, uncopied):
    state = weights()
    other = state["w1"].clone()
    over = threading.Event()

    def change():
        seed = 0
        while not over.is_set():
            state["w0"][seed * 7919 % (23 * MIB) :][: 64 << 10].add_(1)
            seed += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for step in range(10):
            penstock.save(disk_path / str(step), state)
    finally:
        over.set()
        thread.join()
    for step in range(10):
        assert penstock.verify(disk_path / str(step)).ok
        assert torch.equal(penstock.load(disk_path / str(step))["w1"], other)


def test_a_lazy_save_writes_from_the_state_and_stores_its_moment(disk_path, uncopied):
    store = penstock.CheckpointStore(disk_path / "store")
    state = weights()
    pending = store.save_async(1, state, lazy=True)
    report = pending.result()
    assert report.zero_copy_bytes > 36 * MIB
    for step in range(2, 8):
        pending = store.save_async(step, state, lazy=True)
        pending.stage()
        for name in ("w0", "w1", "w2", "odd"):
            state[name].fill_(step)
        pending.result()
    # The last one stores what the one before it has left.
    expected = {name: torch.full_like(state[name], 6) for name in ("w0", "w1", "w2", "odd")}
    assert_same(store.load(7), {**expected, "step": 7})


def test_the_tensors_are_free_after_a_save(disk_path, uncopied):
    memory = aligned(24 * MIB)
    penstock.save(disk_path / "ckpt", {"w": memory[0]})
    kept = memory[0].clone()
    memory[0].zero_()
    assert torch.equal(penstock.load(disk_path / "ckpt")["w"], kept)


def test_a_sealed_save_copies_and_a_signed_one_does_not(disk_path, uncopied, tmp_path):
    state = weights()
    key = "PENSTOCK-SECRET-KEY-1" + "5e" * 32
    report = penstock.save(disk_path / "sealed", state, sealing=Sealing([key]))
    assert (report.zero_copy_bytes, report.sealed_bytes) == (0, report.tensor_bytes)
    assert_same(penstock.load(disk_path / "sealed", identities=[key]), state)
    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "key").write_bytes(text)
    text = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (tmp_path / "key.pub").write_bytes(text + b" me@host\n")
    report = penstock.save(disk_path / "signed", state, sign=tmp_path / "key")
    assert report.zero_copy_bytes > 36 * MIB
    assert_same(penstock.load(disk_path / "signed", signed_by=tmp_path / "key.pub"), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool])
def test_tensors_of_any_type_are_written_without_a_copy(disk_path, uncopied, dtype):
    raw = aligned(20 * MIB)[0]
    tensor = raw.ne(0).to(torch.uint8) if dtype is torch.bool else raw
    raw.copy_(tensor)
    state = {"w": raw.view(dtype).view(4, -1)}
    report = penstock.save(disk_path / "ckpt", state)
    assert report.zero_copy_bytes > 18 * MIB
    loaded = penstock.load(disk_path / "ckpt")
    assert torch.equal(loaded["w"].view(torch.uint8), state["w"].view(torch.uint8))
