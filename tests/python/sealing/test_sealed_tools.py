"""Tools on sealed checkpoints: export, import, convert, salvage and explain."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock
from penstock.cli import main
from penstock.errors import (
    CannotSealError,
    CorruptCheckpointError,
    NotSealedError,
    PartialCheckpointError,
    SealedError,
    TamperedError,
)
from sealing.marks import KEY, NAME, NUMBER, OTHER, TEXT, assert_hidden, sealing, tamper

CONFIG = json.dumps({"hidden": TEXT}).encode()


@pytest.fixture
def called(capsys, monkeypatch):
    """Runs a command; returns its exit status and all that it printed."""

    def run(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out + captured.err

    return run


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    tensors = {NAME: torch.full((300,), NUMBER), "b": torch.arange(5)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_bytes(CONFIG)
    return directory


@pytest.fixture
def key(tmp_path):
    (tmp_path / "key.txt").write_text(KEY + "\n")
    return tmp_path / "key.txt"


def test_import_seals_and_export_unseals_when_asked(tmp_path, model, key):
    path = tmp_path / "sealed"
    report = penstock.import_model(model, path, sealing=sealing(), step=4)
    assert report.linked_bytes == 0
    assert_hidden(path)
    for asked in ({}, {"unseal": True}, {"identities": [KEY]}):
        with pytest.raises(SealedError, match="unseal=True and identities="):
            penstock.export(path, tmp_path / "out", **asked)
    with pytest.raises(SealedError):
        penstock.export(path, unseal=True, identities=[KEY])
    assert not (tmp_path / "out").exists()
    penstock.export(path, tmp_path / "out", unseal=True, identities=[KEY])
    assert (tmp_path / "out" / "config.json").read_bytes() == CONFIG
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported[NAME], torch.full((300,), NUMBER))
    tamper(path)
    with pytest.raises(TamperedError):
        penstock.export(path, tmp_path / "again", unseal=True, identities=[KEY])
    assert not (tmp_path / "again").exists()
    penstock.import_model(model, tmp_path / "clear")
    with pytest.raises(NotSealedError):
        penstock.export(tmp_path / "clear", tmp_path / "x", unseal=True, identities=[KEY])


def test_commands_import_and_export(tmp_path, model, key, called):
    path = tmp_path / "sealed"
    assert called("import", model, path, "--recipient", key)[0] == 0
    assert_hidden(path)
    for asked in ((), ("--unseal",), ("--identity", key)):
        code, told = called("export", path, tmp_path / "out", *asked)
        assert code != 0
        assert "--unseal and --identity FILE" in " ".join(told.split())
    code, told = called("export", path, tmp_path / "out", "--unseal", "--identity", key)
    assert code == 0, told
    assert (tmp_path / "out" / "config.json").exists()
    # Secrets do not come from the command line, which other processes see.
    code, told = called("export", path, tmp_path / "x", "--unseal", "--identity", KEY)
    assert code != 0
    assert KEY not in told


def test_conversion_is_sealed(tmp_path, key, called):
    torch.save({NAME: torch.full((300,), NUMBER), "note": TEXT}, tmp_path / "a.pt")
    penstock.convert(tmp_path / "a.pt", tmp_path / "b", sealing=sealing())
    assert called("convert", tmp_path / "a.pt", tmp_path / "c", "--recipient", key)[0] == 0
    for name in "bc":
        assert_hidden(tmp_path / name)
        assert penstock.load(tmp_path / name, identities=[KEY])["note"] == TEXT
    with pytest.raises(CannotSealError):
        penstock.convert(tmp_path / "b", tmp_path / "d", to="megatron", sealing=sealing())
    with pytest.raises(SealedError, match="unseal=True"):
        penstock.convert(tmp_path / "b", tmp_path / "d", to="megatron", identities=[KEY])
    assert not (tmp_path / "d").exists()


def state():
    big = np.full(700_000, NUMBER, "float32")
    return {"a": big, NAME: big + 1, "c": np.arange(5), "note": TEXT}


def flip(path, offset):
    shard = next(path.glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[offset] ^= 1
    shard.write_bytes(data)


def test_salvage_takes_what_opens_and_seals_it_again(tmp_path, key, called):
    path = tmp_path / "bad"
    penstock.save(path, state(), sealing=sealing(), metadata={"of": TEXT}, step=4)
    where = {one.name: one for one in penstock.inspect(path, identities=[KEY]).tensors}
    flip(path, where["a"].begin + 1000)
    explained = penstock.explain(path, identities=[KEY])
    assert [one.name for one in explained.tensors if one.hit] == ["a"]
    with pytest.raises(SealedError):
        penstock.explain(path)
    for asked in ({}, {"identities": [KEY]}, {"unseal": True}, {"sealing": sealing()}):
        with pytest.raises(SealedError):
            penstock.salvage(path, tmp_path / "good", **asked)
    assert not (tmp_path / "good").exists()
    report = penstock.salvage(path, tmp_path / "good", sealing=sealing(), identities=[KEY])
    assert [one.name for one in report.missing] == ["a"]
    assert_hidden(tmp_path / "good")
    with pytest.raises(PartialCheckpointError):
        penstock.load(tmp_path / "good", identities=[KEY])
    found = penstock.load(tmp_path / "good", identities=[KEY], allow_partial=True)
    assert found.keys() == {NAME, "c", "note"}
    assert np.array_equal(found[NAME], state()[NAME])
    assert found["note"] == TEXT
    info = penstock.inspect(tmp_path / "good", identities=[KEY])
    assert info.metadata == {"of": TEXT}
    assert info.step == 4
    assert info.partial
    code, told = called("salvage", path, tmp_path / "plain", "--identity", key)
    assert code != 0
    assert "--unseal" in told
    code, told = called("salvage", path, tmp_path / "plain", "--unseal", "--identity", key)
    assert code == 0, told
    assert penstock.load(tmp_path / "plain", allow_partial=True)["note"] == TEXT
    other = penstock.salvage(
        path, tmp_path / "other", sealing=penstock.Sealing([OTHER]), identities=[KEY]
    )
    assert [one.name for one in other.missing] == ["a"]


def test_salvage_takes_nothing_of_a_chunk_that_was_tampered_with(tmp_path):
    path = tmp_path / "bad"
    penstock.save(path, state(), sealing=sealing())
    tamper(path)
    assert penstock.verify(path).ok
    report = penstock.salvage(path, tmp_path / "good", sealing=sealing(), identities=[KEY])
    hit = {one.name for one in report.missing}
    assert hit
    assert hit != {"a", NAME, "c"}
    assert all("not the one that was sealed" in one.reason for one in report.missing)
    found = penstock.load(tmp_path / "good", identities=[KEY], allow_partial=True)
    for name in found.keys() & {"a", NAME, "c"}:
        assert np.array_equal(found[name], state()[name])
    whole = penstock.salvage(tmp_path / "good", tmp_path / "twice", unseal=True, identities=[KEY])
    assert {one.name for one in whole.missing} == hit


def test_neighbours_in_a_damaged_chunk_are_lost_with_it(tmp_path):
    path = tmp_path / "bad"
    small = {"a": np.ones(2000), "b": np.ones(2000)}
    penstock.save(path, small, sealing=sealing())
    where = {one.name: one for one in penstock.inspect(path, identities=[KEY]).tensors}
    # One byte, which the digest can name: the rest of the chunk does not open without it.
    flip(path, where["a"].begin + 10)
    explained = penstock.explain(path, identities=[KEY])
    assert sorted(one.name for one in explained.tensors if one.hit) == ["a", "b"]
    report = penstock.salvage(path, tmp_path / "good", sealing=sealing(), identities=[KEY])
    assert sorted(one.name for one in report.missing) == ["a", "b"]


def test_salvage_without_the_manifest_or_with_a_clear_one_is_refused(tmp_path):
    path = tmp_path / "bad"
    penstock.save(path, state(), sealing=sealing())
    (path / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="its keys were in the manifest"):
        penstock.salvage(path, tmp_path / "good", unseal=True, identities=[KEY])
    penstock.save(tmp_path / "clear", state())
    with pytest.raises(NotSealedError):
        penstock.salvage(tmp_path / "clear", tmp_path / "good", unseal=True, identities=[KEY])
    penstock.save(tmp_path / "files", state(), files={"config.json": b"{}"})
    with pytest.raises(CannotSealError, match="small files"):
        penstock.salvage(tmp_path / "files", tmp_path / "good", sealing=sealing())
    assert not list((tmp_path / "good").glob("*"))
    sealed = penstock.salvage(tmp_path / "clear", tmp_path / "sealed", sealing=sealing())
    assert not sealed.missing
    assert_hidden(tmp_path / "sealed")


def test_remedies_fit_the_command(tmp_path, key, called):
    penstock.save(tmp_path / "clear", {"a": 1})
    penstock.save(tmp_path / "sealed", state(), sealing=sealing())
    told = " ".join(called("salvage", tmp_path / "sealed", tmp_path / "out")[1].split())
    assert "--recipient KEY" in told
    assert "save without sealing=" not in told
    told = " ".join(called("keys", "list", tmp_path / "clear")[1].split())
    assert "pass no identities" not in told
    assert "is not sealed" in told
    (public,) = sealing().recipients
    told = " ".join(called("keys", "remove", tmp_path / "sealed", public)[1].split())
    assert "keys add" in told
    assert "right form" not in told
