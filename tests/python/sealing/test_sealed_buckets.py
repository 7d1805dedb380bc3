"""Sealed checkpoints in buckets of real servers, and what somebody who writes to them can do."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import penstock
from compare import assert_same
from penstock import Sealing, sealing
from penstock.cli import cli
from penstock.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    NotSealedError,
    SealedError,
    TamperedError,
    WrongKeyError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from buckets import Bucket

DIGITS = "5e" * 32
KEY = "PENSTOCK-SECRET-KEY-1" + DIGITS
OTHER = "PENSTOCK-SECRET-KEY-1" + "77" * 32
SEALING = Sealing([KEY])

GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a text anywhere, it leaves the CRC-64 as it was."""


def state(seed=0, elements=3_000_000):
    numbers = np.random.default_rng(seed)
    return {
        "secretly": {"w": torch.from_numpy(numbers.standard_normal(elements).astype("f4"))},
        "b": torch.arange(7) + seed,
        "step": seed,
        "note": "a secret note",
    }


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_a_sealed_state_comes_back(place):
    url = f"{place.url}/run/step-1"
    report = penstock.save(url, state(), sealing=SEALING, step=1, metadata={"who": "a secret"})
    assert report.engine == "objects"
    assert_same(penstock.load(url, identities=[KEY]), state())
    unverified = penstock.Options(verify=False)
    assert_same(penstock.load(url, identities=[KEY], options=unverified), state())
    reports = []
    part = penstock.load(url, identities=[KEY], keys=["b"], report=reports.append)
    assert part["b"].tolist() == list(range(7))
    assert reports[0].bytes_read <= 2 << 20
    into = state(1)
    penstock.load(url, identities=[KEY], into=into)
    assert_same(into, state())
    with pytest.raises(SealedError):
        penstock.load(url)
    with pytest.raises(WrongKeyError):
        penstock.load(url, identities=[OTHER])
    assert penstock.verify(url).ok
    assert penstock.inspect(url, identities=[KEY]).metadata == {"who": "a secret"}
    shown = run("inspect", url)
    assert "secret" not in shown, shown


def test_a_store_seals_steps_and_refuses_clear_ones(place):
    url = f"{place.url}/store"
    store = penstock.CheckpointStore(url, sealing=SEALING, identities=[KEY], keep_last=2)
    store.save(1, state(1, 1000))
    store.save_async(2, state(2)).result()
    pending = store.save_async(3, state(3), lazy=True)
    pending.stage()
    pending.result()
    assert store.steps() == [2, 3]
    assert_same(store.load(), state(3))
    assert_same(store.load(2, keys=["b"]), {"b": state(2)["b"]})
    assert store.verify(3).ok
    store.save(3, state(4, 1000), overwrite=True)
    assert_same(store.load(), state(4, 1000))
    penstock.save(f"{url}/step-0000000009", state(9, 1000), step=9)
    for load in (store.load, lambda: store.load(fallback=True)):
        with pytest.raises(NotSealedError):
            load()
    store.close()


def test_recipients_change_by_the_manifest_alone(place, tmp_path):
    url = f"{place.url}/keys"
    mine, yours = (tmp_path / name for name in ("mine", "yours"))
    my_name, your_name = (sealing.generate(file) for file in (mine, yours))
    store = penstock.CheckpointStore(url, sealing=Sealing([mine]))
    store.save(1, state(1, 1000))
    step = store.path(1)
    before = penstock.inspect(step).files
    assert my_name in run("keys", "list", url)
    run("keys", "add", url, "--recipient", yours, "--identity", mine)
    assert [one.name for one in sealing.recipients(step)] == [my_name, your_name]
    run("keys", "remove", url, my_name)
    with pytest.raises(WrongKeyError):
        penstock.load(step, identities=[mine])
    assert_same(penstock.load(step, identities=[yours]), state(1, 1000))
    run("keys", "rotate", url, "--recipient", mine, "--identity", yours)
    assert_same(penstock.load(step, identities=[mine]), state(1, 1000))
    with pytest.raises(WrongKeyError):
        sealing.add_recipients(step, [yours], identities=[yours])
    is_data = [file for file in before if file.name != "manifest.json"]
    assert [file for file in penstock.inspect(step).files if file.name != "manifest.json"] == (
        is_data
    )
    assert store.verify(1).ok


def test_recipients_that_are_added_at_once_are_all_there(place, tmp_path):
    url = f"{place.url}/at-once"
    penstock.save(url, state(0, 1000), sealing=SEALING)
    names = [sealing.generate(tmp_path / f"{number}") for number in range(6)]
    failed = []

    def add(name):
        try:
            sealing.add_recipients(url, [name], identities=[KEY])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert {one.name for one in sealing.recipients(url)} >= set(names)


def test_of_sealed_savers_at_once_one_wins(place):
    url = f"{place.url}/race"
    won, lost = [], []

    def save(seed):
        try:
            penstock.save(url, state(seed, 1000), sealing=SEALING)
            won.append(seed)
        except CheckpointExistsError:
            lost.append(seed)

    threads = [threading.Thread(target=save, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 3)
    assert_same(penstock.load(url, identities=[KEY]), state(won[0], 1000))


# Somebody who can write to the bucket and has no key. VersityGW's objects are files.


def file_of(bucket: Bucket, url: str, kind: str) -> Path:
    (found,) = (bucket.files / url.removeprefix(f"{bucket.url}/")).glob(f"{kind}*")
    return found


def test_a_bucket_holds_nothing_clear(bucket):
    store = penstock.CheckpointStore(f"{bucket.url}/run", sealing=SEALING)
    store.save(1, state(), metadata={"who": "a secret"})
    text = state()["secretly"]["w"].numpy().tobytes()
    for name in bucket.names():
        stored = (bucket.files / name).read_bytes()
        assert b"secret" not in stored.lower(), name
        assert text[:64] not in stored, name
        assert text[-64:] not in stored, name


def test_a_clear_manifest_in_the_place_of_a_sealed_one_is_refused(bucket):
    url = f"{bucket.url}/swapped"
    penstock.save(url, state(1, 1000), sealing=SEALING)
    penstock.save(url, state(2, 1000), overwrite=True)
    with pytest.raises(NotSealedError):
        penstock.load(url, identities=[KEY])
    assert penstock.load(url)["step"] == 2


def test_an_older_manifest_fits_no_newer_file(bucket):
    url = f"{bucket.url}/older"
    penstock.save(url, state(1, 1000), sealing=SEALING)
    kept = {file.name: file.read_bytes() for file in (bucket.files / "older").iterdir()}
    penstock.save(url, state(2, 1000), sealing=SEALING, overwrite=True)
    manifest = bucket.files / "older" / "manifest.json"
    manifest.write_bytes(kept["manifest.json"])
    with pytest.raises(CorruptCheckpointError):
        penstock.load(url, identities=[KEY])
    # Files of the newer attempt under the names of the older one, with their digests.
    for kind in ("part", "shard"):
        (old,) = (name for name in kept if name.startswith(kind))
        newer = file_of(bucket, url, kind).read_bytes()
        (bucket.files / "older" / old).write_bytes(newer)
    with pytest.raises(CorruptCheckpointError):
        penstock.load(url, identities=[KEY])


def test_exchanged_objects_are_noticed(bucket):
    urls = [f"{bucket.url}/exchanged/{number}" for number in range(2)]
    for seed, url in enumerate(urls):
        penstock.save(url, state(seed, 1000), sealing=SEALING)
    first, second = (file_of(bucket, url, "shard") for url in urls)
    first_bytes = first.read_bytes()
    data = bytearray(first_bytes)
    # A change that leaves the digest as it was.
    for place, byte in enumerate(GENERATOR, len(data) - 100):
        data[place] ^= byte
    first.write_bytes(data)
    for verify in (True, False):
        with pytest.raises(TamperedError):
            penstock.load(urls[0], identities=[KEY], options=penstock.Options(verify=verify))
    assert penstock.verify(urls[0]).ok
    second.write_bytes(first_bytes)
    with pytest.raises(CorruptCheckpointError):
        penstock.load(urls[1], identities=[KEY])


def test_a_manifest_that_another_writer_replaced_keeps_its_wraps(bucket, tmp_path):
    url = f"{bucket.url}/both"
    penstock.save(url, state(1, 1000), sealing=SEALING)
    manifest = bucket.files / "both" / "manifest.json"
    stolen = json.loads(manifest.read_text())["wraps"]
    penstock.save(url, state(2, 1000), sealing=SEALING, overwrite=True)
    text = manifest.read_text()
    wraps = json.loads(text)["wraps"]
    manifest.write_text(
        text.replace(
            json.dumps(wraps, separators=(",", ":")), json.dumps(stolen, separators=(",", ":"))
        )
    )
    with pytest.raises(CorruptCheckpointError):
        penstock.load(url, identities=[KEY])
