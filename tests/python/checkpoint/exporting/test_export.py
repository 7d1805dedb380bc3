"""`penstock.export`: a checkpoint's model as a directory that other libraries load."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import penstock
from compare import assert_same
from penstock.checkpoint.exporting import job
from penstock.checkpoint.exporting.apart import box_of
from penstock.cli import cli
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)

GROUPS = {"model": ""}


def gpt2():
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16, bos_token_id=1)
    )


def llama():
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=100))


def mixtral():
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, vocab_size=100, num_local_experts=3))


def saved(root, model, *, key="model", groups=None, shard_bytes=None):
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(root / "config")
    state = {key: model.state_dict(), "optimizer": {"m": torch.randn(9)}, "step": 3}
    options = penstock.Options(shard_bytes=shard_bytes)
    penstock.save(root / "c", state, groups=groups, files=root / "config", options=options)
    return root / "c"


def weights(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            for name in opened.keys():  # noqa: SIM118
                assert name not in found
                found[name] = opened.get_tensor(name)
    return dict(sorted(found.items()))


def assert_is(directory, model, **changes):
    loaded = AutoModelForCausalLM.from_pretrained(directory, **changes)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


@pytest.fixture(params=["hard link", "copy"])
def way(request):
    return request.param


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("shard_bytes", [None, 30_000])
def test_a_group_is_given_names_or_copied(tmp_path, make, shard_bytes, way):
    model = make()
    path = saved(tmp_path, model, groups=GROUPS, shard_bytes=shard_bytes)
    report = penstock.export(
        path, tmp_path / "out", hard_link=way == "hard link", shard_bytes=shard_bytes or 10**9
    )
    if report.way == "copy":
        assert report.bytes_written == report.tensor_bytes
    else:
        assert report.bytes_written == 0
    assert report.way in (way, "reflink")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(report.files)
    assert ("model.safetensors.index.json" in report.files) == (shard_bytes is not None)
    assert_is(tmp_path / "out", model)
    assert penstock.verify(path).ok


@pytest.mark.parametrize("key", ["model", "module", "net.inner"])
def test_what_was_saved_without_groups_is_written_anew(tmp_path, key):
    model = llama()
    model.config.save_pretrained(tmp_path / "config")
    state = {key: model.state_dict()}
    if "." in key:
        outer, inner = key.split(".")
        state = {outer: {inner: model.state_dict()}, "other": {"model_free": torch.ones(2)}}
    penstock.save(tmp_path / "c", state, files=tmp_path / "config")
    chosen = {"key": key} if "." in key else {}
    seen = []
    report = penstock.export(
        tmp_path / "c",
        tmp_path / "out",
        memory_bytes=40_000,
        shard_bytes=20_000,
        progress=lambda *at: seen.append(at),
        **chosen,
    )
    assert report.way == "copy"
    assert len([name for name in report.files if name.endswith(".safetensors")]) > 3
    assert seen[-1] == (report.tensor_bytes, report.tensor_bytes)
    assert_is(tmp_path / "out", model)


def test_a_state_of_tensors_alone_is_the_model(tmp_path):
    model = gpt2()
    penstock.save(tmp_path / "c", model.state_dict())
    penstock.export(tmp_path / "c", tmp_path / "out")
    expected = {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}
    assert_same(weights(tmp_path / "out"), dict(sorted(expected.items())))


def test_types_are_cast_and_the_configuration_says_so(tmp_path):
    model = llama()
    path = saved(tmp_path, model, groups=GROUPS)
    report = penstock.export(path, tmp_path / "out", dtype="bfloat16", hard_link=True)
    assert report.way == "copy"
    assert_is(tmp_path / "out", model.to(torch.bfloat16), dtype="auto")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    same = penstock.export(path, tmp_path / "same", dtype=torch.float32, hard_link=True)
    assert same.way == "hard link"
    with pytest.raises(ValueError, match="dtype"):
        penstock.export(path, tmp_path / "other", dtype="int8")


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_experts_are_taken_apart_as_they_are_published(tmp_path, groups):
    model = mixtral()
    path = saved(tmp_path, model, groups=groups)
    model.save_pretrained(tmp_path / "theirs")
    report = penstock.export(path, tmp_path / "out", memory_bytes=60_000, hard_link=True)
    # Works with little memory: the output is planned before anything is read.
    assert (report.way, report.files[0]) == ("copy", "model.safetensors")
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "theirs"))
    assert_is(tmp_path / "out", model)
    fused = penstock.export(path, tmp_path / "fused", hard_link=True, unfuse=False)
    assert fused.way == ("copy" if groups is None else "hard link")
    assert_is(tmp_path / "fused", model)


def test_where_in_a_tensor_a_view_of_it_lies():
    whole = torch.arange(60).view(3, 1, 4, 5)
    parts = [whole, whole[1], whole[1:3], whole[2, :, 1:3], whole[..., 2:4], whole[1, 0, 2]]
    for part in [*parts, whole[0, 0, 1:2, 3]]:
        box = box_of(whole.shape, part.storage_offset(), part.shape, part.stride())
        found = whole
        for axis, (start, size) in enumerate(zip(*box, strict=True)):
            found = found.narrow(axis, start, size)
        assert torch.equal(found.reshape(part.shape), part)
    empty = torch.empty(2, 0, 3)
    assert box_of(empty.shape, 0, empty.shape, empty.stride()) == ((0, 0, 0), (2, 0, 3))
    for part in (whole.mT, whole[::2], whole[..., ::2], whole[:1].expand(3, 1, 4, 5)):
        assert box_of(whole.shape, part.storage_offset(), part.shape, part.stride()) is None


def test_in_place_puts_copies_back(tmp_path):
    model = gpt2()
    path = saved(tmp_path, model, groups=GROUPS)
    os.remove(path / "model.safetensors.index.json")
    os.remove(path / "config.json")
    report = penstock.export(path)
    assert (report.way, report.bytes_written) == ("in place", 0)
    assert_is(path, model)
    os.mkdir(tmp_path / "other")
    plain = saved(tmp_path / "other", model)
    with pytest.raises(StateMismatchError, match="no index of its own"):
        penstock.export(plain)


def test_unknown_and_missing_tensors_are_named(tmp_path):
    model = llama()
    state = {"model": {**model.state_dict(), "extra.weight": torch.ones(3)}}
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "config")
    penstock.save(tmp_path / "c", state, groups=GROUPS, files=tmp_path / "config")
    with pytest.raises(StateMismatchError, match=r"has no extra\.weight") as caught:
        penstock.export(tmp_path / "c", tmp_path / "out", hard_link=True)
    assert caught.value.key == "extra.weight"
    penstock.export(tmp_path / "c", tmp_path / "out", check=False)
    del state["model"]["extra.weight"], state["model"]["model.norm.weight"]
    penstock.save(tmp_path / "d", state, files=tmp_path / "config")
    with pytest.raises(StateMismatchError, match=r"has model\.norm\.weight, and"):
        penstock.export(tmp_path / "d", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_exported_is_named_and_nothing_is_made(tmp_path):
    path = saved(tmp_path, gpt2(), key="net", groups={"net": "policy"})
    out = tmp_path / "out"
    for wrong, match in [
        ({"group": "value"}, "no group 'value': it has 'policy'"),
        ({"key": "nett"}, "no tensors below 'nett'"),
        ({}, "name them with --key; the state has net, optimizer"),
    ]:
        with pytest.raises(StateMismatchError, match=match):
            penstock.export(path, out, **wrong)
    with pytest.raises(ValueError, match="one of them"):
        penstock.export(path, out, group="policy", key="net")
    for name in ("shard_bytes", "memory_bytes"):
        with pytest.raises(TypeError, match=f"{name}='5GB': must be an int"):
            penstock.export(path, out, group="policy", **{name: "5GB"})
        with pytest.raises(ValueError, match=f"{name}=0"):
            penstock.export(path, out, group="policy", **{name: 0})
    with pytest.raises(CheckpointNotFoundError):
        penstock.export(tmp_path / "nothing", out)
    penstock.export(path, out, group="policy")
    with pytest.raises(CheckpointExistsError, match="not empty"):
        penstock.export(path, out, group="policy")
    assert sorted(os.listdir(tmp_path)) == ["c", "config", "out"]


def test_a_directory_that_appears_meanwhile_is_left_alone(tmp_path):
    path = saved(tmp_path, gpt2())

    def somebody_else(done_bytes, total_bytes):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "notes").write_text("mine")

    with pytest.raises(CheckpointExistsError, match="out is there and not empty"):
        penstock.export(path, tmp_path / "out", progress=somebody_else)
    assert sorted(os.listdir(tmp_path)) == ["c", "config", "out"]
    assert (tmp_path / "out" / "notes").read_text() == "mine"


def test_damage_is_an_error_and_leaves_nothing(tmp_path):
    path = saved(tmp_path, gpt2())
    shard = max(path.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        penstock.export(path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["c", "config"]


def test_a_directory_without_a_configuration_is_said_to_lack_it(tmp_path):
    """from_pretrained refuses such a directory, though all its tensors are right."""
    model = gpt2()
    penstock.save(tmp_path / "ckpt", {"model": model.state_dict()})
    report = penstock.export(tmp_path / "ckpt", tmp_path / "bare")
    assert report.missing == ("config.json",)
    assert "files= (--files)" in str(report)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "bare")
    command = ["export", str(tmp_path / "ckpt"), str(tmp_path / "told")]
    told = " ".join(CliRunner().invoke(cli, command).output.split())
    assert "config.json is missing" in told
    assert "--files" in told
    model.config.save_pretrained(tmp_path / "configs")
    report = penstock.export(tmp_path / "ckpt", tmp_path / "out", files=tmp_path / "configs")
    assert report.missing == ()
    assert "missing" not in str(report)
    assert_is(tmp_path / "out", model)


def test_files_given_take_the_place_of_those_saved(tmp_path):
    path = saved(tmp_path, gpt2(), groups=GROUPS)
    report = penstock.export(
        path, tmp_path / "out", files={"tokenizer.json": b"{}"}, hard_link=True
    )
    assert report.files == ("model.safetensors", "tokenizer.json")


def test_windows_arrays_and_ties_come_as_tensors_of_their_own(tmp_path):
    w = torch.arange(12.0).view(3, 4)
    state = {"w": w, "t": w.t(), "same": w, "rows": w[1:2], "array": np.arange(3.0)}
    penstock.save(tmp_path / "c", {"model": state})
    penstock.export(tmp_path / "c", tmp_path / "out")
    expected = {"array": torch.arange(3.0).double(), "rows": w[1:2], "t": w.t(), "w": w}
    found = weights(tmp_path / "out")
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_where_blocks_are_shared_nothing_is_written(tmp_path, monkeypatch):
    path = saved(tmp_path, gpt2(), groups=GROUPS)

    def share(source, target):
        # Stands in for a reflink: the copy has the same content.
        Path(target).write_bytes(Path(source).read_bytes())
        return True

    monkeypatch.setattr(job, "reflink", share)
    report = penstock.export(path, tmp_path / "out")
    assert (report.way, report.bytes_written) == ("reflink", 0)


def names_of(directory):
    return list(weights(directory))


@pytest.mark.parametrize("hard_link", [False, True])
def test_of_a_group_nothing_is_left_out_and_nothing_added(tmp_path, hard_link):
    """For any key of the group, and for ties inside and outside of it."""
    w, a, b = torch.arange(4.0), torch.ones(2), torch.zeros(3)
    states = [
        ({"module": {"w": w}, "optimizer": {"m": a}}, {"module": ""}, ["w"]),
        ({"ema": {"z": w}, "model": {"w": w, "b": a}}, {"model": ""}, ["b", "w"]),
        (
            {"ema": {"w": w, "b": a}, "model": {"w": w, "b": b}},
            {"model": "", "ema": "average"},
            ["b", "w"],
        ),
        ({"x": w, "model": {"w": w, "b": b}, "z": {"w": w}}, {"model": ""}, ["b", "w"]),
        ({"model": {"w": w, "part": w[:2], "e": torch.zeros(0, 4)}}, {"model": ""}, None),
        ({"buffer": w, "model": {"part": w[:2], "b": b}}, {"model": ""}, ["b", "part"]),
        ({"model": {"w": w, "extra": b"x" * 5000}}, {"model": ""}, ["w"]),
    ]
    for number, (state, groups, expected) in enumerate(states):
        path, out = tmp_path / f"c{number}", tmp_path / f"out{number}"
        penstock.save(path, state, groups=groups)
        assert penstock.verify(path).ok
        penstock.export(path, out, hard_link=hard_link)
        assert names_of(out) == (expected or ["e", "part", "w"])
        key = next(key for key, group in groups.items() if not group)
        for name, tensor in weights(out).items():
            assert torch.equal(tensor, state[key][name])
    penstock.export(tmp_path / "c2", tmp_path / "average", group="average", hard_link=hard_link)
    assert_same(weights(tmp_path / "average"), {"b": a, "w": w})


def test_small_files_are_verified_before_they_are_exported(tmp_path):
    path = saved(tmp_path, gpt2(), groups=GROUPS)
    (kept,) = path.glob("beside.*.config.json")
    good = kept.read_bytes()
    kept.write_bytes(b"X" + good[1:])
    for out in (None, tmp_path / "out"):
        with pytest.raises(CorruptCheckpointError) as caught:
            penstock.export(path, out)
        assert caught.value.file == kept.name
    assert (path / "config.json").read_bytes() == good
    os.remove(kept)
    os.symlink("/etc/hostname", kept)
    with pytest.raises(StorageError):
        penstock.export(path)


def test_names_and_types_that_files_of_models_cannot_have(tmp_path):
    with pytest.raises(UnsupportedStateError, match="__metadata__"):
        penstock.save(tmp_path / "a", {"model": {"__metadata__": torch.ones(2)}}, groups=GROUPS)
    penstock.save(tmp_path / "b", {"model": {"\ud800x": torch.ones(2)}})
    penstock.export(tmp_path / "b", tmp_path / "out")
    assert names_of(tmp_path / "out") == ["\\ud800x"]
    penstock.save(tmp_path / "c", {"model": {"w": torch.ones(2, dtype=torch.complex128)}})
    with pytest.raises(StateMismatchError, match="complex128"):
        penstock.export(tmp_path / "c", tmp_path / "other")
    with pytest.raises(ValueError, match="in place nothing"):
        penstock.export(tmp_path / "c", dtype="bfloat16")
    files = {"model.safetensors.index.json": b"{}"}
    with pytest.raises(ValueError, match="leave it out"):
        penstock.save(tmp_path / "d", {"model": {"w": torch.ones(2)}}, groups=GROUPS, files=files)
