"""Former checkpoints: a reader that knows one of them is shown no older step."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

import penstock
from penstock import _native
from penstock.cli import cli
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    OtherCheckpointError,
    TamperedError,
)
from penstock.sealing import Sealing
from sealed_reader import SealedCheckpoint

pytestmark = pytest.mark.quick

KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32


@pytest.fixture(params=["sealed", "signed", "both"])
def kind(request, tmp_path):
    """Returns the keys of a store that vouches for its steps."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    sealed = {"sealing": Sealing([KEY]), "identities": [KEY]}
    signed = {"sign": private.decode(), "signed_by": public.decode()}
    return {"sealed": sealed, "signed": signed, "both": sealed | signed}[request.param]


SEALED = {"sealing": Sealing([KEY]), "identities": [KEY]}


def state(step):
    return {"w": np.full(3000, step), "step": step}


def save(store, *steps, **options):
    return [store.save(step, state(step), **options).checkpoint_id for step in steps]


def previous(store, step):
    return list(penstock.inspect(store.path(step)).previous)


@pytest.mark.parametrize("way", ["save", "save_async", "lazy"])
def test_each_step_lists_those_before(tmp_path, kind, way):
    store = penstock.CheckpointStore(tmp_path / "store", keep_last=2, **kind)
    ids = []
    for step in range(5):
        if way == "save":
            ids += save(store, step)
        else:
            pending = store.save_async(step, state(step), lazy=way == "lazy")
            ids.append(pending.result().checkpoint_id)
    assert previous(store, 4) == ids[3::-1]
    assert [row.state for row in store.succession()] == ["begins", "follows"]
    reports = []
    for known in (*ids, None):
        assert store.load(not_before=known, report=reports.append)["step"] == 4
    assert reports[0].previous == tuple(ids[3::-1])


def test_another_process_goes_on_with_the_list_of_what_it_loads(tmp_path, kind):
    first = save(penstock.CheckpointStore(tmp_path / "store", **kind), 1, 2)
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    store.load()
    # A look at an older step is no return to it.
    store.load(step=1)
    (third,) = save(store, 3)
    assert previous(store, 3) == first[::-1]
    store.load(step=1)
    save(store, 4)
    assert previous(store, 4) == [third, *first[::-1]]
    # Nothing loaded: what the storage shows.
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    save(store, 5)
    assert previous(store, 5)[1] == third
    assert [row.state for row in store.succession()] == ["begins"] + ["follows"] * 4


def test_a_resumed_training_lists_the_step_that_it_resumed_from(tmp_path, kind):
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    training = penstock.Training(losses=[])
    known = [store.save(step, training).checkpoint_id for step in (1, 2, 3)]
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    assert store.resume(training, not_before=known[2]) == 3
    store.save(4, training)
    assert previous(store, 4) == known[::-1]


def test_an_older_step_is_refused(tmp_path, kind):
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    ids = save(store, 1, 2, 3)
    shutil.rmtree(store.path(3))
    for load in (
        lambda: store.load(not_before=ids[2]),
        lambda: store.load(not_before=ids[2], fallback=True),
        lambda: store.load(step=1, not_before=ids[1]),
        lambda: store.resume(penstock.Training(losses=[]), not_before=ids[2]),
    ):
        with pytest.raises(OtherCheckpointError) as caught:
            load()
        assert caught.value.expected in ids
    assert store.load(not_before=ids[1])["step"] == 2
    assert store.quarantined() == []


def test_an_older_checkpoint_of_the_same_step_is_refused(tmp_path, kind):
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    save(store, 1)
    shutil.copytree(store.path(1), tmp_path / "old")
    (known,) = save(store, 1, overwrite=True)
    shutil.rmtree(store.path(1))
    shutil.move(tmp_path / "old", store.path(1))
    assert store.load()["step"] == 1
    with pytest.raises(OtherCheckpointError):
        store.load(not_before=known)


def test_a_run_that_was_led_back_is_refused(tmp_path, kind):
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    known = save(store, 1, 2, 3)[2]
    shutil.rmtree(store.path(3))
    led_back = penstock.CheckpointStore(tmp_path / "store", **kind)
    led_back.load()
    save(led_back, 3, 4)
    with pytest.raises(OtherCheckpointError):
        store.load(not_before=known)


@pytest.mark.parametrize("before", ["saved", "looked"])
def test_a_run_that_was_led_back_in_one_store_is_refused(tmp_path, kind, before):
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    training = penstock.Training(losses=[])
    ids = [store.save(step, training).checkpoint_id for step in (1, 2, 3)]
    if before == "looked":
        store = penstock.CheckpointStore(tmp_path / "store", **kind)
        store.load()
    shutil.rmtree(store.path(3))
    assert store.resume(training) == 2
    store.load(1)
    store.save(4, training)
    assert previous(store, 4) == ids[1::-1]
    reader = penstock.CheckpointStore(tmp_path / "store", **kind)
    with pytest.raises(OtherCheckpointError):
        reader.load(not_before=ids[2])
    assert reader.load(not_before=ids[1]) is not None


def test_a_store_without_steps_is_no_new_run(tmp_path, kind):
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    (known,) = save(store, 1)
    shutil.rmtree(store.path(1))
    with pytest.raises(CheckpointNotFoundError):
        store.resume(penstock.Training(losses=[]), not_before=known)
    assert store.resume(penstock.Training(losses=[])) is None


def test_damage_leads_no_further_back_than_the_known_step(tmp_path, kind):
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    ids = save(store, 1, 2, 3)
    os.truncate(min(Path(store.path(3)).glob("shard-*")), 100)
    with pytest.warns(penstock.errors.PenstockWarning), pytest.raises(OtherCheckpointError):
        store.load(fallback=True, not_before=ids[2])
    assert store.quarantined() == []
    with pytest.warns(penstock.errors.PenstockWarning):
        assert store.load(fallback=True, not_before=ids[1])["step"] == 2
    # The next save follows the step that was loaded.
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    store.load()
    save(store, 3)
    assert previous(store, 3) == [ids[1], ids[0]]


def test_a_changed_list_is_tampering(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store", **SEALED)
    first, _ = save(store, 1, 2)
    manifest = Path(store.path(2)) / "manifest.json"
    text = manifest.read_bytes().replace(first.encode(), b"f" * 32)
    digest = penstock_digest(text[:-40])
    manifest.write_bytes(text[:-40] + f',"digest":"crc64nvme:{digest:016x}"}}\n'.encode())
    with pytest.raises(TamperedError):
        store.load(not_before="f" * 32)


def penstock_digest(text):
    """CRC-64/NVME, bit by bit."""
    crc = (1 << 64) - 1
    for byte in text:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (1 << 64) - 1


def test_a_list_is_bounded(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store", keep_last=1, **SEALED)
    ids = save(store, *range(_native.PREVIOUS_MAX + 3))
    newest = _native.PREVIOUS_MAX + 2
    assert previous(store, newest) == ids[-2:1:-1]
    assert store.load(not_before=ids[2])["step"] == newest
    with pytest.raises(OtherCheckpointError):
        store.load(not_before=ids[1])


def test_a_failed_save_leaves_the_list_as_it_was(tmp_path, kind):
    store = penstock.CheckpointStore(tmp_path / "store", **kind)
    (first,) = save(store, 1)
    with pytest.raises(CheckpointExistsError):
        save(store, 1)
    save(store, 2)
    assert previous(store, 2) == [first]


def test_steps_that_nobody_vouches_for_list_nothing(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    (known,) = save(store, 1)
    save(store, 2)
    assert "previous" not in json.loads(Path(store.path(2), "manifest.json").read_text())
    with pytest.raises(ValueError, match="neither sealed nor signed"):
        store.load(not_before=known)
    for wrong, error in ((3, TypeError), ("3", ValueError), (known.upper(), ValueError)):
        with pytest.raises(error, match="not_before"):
            store.load(not_before=wrong)


def test_gaps_and_breaks_are_told(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store", **SEALED)
    save(store, 1, 2, 3, 4, 5)
    store.delete(2)
    # An older run of the same step.
    other = penstock.CheckpointStore(tmp_path / "other", **SEALED)
    save(other, 4)
    shutil.rmtree(store.path(4))
    shutil.move(other.path(4), store.path(4))
    rows = {row.step: row.state for row in store.succession()}
    assert rows == {1: "begins", 3: "gap", 4: "begins", 5: "breaks"}
    result = CliRunner().invoke(cli, ["verify", store.root])
    assert result.exit_code == 0, result.output
    assert "step 3 follows step 1; 1 between were deleted or failed" in result.output
    assert "step 5 does not list step 4" in " ".join(result.output.split())
    shown = CliRunner().invoke(cli, ["verify", store.root, "--json"])
    states = [row["state"] for row in json.loads(shown.output)["succession"]]
    assert states == ["begins", "gap", "begins", "breaks"]
    ids = [row.checkpoint_id for row in store.succession()]
    shown = CliRunner().invoke(cli, ["inspect", store.path(3)])
    assert "follows" in shown.output
    assert "and 1 before" in shown.output
    listed = json.loads(CliRunner().invoke(cli, ["ls", store.root, "--json"]).output)
    assert listed["steps"][1]["previous"][-1] == ids[0]


def test_another_reader_sees_the_list_under_the_mac(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store", **SEALED)
    ids = save(store, 1, 2, 3)
    (wrap,) = json.loads(Path(store.path(3), "manifest.json").read_text())["wraps"]
    data_key = aes_key_unwrap(bytes.fromhex("5e" * 32), base64.b64decode(wrap["key"]))
    read = SealedCheckpoint(Path(store.path(3)), data_key)
    assert read.manifest["previous"] == ids[1::-1]


def test_recipients_change_and_lists_stay(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store", **SEALED)
    first, _ = save(store, 1, 2)
    other = "PENSTOCK-SECRET-KEY-1" + "77" * 32
    penstock.sealing.add_recipients(store.path(2), [other], identities=[KEY])
    assert store.load(not_before=first)["step"] == 2
    store = penstock.CheckpointStore(tmp_path / "store", identities=[other])
    assert store.load(step=2, not_before=first)["step"] == 2
