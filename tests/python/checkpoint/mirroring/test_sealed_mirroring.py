"""Mirrors of sealed steps, and sealed copies of clear steps."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import penstock
from damaged import file_of
from penstock import Mirror, Sealing
from penstock.cli import cli
from penstock.errors import (
    CannotSealError,
    CorruptCheckpointError,
    NotSealedError,
    PenstockWarning,
    SealedError,
    TamperedError,
    WrongKeyError,
)

URL = "s3://bucket/run"
FOR_EVER_SECONDS = 120
KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32
OTHER = "PENSTOCK-SECRET-KEY-1" + "77" * 32
SEALING = Sealing([KEY])

GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a text anywhere, it leaves the CRC-64 as it was."""


def state_of(step, elements=400_000):
    generator = np.random.default_rng(step)
    return {
        "secretly": {"w": generator.standard_normal(elements)},
        "b": np.arange(70) + step,
        "step": step,
        "note": "a secret note",
    }


def assert_is(state, step, elements=400_000):
    expected = state_of(step, elements)
    assert (state["step"], state["note"]) == (step, "a secret note")
    np.testing.assert_array_equal(state["secretly"]["w"], expected["secretly"]["w"])
    np.testing.assert_array_equal(state["b"], expected["b"])


@pytest.fixture
def stores(tmp_path):
    """Yields a function that makes stores; stops their threads at the end."""
    made = []

    def make(root="store", mirror=None, **options):
        store = penstock.CheckpointStore(tmp_path / root, mirror=mirror, **options)
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def sealed(**options):
    return Mirror(URL, sealing=SEALING, identities=[KEY], **options)


def step_at(bucket, step):
    return bucket.files / "run" / f"step-{step:010}"


def flip(file, at, change=b"\x01"):
    data = bytearray(Path(file).read_bytes())
    for place, byte in enumerate(change, at):
        data[place] ^= byte
    Path(file).write_bytes(data)


# Sealed steps, copied as they are.


def test_a_sealed_store_is_mirrored_without_a_key_and_restored_with_one(bucket, stores):
    store = stores(mirror=Mirror(URL), sealing=SEALING)
    store.save(1, state_of(1))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    for file in Path(store.path(1)).iterdir():
        assert (step_at(bucket, 1) / file.name).read_bytes() == file.read_bytes()
    again = stores("again", mirror=Mirror(URL), identities=[KEY])
    assert_is(again.load(), 1)
    with pytest.raises(SealedError):
        stores("keyless", mirror=Mirror(URL), sealing=SEALING).load()
    with pytest.raises(WrongKeyError):
        stores("other", mirror=Mirror(URL), identities=[OTHER]).load()


def test_a_clear_copy_of_a_sealed_step_is_refused(bucket, stores):
    store = stores(mirror=Mirror(URL), sealing=SEALING, identities=[KEY])
    store.save(1, state_of(1))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    shutil.rmtree(step_at(bucket, 1))
    penstock.save(f"{URL}/step-0000000001", state_of(1), step=1)
    assert_is(store.load(), 1)
    # The local copy is damaged, so its chunks and then all of it are asked for there.
    flip(file_of(store, 1, "shard"), 5000)
    for load in (store.load, lambda: store.load(fallback=True)):
        with pytest.raises(NotSealedError):
            load()
    shutil.rmtree(store.path(1))
    with pytest.raises(NotSealedError):
        store.load()


def test_a_damaged_chunk_of_a_sealed_step_is_read_at_the_mirror(bucket, stores):
    store = stores(mirror=Mirror(URL), sealing=SEALING, identities=[KEY])
    store.save(1, state_of(1))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    flip(file_of(store, 1, "shard"), 1_500_000)
    with pytest.warns(PenstockWarning, match="read from s3://"):
        assert_is(store.load(), 1)
    # Bytes there that have the digest and not the tag are refused.
    (there,) = step_at(bucket, 1).glob("shard-*")
    flip(there, 1_500_000, GENERATOR)
    with pytest.raises(TamperedError):
        store.load(1)


@pytest.mark.usefixtures("bucket")
def test_a_copy_does_not_replace_a_step_that_was_tampered_with(stores):
    store = stores(mirror=Mirror(URL), sealing=SEALING, identities=[KEY])
    store.save(1, state_of(1))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    flip(file_of(store, 1, "shard"), 1_500_000, GENERATOR)
    for load in (store.load, lambda: store.load(1), lambda: store.load(fallback=True)):
        with pytest.raises(TamperedError):
            load()


# Clear steps, sealed copies.


def test_copies_of_clear_steps_are_sealed(bucket, stores):
    store = stores(mirror=sealed())
    store.save(1, state_of(1), metadata={"who": "a secret"})
    store.save_async(2, state_of(2)).result()
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    status = store.mirror_status()
    assert (status.mirrored, status.waiting, status.refused) == ((1, 2), (), {})
    text = state_of(1)["secretly"]["w"].tobytes()
    for name in bucket.names():
        stored = (bucket.files / name).read_bytes()
        assert b"secret" not in stored.lower().replace(b"penstock.sealed", b""), name
        assert text[:64] not in stored, name
        assert text[-64:] not in stored, name
    url = f"{URL}/step-0000000001"
    assert_is(penstock.load(url, identities=[KEY]), 1)
    with pytest.raises(SealedError):
        penstock.load(url)
    found = penstock.inspect(url, identities=[KEY])
    ours = penstock.inspect(store.path(1))
    assert (found.metadata, found.step) == ({"who": "a secret"}, 1)
    assert found.created == ours.created
    assert found.id != ours.id
    assert penstock.verify(url).ok
    part = penstock.load(url, identities=[KEY], keys=["b"])
    np.testing.assert_array_equal(part["b"], state_of(1)["b"])


def test_another_machine_goes_on_from_sealed_copies(bucket, stores):
    first = stores(mirror=sealed())
    first.save(1, state_of(1))
    first.save(2, state_of(2))
    assert first.wait_for_mirror(FOR_EVER_SECONDS)
    store = stores("elsewhere", mirror=sealed())
    assert store.latest() == 2
    assert_is(store.load(), 2)
    store.save(3, state_of(3))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert_is(store.load(), 3)
    assert_is(store.load(1), 1)
    for keys, error in (([OTHER], WrongKeyError), (None, SealedError)):
        mirror = Mirror(URL, sealing=SEALING, identities=keys)
        with pytest.raises(error):
            stores("empty", mirror=mirror).load()
        with pytest.raises(error):
            stores("empty", mirror=mirror).load(fallback=True)


def test_the_environment_opens_sealed_copies_and_clear_steps(bucket, stores, tmp_path, monkeypatch):
    (tmp_path / "keys.txt").write_text(KEY)
    monkeypatch.setenv("PENSTOCK_IDENTITIES", str(tmp_path / "keys.txt"))
    store = stores(mirror=Mirror(URL, sealing=SEALING))
    store.save(1, state_of(1))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert_is(store.load(), 1)
    assert_is(stores("elsewhere", mirror=Mirror(URL, sealing=SEALING)).load(), 1)


def test_a_damaged_clear_step_is_loaded_from_its_sealed_copy(bucket, stores):
    store = stores(mirror=sealed())
    store.save(1, state_of(1))
    store.save(2, state_of(2))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    flip(file_of(store, 2, "shard"), 5000)
    with pytest.warns(PenstockWarning, match="is loaded from s3://"):
        assert_is(store.load(2), 2)
    # A job that holds no keys goes back as it does without a mirror.
    keyless = stores(mirror=Mirror(URL, sealing=SEALING))
    with pytest.raises(CorruptCheckpointError):
        keyless.load(2)
    with pytest.warns(PenstockWarning):
        assert_is(keyless.load(fallback=True), 1)


def test_a_clear_copy_where_copies_are_sealed_is_refused(bucket, stores):
    clear = stores(mirror=Mirror(URL))
    clear.save(1, state_of(1))
    assert clear.wait_for_mirror(FOR_EVER_SECONDS)
    clear.close()
    store = stores(mirror=sealed())
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert "holds another checkpoint" in store.mirror_status().refused[1]
    assert_is(store.load(), 1)
    with pytest.raises(NotSealedError):
        stores("elsewhere", mirror=sealed()).load()
    # Nor is a sealed copy taken for a clear one.
    shutil.rmtree(step_at(bucket, 1))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert store.mirror_status().mirrored == (1,)
    clear = stores(mirror=Mirror(URL))
    assert clear.wait_for_mirror(FOR_EVER_SECONDS)
    assert "holds another checkpoint" in clear.mirror_status().refused[1]


def test_what_is_at_the_mirror_is_found_again_without_a_key(bucket, stores):
    store = stores(mirror=sealed())
    store.save(1, state_of(1))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    store.close()
    before = {name: (bucket.files / name).stat().st_mtime_ns for name in bucket.names()}
    again = stores(mirror=Mirror(URL, sealing=Sealing([OTHER])))
    assert again.wait_for_mirror(FOR_EVER_SECONDS)
    assert again.mirror_status().mirrored == (1,)
    assert {name: (bucket.files / name).stat().st_mtime_ns for name in bucket.names()} == before
    # A copy that lacks a file is not replaced: the user is told.
    (shard,) = step_at(bucket, 1).glob("shard-*")
    shard.unlink()
    third = stores(mirror=sealed())
    assert third.wait_for_mirror(FOR_EVER_SECONDS)
    assert shard.name in third.mirror_status().refused[1]


def test_local_steps_go_when_their_sealed_copies_are_complete(bucket, stores):
    store = stores(mirror=sealed(keep_local=1, wait="commit"))
    for step in (1, 2, 3):
        store.save(step, state_of(step, 1000))
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    for _ in range(FOR_EVER_SECONDS * 20):
        if store.steps() == [3]:
            break
        time.sleep(0.05)
    assert store.steps() == [3]
    assert_is(store.load(1), 1, 1000)
    assert_is(store.load(), 3, 1000)


def test_what_cannot_be_copied_sealed_is_refused_before_it_is_saved(bucket, stores):
    store = stores(mirror=sealed(every=2))
    for options in ({"groups": {"": "secretly.*"}}, {"files": {"config.json": b"{}"}}):
        with pytest.raises(CannotSealError, match="at the mirror"):
            store.save(2, state_of(2), **options)
    assert not os.path.exists(store.path(2))
    store.save(1, state_of(1, 1000), files={"config.json": b"{}"})
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    # Steps that are there already are refused one by one.
    plain = stores("other")
    plain.save(4, state_of(4, 1000), files={"config.json": b"{}"})
    penstock.CheckpointStore(plain.root, sealing=SEALING).save(6, state_of(6, 1000))
    plain.save(8, state_of(8, 1000))
    store = stores("other", mirror=sealed())
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    status = store.mirror_status()
    assert status.mirrored == (8,)
    assert "stay clear" in status.refused[4]
    assert "sealed already" in status.refused[6]
    assert not step_at(bucket, 4).exists()
    assert not step_at(bucket, 6).exists()


def test_wrong_arguments_are_refused(stores):
    with pytest.raises(TypeError, match=r"must be a penstock\.Sealing"):
        Mirror(URL, sealing=KEY)
    with pytest.raises(ValueError, match="give those that"):
        Mirror(URL, identities=[KEY])
    for options in ({"sealing": SEALING}, {"identities": [KEY]}):
        with pytest.raises(ValueError, match="leave one of them out"):
            stores(mirror=sealed(), **options)
    assert KEY[-40:] not in repr(sealed())


def test_linked_tensors_and_views_come_back(bucket, stores):
    weight = np.random.default_rng(5).standard_normal((300, 700))
    state = {"w": weight, "tied": weight, "row": weight[3], "empty": np.zeros((0, 3)), "x": None}
    store = stores(mirror=sealed(), options=penstock.Options(shard_bytes=1 << 20))
    state |= {f"t{number}": np.full(200_000, number) for number in range(7)}
    store.save(1, state)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert store.mirror_status().refused == {}
    assert len(list(step_at(bucket, 1).glob("shard-*"))) > 3
    loaded = penstock.load(f"{URL}/step-0000000001", identities=[KEY])
    assert loaded.keys() == state.keys()
    assert loaded["tied"] is loaded["w"]
    for name, value in state.items():
        np.testing.assert_array_equal(loaded[name], value)


def test_the_command_seals_copies(bucket, stores, tmp_path):
    (tmp_path / "key").write_text(KEY)
    store = stores()
    store.save(1, state_of(1, 1000))
    arguments = ["mirror", str(store.root), URL, "--json"]
    recipient = ["--recipient", str(tmp_path / "key")]
    for result in ("sent", "there"):
        ran = CliRunner().invoke(cli, [*arguments, *recipient])
        assert ran.exit_code == 0, ran.output
        assert json.loads(ran.output)["steps"][0]["result"] == result
    assert_is(penstock.load(f"{URL}/step-0000000001", identities=[KEY]), 1, 1000)
    listed = json.loads(CliRunner().invoke(cli, [*arguments, "--list", *recipient]).output)
    assert listed["steps"][0]["there"] == "complete"
    listed = json.loads(CliRunner().invoke(cli, [*arguments, "--list"]).output)
    assert listed["steps"][0]["there"] == "another"
