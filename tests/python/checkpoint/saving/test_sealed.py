"""Sealed checkpoints through the public API: who has a key loads them, and nobody else."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap

import penstock
from compare import assert_same
from format_reader import Checkpoint, FormatError
from penstock.errors import (
    CannotSealError,
    CorruptCheckpointError,
    NotSealedError,
    SealedError,
    TamperedError,
    WrongKeyError,
)
from penstock.sealing import Sealing
from sealed_reader import SealedCheckpoint, SealError

pytestmark = pytest.mark.quick

MIB = 1 << 20
DIGITS = "5e" * 32
KEY = "PENSTOCK-SECRET-KEY-1" + DIGITS
OTHER = "PENSTOCK-SECRET-KEY-1" + "77" * 32
GOLDEN = Path(__file__).parents[3] / "golden" / "sealed"

GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a text anywhere, it leaves the CRC-64 as it was."""


def sealing():
    return Sealing([KEY])


def state(seed=0):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(700, 600, generator=draw)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "row": weight[3],
            "half": torch.randn(5, 7, generator=draw).to(torch.bfloat16),
            "empty": torch.zeros(0, 3),
        },
        "array": np.arange(300_001, dtype="float64") + seed,
        "step": seed,
        "name": "a secret name",
        "blob": bytes(range(256)) * 40,
    }


def data_key(path):
    """Returns the data key of a checkpoint that is sealed for `KEY`."""
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    (wrap,) = manifest["wraps"]
    return aes_key_unwrap(bytes.fromhex(DIGITS), base64.b64decode(wrap["key"]))


def shard_of(path):
    return min(Path(path).glob("shard-*"))


def collide(file, at):
    data = bytearray(file.read_bytes())
    for place, byte in enumerate(GENERATOR, at):
        data[place] ^= byte
    file.write_bytes(data)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, state(), sealing=sealing(), step=3, metadata={"run": "secret run"})
    return path


# With a key.


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_sealed_state_comes_back(tmp_path, direct, verify):
    path = tmp_path / "ckpt"
    options = penstock.Options(direct=direct, shard_bytes=MIB, extent_bytes=MIB)
    report = penstock.save(path, state(), sealing=sealing(), options=options)
    assert report.files > 3
    reading = penstock.Options(direct=direct, verify=verify)
    assert_same(penstock.load(path, identities=[KEY], options=reading), state())


def test_leaves_and_targets_load(saved):
    part = penstock.load(saved, identities=[KEY], keys=["model.half", "step"])
    assert_same(part, {"model": {"half": state()["model"]["half"]}, "step": 0})
    reports = []
    penstock.load(saved, identities=[KEY], keys="model.half", report=reports.append)
    assert reports[0].bytes_read <= 2 * MIB
    into = state(1)
    weight = into["model"]["weight"]
    into = penstock.load(saved, identities=[KEY], into=into)
    assert_same(into, state())
    assert into["model"]["weight"] is weight
    strided = torch.zeros(600, 700).t()
    penstock.load(saved, identities=[KEY], into={"model": {"weight": strided}}, keys="model.weight")
    assert torch.equal(strided, state()["model"]["weight"])


def test_the_environment_names_identities(saved, tmp_path, monkeypatch):
    file = tmp_path / "keys.txt"
    file.write_text(f"# a key\n{KEY}\n")
    monkeypatch.setenv("PENSTOCK_IDENTITIES", str(file))
    assert_same(penstock.load(saved), state())
    penstock.save(tmp_path / "clear", {"a": 1})
    assert penstock.load(tmp_path / "clear") == {"a": 1}


@pytest.mark.parametrize("lazy", [False, True])
def test_background_saves_are_sealed(tmp_path, lazy):
    with penstock.CheckpointStore(tmp_path / "store", sealing=sealing(), identities=[KEY]) as store:
        for step in range(3):
            pending = store.save_async(step, state(step), lazy=lazy)
            pending.stage()
        pending.result()
    assert_same(store.load(), state(2))
    assert_same(store.load(1), state(1))
    for step in range(3):
        with pytest.raises(SealedError, match="is sealed"):
            penstock.load(store.path(step))


def test_a_training_resumes(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 20)
        return penstock.Training(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    store = penstock.CheckpointStore(tmp_path / "store", sealing=sealing(), identities=[KEY])
    training = make()
    training.model(torch.ones(3, 30)).sum().backward()
    training.optimizer.step()
    store.save(5, training)
    again = make()
    assert store.resume(again) == 5
    assert_same(again.model.state_dict(), training.model.state_dict())


def test_a_sealed_checkpoint_replaces_another(tmp_path):
    path = tmp_path / "ckpt"
    for seed in range(3):
        penstock.save(path, state(seed), sealing=sealing(), overwrite=True)
        assert_same(penstock.load(path, identities=[KEY]), state(seed))


# Without one.


def test_nothing_of_a_state_is_readable(saved):
    for file in saved.iterdir():
        data = file.read_bytes()
        for secret in (b"weight", b"bfloat16", b"secret", b"array", state()["blob"][:64]):
            assert secret not in data, file.name
    with pytest.raises(SealedError, match="PENSTOCK_IDENTITIES") as caught:
        penstock.load(saved)
    assert caught.value.path == str(saved)
    with pytest.raises(WrongKeyError):
        penstock.load(saved, identities=[OTHER])


def test_inspect_and_verify_say_that_it_is_sealed(saved):
    info = penstock.inspect(saved)
    assert info.is_closed
    assert info.recipients == sealing().recipients
    assert (info.tensors, info.metadata, info.step) == ((), {}, 3)
    assert "sealed" in str(info)
    with pytest.raises(SealedError):
        info.values()
    result = penstock.verify(saved)
    assert result.ok
    assert result.is_sealed
    assert "sealed" in str(result)
    opened = penstock.inspect(saved, identities=[KEY])
    assert not opened.is_closed
    assert opened.metadata == {"run": "secret run"}
    assert "model.weight" in {tensor.name for tensor in opened.tensors}
    assert opened.values()["name"] == "a secret name"


def test_a_clear_checkpoint_is_refused_in_place_of_a_sealed_one(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, state())
    with pytest.raises(NotSealedError):
        penstock.load(path, identities=[KEY])
    store = penstock.CheckpointStore(tmp_path / "store", sealing=sealing())
    penstock.CheckpointStore(tmp_path / "store").save(1, state())
    with pytest.raises(NotSealedError):
        store.load()
    with pytest.raises(NotSealedError):
        store.resume(penstock.Training(losses=[]))


def test_damage_and_tampering_have_names(saved, tmp_path):
    shard = shard_of(saved).name
    for place in (100, 5000, MIB + 50):
        copy = shutil.copytree(saved, tmp_path / f"copy-{place}")
        collide(copy / shard, place)
        # A header that is no JSON shows without a key.
        assert penstock.verify(copy).ok == (place > 4096)
        for verify in (True, False):
            options = penstock.Options(verify=verify)
            with pytest.raises(TamperedError) as caught:
                penstock.load(copy, identities=[KEY], options=options)
            assert (caught.value.file, caught.value.offset) == (shard, place // MIB * MIB)
        data = bytearray((saved / shard).read_bytes())
        data[place] ^= 1
        (copy / shard).write_bytes(data)
        with pytest.raises(CorruptCheckpointError) as caught:
            penstock.load(copy, identities=[KEY])
        assert not isinstance(caught.value, TamperedError)
    part = min(saved.glob("part-*"))
    collide(part, 300)
    with pytest.raises(CorruptCheckpointError):
        penstock.load(saved, identities=[KEY])


def test_what_cannot_be_sealed_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "ckpt"
    for given in ({"groups": {"model": ""}}, {"files": {"config.json": b"{}"}}):
        with pytest.raises(CannotSealError, match="sealing="):
            penstock.save(path, state(), sealing=sealing(), **given)
    with pytest.raises(TypeError, match=r"penstock\.Sealing"):
        penstock.save(path, state(), sealing=["age1"])
    assert not path.exists()


def test_jobs_without_identities_refuse_a_sealed_checkpoint(saved, tmp_path):
    with pytest.raises(SealedError):
        penstock.export(saved, tmp_path / "model")
    with pytest.raises(SealedError):
        penstock.salvage(saved, tmp_path / "salvaged")
    with pytest.raises(SealedError):
        penstock.explain(saved)
    with pytest.raises(FormatError):
        Checkpoint(saved).state()


# By another program.


def test_another_reader_opens_what_is_sealed(saved):
    read = SealedCheckpoint(saved, data_key(saved))
    assert read.metadata == {"run": "secret run"}
    found = read.state()
    expected = state()
    assert found["model"]["weight"].data == expected["model"]["weight"].numpy().tobytes()
    assert found["array"].data == expected["array"].tobytes()
    assert (found["name"], found["blob"]) == (expected["name"], expected["blob"])


def test_another_reader_finds_tampering_too(saved):
    key = data_key(saved)
    with pytest.raises(SealError, match="commitment"):
        SealedCheckpoint(saved, bytes(32))
    collide(shard_of(saved), 9000)
    with pytest.raises(SealError, match=r"9\.6: 0"):
        SealedCheckpoint(saved, key)


def test_the_golden_checkpoint_opens_with_both_readers():
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN.parent / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.SEALED_KEY == KEY
    expected = make.sealed()
    assert_same(penstock.load(GOLDEN, identities=[KEY]), expected)
    info = penstock.inspect(GOLDEN, identities=[KEY])
    assert (info.metadata, info.step) == ({"golden": "sealed"}, 7)
    assert sum(file.name.startswith("shard-") for file in info.files) > 1
    found = SealedCheckpoint(GOLDEN, data_key(GOLDEN)).state()
    assert found["w"].data == expected["w"].tobytes()
    assert found["pages"].data == expected["pages"].numpy().tobytes()
    assert (found["name"], found["step"]) == ("golden", 7)
    assert penstock.verify(GOLDEN).ok


def test_no_store_goes_on_from_before_a_step_that_was_tampered_with(tmp_path):
    """Those who tamper would choose the step that a training resumes from."""
    training = penstock.Training(weights=np.arange(300_000))
    store = penstock.CheckpointStore(tmp_path / "store", sealing=sealing(), identities=[KEY])
    for step in (1, 2):
        store.save(step, training)
    newest = tmp_path / "store" / "step-0000000002"
    collide(shard_of(newest), 8000)
    store = penstock.CheckpointStore(tmp_path / "store", sealing=sealing(), identities=[KEY])
    for load in (
        store.load,
        lambda: store.load(step=2),
        lambda: store.load(fallback=True),
        lambda: store.resume(training),
        # No mark makes a later load pass it over.
        lambda: store.load(fallback=True),
    ):
        with pytest.raises(TamperedError) as raised:
            load()
        assert "fallback" not in str(raised.value)
    assert store.quarantined() == []
    assert store.steps() == [1, 2]
    assert "weights" in store.load(step=1)


def test_a_key_in_the_place_of_a_sealing_is_refused_at_once(tmp_path):
    for wrong in (KEY, [KEY], True):
        with pytest.raises(TypeError, match=r"must be a penstock\.Sealing"):
            penstock.CheckpointStore(tmp_path, sealing=wrong)


@pytest.mark.parametrize("kind", [penstock.Sealing, penstock.sealing.Identities])
def test_objects_of_a_wrong_key_have_a_representation(kind):
    """Tools show the variables of each frame of a traceback."""
    assert repr(kind.__new__(kind)) == f"{kind.__name__}()"
