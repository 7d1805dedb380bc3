"""`penstock.import_model`: a checkpoint around existing safetensors files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import penstock
from compare import assert_same
from penstock.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError

INDEX = "model.safetensors.index.json"


def tensors(seed, count=4):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{seed}.{index}.weight": torch.randn(301, 257 + index, generator=generator)
        for index in range(count)
    }


def directory_of(path, shards=2):
    os.mkdir(path)
    files = {}
    for number in range(shards):
        found = {**tensors(number), f"layers.{number}.half": torch.ones(3, dtype=torch.bfloat16)}
        files |= dict.fromkeys(found, f"model-{number}.safetensors")
        save_file(found, path / f"model-{number}.safetensors", metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (path / "config.json").write_text("{}")
    # Another program's file, which no index lists.
    save_file({"other": torch.ones(3)}, path / "consolidated.safetensors")
    return {name: one for number in range(shards) for name, one in tensors(number).items()} | {
        f"layers.{number}.half": torch.ones(3, dtype=torch.bfloat16) for number in range(shards)
    }


def by_name(state):
    return dict(sorted(state.items()))


def test_files_are_digested_and_linked(tmp_path):
    expected = directory_of(tmp_path / "hf")
    seen = []
    report = penstock.import_model(
        tmp_path / "hf", tmp_path / "c", step=3, progress=lambda *at: seen.append(at)
    )
    sizes = [os.path.getsize(tmp_path / "hf" / f"model-{number}.safetensors") for number in (0, 1)]
    assert report.linked_bytes == sum(sizes)
    assert report.tensor_bytes == 0
    assert seen[-1] == (sum(sizes), sum(sizes))
    assert penstock.verify(tmp_path / "c").ok
    state = penstock.load(tmp_path / "c")
    assert_same(by_name(state["model"]), by_name(expected))
    assert (tmp_path / "c" / "config.json").read_text() == "{}"
    index = json.loads((tmp_path / "c" / INDEX).read_text())
    assert set(index["weight_map"]) == set(expected)
    assert {os.stat(tmp_path / "c" / name).st_nlink for name in index["weight_map"].values()} == {2}


def test_it_may_be_exported_again_without_a_copy(tmp_path):
    expected = directory_of(tmp_path / "hf")
    penstock.import_model(tmp_path / "hf", tmp_path / "c")
    report = penstock.export(tmp_path / "c", tmp_path / "out", hard_link=True)
    assert (report.way, report.bytes_written, report.tensors) == ("hard link", 0, len(expected))


def test_a_file_without_an_index_behind_a_link_as_caches_have_them(tmp_path):
    os.mkdir(tmp_path / "blobs")
    os.mkdir(tmp_path / "snapshot")
    save_file(tensors(1), tmp_path / "blobs" / "0123")
    os.symlink("../blobs/0123", tmp_path / "snapshot" / "model.safetensors")
    penstock.import_model(tmp_path / "snapshot", tmp_path / "c", key="base")
    assert_same(by_name(penstock.load(tmp_path / "c")["base"]), by_name(tensors(1)))


def test_damage_after_the_import_is_found(tmp_path):
    directory_of(tmp_path / "hf")
    penstock.import_model(tmp_path / "hf", tmp_path / "c")
    with open(tmp_path / "hf" / "model-1.safetensors", "r+b") as file:
        file.seek(200_000)
        file.write(b"\xff\x00\xff")
    assert not penstock.verify(tmp_path / "c").ok
    with pytest.raises(CorruptCheckpointError):
        penstock.load(tmp_path / "c")


def test_what_cannot_be_imported_is_named_and_nothing_is_made(tmp_path):
    os.mkdir(tmp_path / "empty")
    with pytest.raises(CheckpointNotFoundError, match="no safetensors file"):
        penstock.import_model(tmp_path / "empty", tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError, match="no safetensors file"):
        penstock.import_model(tmp_path / "nothing", tmp_path / "c")
    directory_of(tmp_path / "half")
    os.remove(tmp_path / "half" / "model-1.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"model-1\.safetensors, which is"):
        penstock.import_model(tmp_path / "half", tmp_path / "c")
    directory_of(tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model-0.safetensors", 100_000)
    with pytest.raises(CorruptCheckpointError) as caught:
        penstock.import_model(tmp_path / "cut", tmp_path / "c")
    assert caught.value.file == "model-0.safetensors"
    (tmp_path / "cut" / INDEX).write_text("[]")
    with pytest.raises(CorruptCheckpointError, match="no index"):
        penstock.import_model(tmp_path / "cut", tmp_path / "c")
    os.mkdir(tmp_path / "twice")
    for name in "ab":
        save_file(tensors(1), tmp_path / "twice" / f"{name}.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"is in .*a\.safetensors and in"):
        penstock.import_model(tmp_path / "twice", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_that_is_there_stays(tmp_path):
    directory_of(tmp_path / "hf")
    penstock.import_model(tmp_path / "hf", tmp_path / "c", step=1)
    with pytest.raises(CheckpointExistsError):
        penstock.import_model(tmp_path / "hf", tmp_path / "c", step=2)
    assert penstock.inspect(tmp_path / "c").step == 1


def run(*arguments):
    line = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_commands_say_what_they_did(tmp_path):
    directory_of(tmp_path / "hf")
    done = run("import", tmp_path / "hf", tmp_path / "c", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["tensors"]) == (0, 10)
    done = run("export", tmp_path / "c", tmp_path / "out", "--hard-link", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["way"], found["bytes_written"]) == (0, "hard link", 0)
    done = run("export", tmp_path / "c", tmp_path / "out")
    assert done.returncode == 1
    assert "not empty" in done.stderr
    done = run("export", tmp_path / "c")
    assert "the index lies beside the shards" in done.stdout
    done = run("export", tmp_path / "c", tmp_path / "b", "--dtype", "bfloat16", "--key", "model")
    assert "verified and written" in done.stdout


@pytest.mark.parametrize(
    "header",
    [
        '{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        '{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"__metadata__":3,"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"__metadata__":{"a":NaN},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"w":{"dtype":"F4","shape":[15],"data_offsets":[0,8]}}',
        '{"v":{"dtype":"F32","shape":[9223372036854775808,2,0],"data_offsets":[0,0]},'
        '"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"__metadata__":{"a":"b"}} ,',
    ],
)
def test_files_that_no_reader_takes_are_refused(tmp_path, header):
    os.mkdir(tmp_path / "hf")
    text = header.encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(8)
    (tmp_path / "hf" / "model.safetensors").write_bytes(whole)
    with pytest.raises(CorruptCheckpointError):
        penstock.import_model(tmp_path / "hf", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_an_index_of_other_files_and_the_directory_itself_are_refused(tmp_path):
    directory_of(tmp_path / "hf")
    with pytest.raises(ValueError, match="a directory of its own"):
        penstock.import_model(tmp_path / "hf", tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    index["weight_map"]["zz"] = "model-0.safetensors"
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="do not have zz"):
        penstock.import_model(tmp_path / "hf", tmp_path / "c")


def test_a_file_without_tensors_is_an_empty_model(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    penstock.import_model(tmp_path, tmp_path / "checkpoint")
    assert penstock.load(tmp_path / "checkpoint") == {"model": {}}
    assert penstock.verify(tmp_path / "checkpoint").ok


def test_an_index_that_lists_no_file_is_named_and_is_no_damage(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointNotFoundError, match="lists no file"):
        penstock.import_model(tmp_path, tmp_path / "checkpoint")
