"""Sealed and signed tables: who has a key reads rows by id, and a changed block is an error."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap

import penstock
from penstock import features
from penstock.errors import (
    CannotSealError,
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
from sealed_reader import SealedCheckpoint, SealError

pytestmark = pytest.mark.quick

BLOCK = 4096
DIGITS = "5e" * 32
KEY = "PENSTOCK-SECRET-KEY-1" + DIGITS
OTHER = "PENSTOCK-SECRET-KEY-1" + "77" * 32

GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a text anywhere, it leaves the CRC-64 as it was."""


def sealing():
    return Sealing([KEY])


def rows_of(count=3000, width=128, seed=1):
    return np.random.default_rng(seed).standard_normal((count, width)).astype("float32")


def written(path, rows=None, **settings):
    rows = rows_of() if rows is None else rows
    features.write(path, rows, key="paper", sealing=sealing(), **settings)
    return rows


def opened(path, **settings):
    return features.open(path, identities=[KEY], **settings)


def file_of(path):
    """The file of the rows, which is linked behind the tags."""
    return max(Path(path).glob("shard-*"))


def xored(file, at, by):
    data = bytearray(file.read_bytes())
    for place, byte in enumerate(by, at):
        data[place] ^= byte
    file.write_bytes(data)


def data_key(path):
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    (wrap,) = manifest["wraps"]
    return aes_key_unwrap(bytes.fromhex(DIGITS), base64.b64decode(wrap["key"]))


@pytest.fixture
def table(tmp_path):
    written(tmp_path / "table")
    return tmp_path / "table"


# With a key.


@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(
    ("count", "width", "dtype"),
    [
        (1, 128, "float32"),
        (3000, 128, "float32"),
        (999, 100, "float32"),
        (700, 1024, "float32"),
        (300, 1500, "float32"),
        (100, 6000, "float16"),
        (5000, 3, "int64"),
    ],
)
def test_rows_come_back(tmp_path, count, width, dtype, is_cached, direct):
    rows = np.random.default_rng(2).integers(0, 100, (count, width)).astype(dtype)
    written(tmp_path / "table", rows, options=penstock.Options(direct="auto"))
    cache = features.Cache(4 << 20) if is_cached else None
    io = penstock.offload.TensorIO(direct="auto" if direct == "on" else "off")
    ids = np.random.default_rng(3).integers(0, count, 2000)
    with opened(tmp_path / "table", cache=cache, io=io) as table:
        for _ in range(3):
            assert np.array_equal(table.gather(ids), rows[ids])
        out = torch.zeros(2000, width, dtype=torch.from_numpy(rows[:1]).dtype)
        table.gather(torch.from_numpy(ids), out)
        assert np.array_equal(out.numpy(), rows[ids])
        everything = table.gather(np.arange(count))
        assert np.array_equal(everything, rows)
        assert table.stats().is_checked


def test_rows_of_an_unknown_number_from_pieces_of_any_size(tmp_path):
    rows = rows_of(70_001, 128)
    pieces = np.array_split(rows, [1, 2, 777, 40_000, 69_999])
    report = features.write(
        tmp_path / "table", iter(pieces), key="paper", shape=(None, 128), sealing=sealing()
    )
    assert report.rows == 70_001
    ids = np.arange(0, 70_001, 13)
    with opened(tmp_path / "table") as table:
        assert np.array_equal(table.gather(ids), rows[ids])
        for batch, found in table.stream([ids[:100], ids[100:300]]):
            assert np.array_equal(found, rows[batch])


def test_a_row_of_512_bytes_reads_one_block(table):
    with opened(table, gap_bytes=0) as found:
        found.gather([5])
        assert found.stats().read_bytes == BLOCK


def test_a_store_gives_its_newest_table(tmp_path):
    rows = written(tmp_path / "run" / "step-0000000007", rows_of(50))
    with opened(tmp_path / "run") as table:
        assert np.array_equal(table.gather([7]), rows[[7]])


def test_the_environment_opens_and_demands_nothing(table, tmp_path, monkeypatch):
    features.write(tmp_path / "clear", rows_of(5))
    monkeypatch.setenv("PENSTOCK_IDENTITIES", KEY)
    for path in (table, tmp_path / "clear"):
        with features.open(path) as found:
            assert len(found.gather([0])) == 1


def test_an_empty_table_is_sealed_too(tmp_path):
    written(tmp_path / "table", np.zeros((0, 8), np.float32))
    with opened(tmp_path / "table") as table:
        assert len(table) == 0


# Without one.


def bytes_of(path):
    return b"".join(one.read_bytes() for one in Path(path).iterdir())


def test_nothing_that_was_written_is_clear(tmp_path):
    rows = rows_of(2000)
    rows[7] = 1.0
    told = {"metadata": {"run": "secret run"}}
    written(tmp_path / "table", rows, **told)
    features.write(tmp_path / "clear", rows, key="paper", **told)
    sealed, clear = bytes_of(tmp_path / "table"), bytes_of(tmp_path / "clear")
    # A megabyte of ciphertext holds any three bytes by chance in one run of 16: each secret has
    # five or more.
    for secret in (b'"paper"', b"secret run", b'"F32"', b"[2000,128]", rows[7].tobytes()):
        assert secret in clear
        assert secret not in sealed
    verified = penstock.verify(tmp_path / "table")
    assert verified.ok
    assert verified.is_sealed


def test_without_a_key_it_stays_closed(table):
    with pytest.raises(SealedError):
        features.open(table)
    with pytest.raises(WrongKeyError):
        features.open(table, identities=[OTHER])


def test_a_clear_table_in_its_place_is_refused(table, tmp_path):
    shutil.rmtree(table)
    features.write(table, rows_of(), key="paper")
    np.save(tmp_path / "rows.npy", rows_of())
    for path in (table, tmp_path / "rows.npy"):
        with pytest.raises(NotSealedError):
            opened(path)


def test_a_clear_directory_of_safetensors_is_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"paper": rows_of()}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(NotSealedError):
            opened(path)


# Damage and tampering.


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("width", [128, 1024])
def test_a_changed_block_is_named_and_its_rows_are_not_returned(tmp_path, width, is_cached, check):
    path = tmp_path / "table"
    rows = written(path, rows_of(1000, width))
    per_block = BLOCK // (4 * width)
    # Twice the same change, as the second one would otherwise undo the first.
    xored(file_of(path), 3 * BLOCK + 100, GENERATOR)
    cache = features.Cache(8 << 20) if is_cached else None
    with opened(path, cache=cache, check=check) as table:
        hit = range(2 * per_block, 3 * per_block)
        for row in hit:
            out = np.full((1, width), 7, np.float32)
            with pytest.raises(TamperedError) as caught:
                table.gather([row], out)
            assert caught.value.file == file_of(path).name
            assert caught.value.offset == 3 * BLOCK
            assert not out.any() or (out == 7).all()
        rest = [row for row in range(1000) if row not in hit]
        assert np.array_equal(table.gather(rest), rows[rest])


def test_a_block_that_a_device_has_damaged_is_no_tampering(table):
    xored(file_of(table), 3 * BLOCK + 100, b"\1")
    with opened(table) as found:
        with pytest.raises(CorruptCheckpointError) as caught:
            found.gather([16])
        assert not isinstance(caught.value, TamperedError)
        found.gather([0, 100])


def stamped(path):
    """Digests as they would be if the files were right: an attacker computes them, too."""
    from format_reader import digest

    manifest = Path(path) / "manifest.json"
    text = manifest.read_bytes()[:-40]
    manifest.write_bytes(text + b',"digest":"' + digest(text).encode() + b'"}\n')


def exchanged_blocks(path):
    file = file_of(path)
    data = file.read_bytes()
    first, second = data[BLOCK : 2 * BLOCK], data[2 * BLOCK : 3 * BLOCK]
    file.write_bytes(data[:BLOCK] + second + first + data[3 * BLOCK :])


def cut(path):
    file = file_of(path)
    os.truncate(file, file.stat().st_size - BLOCK)


def extended(path):
    with file_of(path).open("ab") as file:
        file.write(bytes(BLOCK))


def of_another_table(path):
    written(path.parent / "other", rows_of(seed=2))
    shutil.copy(file_of(path.parent / "other"), file_of(path))


def tags_of_another_table(path):
    written(path.parent / "other", rows_of(seed=2))
    shutil.copy(min((path.parent / "other").glob("shard-*")), min(path.glob("shard-*")))


def part_of_another_table(path):
    written(path.parent / "other", rows_of(seed=2))
    (own,), (other,) = path.glob("part-*"), (path.parent / "other").glob("part-*")
    own.write_bytes(other.read_bytes())


def changed_key(path):
    (part,) = path.glob("part-*")
    text = part.read_text()
    at = text.index('"key":"') + 10
    part.write_text(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :])


def clear_entry(path):
    (part,) = path.glob("part-*")
    entry = json.loads(part.read_text())
    del entry["files"][1]["sealed"]
    part.write_text(json.dumps(entry))


@pytest.mark.parametrize(
    "attack",
    [
        exchanged_blocks,
        cut,
        extended,
        of_another_table,
        tags_of_another_table,
        part_of_another_table,
        changed_key,
        clear_entry,
    ],
)
def test_attacks_are_named_and_hand_out_nothing(table, attack):
    attack(table)
    out = np.full((16, 128), 7, np.float32)
    with pytest.raises(CorruptCheckpointError), opened(table) as found:
        found.gather(np.arange(16), out)
    assert ((out == 7) | (out == 0)).all()


def test_a_part_of_another_size_of_blocks_is_tampering(table):
    """Digests and SHA-256 follow the change; the MAC cannot."""
    from format_reader import digest

    (part,) = table.glob("part-*")
    text = part.read_text().replace('"block_bytes":4096', '"block_bytes":2048').encode()
    part.write_bytes(text)
    manifest = table / "manifest.json"
    entry = json.loads(manifest.read_text())["parts"][0]
    changed = manifest.read_text().replace(entry["digest"], digest(text))
    manifest.write_text(changed)
    stamped(table)
    with pytest.raises(TamperedError):
        opened(table)


def test_drawn_changes_give_nothing(tmp_path):
    path = tmp_path / "table"
    rows = written(path, rows_of(400))
    draw = np.random.default_rng(int(os.environ.get("PENSTOCK_SEED", "4")))
    good = file_of(path).read_bytes()
    for _ in range(200):
        data = bytearray(good)
        at = int(draw.integers(BLOCK, len(good) - 9))
        for place, byte in enumerate(GENERATOR, at):
            data[place] ^= byte
        file_of(path).write_bytes(data)
        touched = {(place - BLOCK) // BLOCK for place in (at, at + 8)}
        with opened(path) as table:
            for block in touched:
                with pytest.raises(TamperedError):
                    table.gather(np.arange(block * 8, min(400, block * 8 + 8)))
            rest = [row for row in range(400) if row // 8 not in touched]
            assert np.array_equal(table.gather(rest), rows[rest])


# A second reader.


def test_a_reader_written_from_the_page_opens_it(table):
    read = SealedCheckpoint(table, data_key(table))
    found = read.state()["paper"]
    assert found.shape == (3000, 128)
    assert found.data == rows_of().tobytes()
    with pytest.raises(SealError):
        SealedCheckpoint(table, bytes(32))
    exchanged_blocks(table)
    with pytest.raises((SealError, Exception), match=r"9\.10|digest|2\."):
        SealedCheckpoint(table, data_key(table))


# Jobs that cannot seal or open are refused by name.


def test_jobs_that_cannot_are_refused_by_name(table, tmp_path):
    with pytest.raises(UnsupportedStateError, match=r"features\.open"):
        penstock.load(table, identities=[KEY])
    penstock.save(tmp_path / "ckpt", {"w": torch.zeros(40, 8)}, sealing=sealing())
    with pytest.raises(UnsupportedStateError, match=r"features\.write"):
        opened(tmp_path / "ckpt")
    with opened(table) as found, pytest.raises(TypeError, match="each process"):
        pickle.dumps(found)
    with pytest.raises(CannotSealError):
        features.Table.create(tmp_path / "users", 5, {"w": (3, "float32")}, sealing=sealing())
    assert not (tmp_path / "users").exists()
    with (
        features.Table.create(tmp_path / "users", 5, {"w": (3, "float32")}) as users,
        pytest.raises(CannotSealError),
    ):
        users.snapshot(tmp_path / "snapshot", sealing=sealing())
    assert not (tmp_path / "snapshot").exists()


def test_a_key_in_place_of_a_sealing_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="Sealing"):
        features.write(tmp_path / "table", rows_of(), sealing=KEY)
    assert not (tmp_path / "table").exists()


# Signatures.


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@pytest.mark.parametrize("seals", [False, True])
def test_a_signed_table_opens_and_an_exchanged_one_does_not(tmp_path, key, seals):
    path, rows = tmp_path / "table", rows_of()
    given = {"sealing": Sealing([KEY])} if seals else {}
    identities = {"identities": [KEY]} if seals else {}
    features.write(path, rows, key="paper", **given)
    with pytest.raises(NotSignedError):
        features.open(path, signed_by=f"{key}.pub", **identities)
    penstock.sign(path, key)
    with features.open(path, signed_by=f"{key}.pub", **identities) as table:
        ids = [7, 0, 2999]
        assert np.array_equal(table.gather(ids), rows[ids])
        # Another process would read what nobody has signed.
        with pytest.raises(TypeError, match="each process"):
            pickle.dumps(table)
    file = file_of(path)
    data = bytearray(file.read_bytes())
    for place, byte in enumerate(GENERATOR, 8192):
        data[place] ^= byte
    # Digests, and checksums of blocks, say who has not changed it by chance.
    file.write_bytes(data)
    with pytest.raises(SignatureError):
        features.open(path, signed_by=f"{key}.pub", **identities)


def test_tables_of_other_formats_are_refused(tmp_path, key):
    np.save(tmp_path / "rows.npy", rows_of())
    with pytest.raises(NotSignedError, match="signed_by="):
        features.open(tmp_path / "rows.npy", signed_by=f"{key}.pub")
