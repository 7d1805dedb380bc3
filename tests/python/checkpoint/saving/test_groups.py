"""Groups: tensors in shards of their own, with the names and the extra files of a model."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import penstock
from compare import assert_same
from penstock.checkpoint.saving.wrappers import final_names
from penstock.errors import StorageError, UnsupportedStateError

INDEX = "model.safetensors.index.json"
GROUPS = {"model": ""}


def make_model():
    torch.manual_seed(3)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16)
    return GPT2LMHeadModel(config)


def make_state(model):
    moments = {name: torch.randn(value.shape) for name, value in model.named_parameters()}
    return {"moments": moments, "model": model.state_dict(), "step": 7}


def weights_by_vllms_rules(directory):
    """Loads a directory by vLLM's rules: all tensors of the files in the index."""
    files = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
    found = {}
    for path in directory.glob("*.safetensors"):
        if path.name in files:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    assert name not in found
                    found[name] = opened.get_tensor(name)
    return dict(sorted(found.items()))


def assert_loads(directory, model):
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    # GPT-2's head is tied to its embedding, and readers know that.
    expected = {**model.state_dict()}
    del expected["lm_head.weight"]
    assert_same(weights_by_vllms_rules(directory), dict(sorted(expected.items())))


@pytest.mark.parametrize("how", ["save", "store", "eager", "lazy"])
@pytest.mark.parametrize("shard_bytes", [None, 40_000])
def test_the_directory_is_that_of_a_model(tmp_path, how, shard_bytes):
    model = make_model()
    model.config.save_pretrained(tmp_path / "config")
    options = penstock.Options(shard_bytes=shard_bytes)
    given = {"groups": GROUPS, "files": tmp_path / "config"}
    state, path = make_state(model), tmp_path / "store" / "step-0000000001"
    if how == "save":
        report = penstock.save(path, state, options=options, **given)
    else:
        with penstock.CheckpointStore(tmp_path / "store", options=options) as store:
            if how == "store":
                report = store.save(1, state, **given)
            else:
                pending = store.save_async(1, state, lazy=how == "lazy", **given)
                if how == "lazy":
                    pending.stage()
                report = pending.result()
    assert not [one for one in report.fallbacks if one.kind == "unindexed"]
    assert_loads(path, model)
    assert penstock.verify(path).ok
    assert_same(penstock.load(path), state)


def test_copies_go_with_the_checkpoint_and_what_was_edited_stays(tmp_path):
    store = penstock.CheckpointStore(tmp_path, keep_last=1)
    state = {"model": {"w": torch.ones(3)}}
    for step in (1, 2):
        store.save(step, state, groups=GROUPS, files={"config.json": b"{}"})
    assert store.steps() == [2]
    assert os.listdir(tmp_path).count("step-0000000001") == 0
    (Path(store.path(2)) / "config.json").write_text('{"mine": true}')
    assert penstock.verify(store.path(2)).ok
    store.save(3, state, groups=GROUPS, files={"config.json": b"{}"})
    assert os.listdir(store.path(2)) == ["config.json"]


def test_a_replaced_checkpoint_has_the_files_of_the_new_one(tmp_path):
    path = tmp_path / "ckpt"
    files = {"config.json": b"old", "vocab.json": b"old"}
    penstock.save(path, {"model": {"w": torch.ones(3)}}, groups=GROUPS, files=files)
    penstock.save(
        path,
        {"model": {"w": torch.zeros(3)}},
        groups=GROUPS,
        files={"config.json": b"new"},
        overwrite=True,
    )
    assert (path / "config.json").read_bytes() == b"new"
    assert not (path / "vocab.json").exists()
    assert weights_by_vllms_rules(path)["w"].sum() == 0
    assert len(list(path.glob("beside.*"))) == 2
    penstock.save(path, {"model": {"w": torch.zeros(3)}}, overwrite=True)
    assert sorted(name.split(".")[0] for name in os.listdir(path)) == [
        "manifest",
        "part-00000",
        "shard-00000-00",
    ]


def test_a_checkpoint_that_is_copied_or_moved_still_is_one_of_a_model(tmp_path):
    model = make_model()
    model.config.save_pretrained(tmp_path / "config")
    penstock.save(tmp_path / "a", make_state(model), groups=GROUPS, files=tmp_path / "config")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.rename(tmp_path / "a", tmp_path / "c")
    for name in "bc":
        assert_loads(tmp_path / name, model)


def test_damage_of_a_file_beside_is_found(tmp_path):
    penstock.save(tmp_path / "c", {"w": np.ones(3)}, files={"config.json": b"{1}"})
    (kept,) = (tmp_path / "c").glob("beside.*.config.json")
    kept.write_bytes(b"{2}")
    (problem,) = penstock.verify(tmp_path / "c").problems
    assert problem.file == kept.name
    os.remove(kept)
    (problem,) = penstock.verify(tmp_path / "c").problems
    assert "missing" in problem.message


@pytest.mark.parametrize(
    ("names", "final"),
    [
        (["module._orig_mod.a.module.b", "module._orig_mod.c"], ["a.module.b", "c"]),
        (["layers.0._checkpoint_wrapped_module.w", "head.w"], ["layers.0.w", "head.w"]),
        (["module.module.w", "module.module.b"], ["w", "b"]),
        (["model.embed.weight", "module"], ["model.embed.weight", "module"]),
        (["module.w", "n_averaged"], ["w", "n_averaged"]),
        (["module.n_averaged", "n_averaged"], ["module.n_averaged", "n_averaged"]),
        # An average of averages: the inner counter has no other name.
        (
            ["module.module.w", "module.n_averaged", "n_averaged"],
            ["w", "module.n_averaged", "n_averaged"],
        ),
        # One of several children is no wrapped module, whatever its name.
        (["module.w", "head.w"], ["module.w", "head.w"]),
        (["a._orig_mod.w", "a.w"], ["a._orig_mod.w", "a.w"]),
        (["_orig_mod.w", "_orig_mod"], ["_orig_mod.w", "_orig_mod"]),
    ],
)
def test_wrappers_are_taken_out_of_names_one_to_one(names, final):
    assert final_names(names) == dict(zip(names, final, strict=True))


def test_a_child_called_as_a_wrapper_calls_its_model_keeps_its_name(tmp_path):
    model = {"module.w": torch.ones(3), "head._orig_mod.w": torch.ones(2), "head.w": torch.ones(1)}
    penstock.save(tmp_path / "c", {"model": model}, groups=GROUPS)
    assert_same(weights_by_vllms_rules(tmp_path / "c"), dict(sorted(model.items())))
    penstock.export(tmp_path / "c", tmp_path / "given")
    penstock.save(tmp_path / "apart", {"model": model})
    penstock.export(tmp_path / "apart", tmp_path / "written")
    for directory in ("given", "written"):
        found = {}
        for path in (tmp_path / directory).glob("*.safetensors"):
            with safe_open(path, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        assert_same(dict(sorted(found.items())), dict(sorted(model.items())))


class Child(torch.nn.Module):
    """A model whose only child has a wrapper's name for the model inside it."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


def test_names_that_are_taken_for_those_of_a_wrapper_are_reported(tmp_path):
    model = Child().state_dict()
    report = penstock.save(tmp_path / "c", {"model": model}, groups=GROUPS)
    (reason,) = [one for one in report.fallbacks if one.kind == "renamed"]
    assert "model.module.weight and 1 more" in reason
    assert "'weight'" in reason
    assert set(weights_by_vllms_rules(tmp_path / "c")) == {"weight", "bias"}
    assert_same(penstock.load(tmp_path / "c"), {"model": model})
    # An export drops the prefix too, of a state saved without groups.
    penstock.save(tmp_path / "apart", {"model": model})
    exported = penstock.export(tmp_path / "apart", tmp_path / "exported-apart")
    assert exported.renamed == 2
    assert "taken for a wrapper's" in str(exported)
    penstock.save(tmp_path / "other", {"model": torch.nn.Linear(2, 2).state_dict()})
    assert penstock.export(tmp_path / "other", tmp_path / "exported").renamed == 0


def test_every_kind_of_save_reports_names_that_it_leaves_words_out_of(tmp_path):
    def kinds(report):
        return [one.kind for one in report.fallbacks if one.kind == "renamed"]

    state = {"model": Child().state_dict()}
    store = penstock.CheckpointStore(tmp_path / "store")
    assert kinds(store.save(1, state, groups=GROUPS)) == ["renamed"]
    assert kinds(store.save_async(2, state, groups=GROUPS).result()) == ["renamed"]
    assert kinds(store.save(3, state, groups={"model": "average"})) == ["renamed"]
    assert kinds(store.save(4, state, groups={"model.module": ""})) == []


def test_an_average_of_averages_is_saved_in_place(tmp_path):
    average = torch.optim.swa_utils.AveragedModel
    model = average(average(torch.nn.Linear(2, 2))).state_dict()
    penstock.save(tmp_path / "c", {"model": model}, groups=GROUPS)
    assert {"weight", "bias"} < set(weights_by_vllms_rules(tmp_path / "c"))
    assert_same(penstock.load(tmp_path / "c"), {"model": model})


def test_a_compiled_model_keeps_its_own_names(tmp_path):
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    state = {"model": compiled.state_dict()}
    assert all(name.startswith("_orig_mod.") for name in state["model"])
    model.config.save_pretrained(tmp_path / "config")
    penstock.save(tmp_path / "c", state, groups=GROUPS, files=tmp_path / "config")
    assert_loads(tmp_path / "c", model)
    assert_same(penstock.load(tmp_path / "c"), state)


def test_several_groups_lie_apart(tmp_path):
    names = [f"w{index}" for index in range(40)]
    state = {
        "model": {name: torch.randn(10) for name in names},
        "ema": {"module": {name: torch.randn(10) for name in names}},
        "optimizer": {name: torch.randn(10) for name in names},
    }
    penstock.save(tmp_path / "c", state, groups={"model": "", "ema": "average"})
    expected = dict(sorted(state["model"].items()))
    assert_same(weights_by_vllms_rules(tmp_path / "c"), expected)
    found = []
    for path in sorted((tmp_path / "c").glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            found.append(sorted(opened.keys()))
    assert sorted(found) == sorted(
        [sorted(names), sorted(names), sorted(f"optimizer.{name}" for name in names)]
    )
    assert_same(penstock.load(tmp_path / "c"), state)


def test_the_whole_state_may_be_one(tmp_path):
    model = make_model()
    penstock.save(tmp_path / "c", model.state_dict(), groups={"": ""})
    assert "transformer.wte.weight" in weights_by_vllms_rules(tmp_path / "c")


def test_a_tied_tensor_whose_first_name_is_elsewhere_is_there(tmp_path):
    w = torch.randn(4)
    penstock.save(tmp_path / "c", {"best": {"copy": w}, "model": {"w": w}}, groups=GROUPS)
    assert_same(weights_by_vllms_rules(tmp_path / "c"), {"w": w})
    loaded = penstock.load(tmp_path / "c")
    assert loaded["best"]["copy"] is loaded["model"]["w"]


def test_a_window_makes_no_index_and_the_report_says_so(tmp_path):
    w = torch.randn(4, 4)
    state = {"model": {"w": w, "rows": w[1:3]}}
    report = penstock.save(tmp_path / "c", state, groups=GROUPS)
    (reason,) = [one for one in report.fallbacks if one.kind == "unindexed"]
    assert "model.rows" in reason
    assert not (tmp_path / "c" / INDEX).exists()
    assert_same(penstock.load(tmp_path / "c"), state)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ({"model": "", "ema": ""}, "two groups have one name"),
        ({"model": "a", "model.layers": "b"}, "is a part of"),
        ({"": "a", "model": "b"}, "is a part of"),
        ({"model": "a/b"}, "letters, digits"),
        ({"model": ".."}, "letters, digits"),
    ],
)
def test_groups_that_make_no_sense_are_refused(tmp_path, groups, match):
    with pytest.raises(ValueError, match=match):
        penstock.save(tmp_path / "c", {"model": {"w": np.ones(3)}}, groups=groups)
    with pytest.raises(ValueError, match=match):
        penstock.CheckpointStore(tmp_path / "s").save_async(1, {}, groups=groups)
    assert os.listdir(tmp_path) == []


def test_what_is_in_no_group_is_refused(tmp_path):
    state = {"model": {"w": torch.ones(3)}}
    with pytest.raises(UnsupportedStateError, match="no tensor below 'modle'"):
        penstock.save(tmp_path / "c", state, groups={"modle": ""})
    with pytest.raises(TypeError, match="groups"):
        penstock.save(tmp_path / "c", state, groups=["model"])
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "name", ["", "a/b", "../x", ".hidden", "manifest.json", "protected", "m.safetensors", "ü", 3]
)
def test_names_that_may_not_lie_beside_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot lie beside"):
        penstock.save(tmp_path / "c", {"w": np.ones(3)}, files={name: b""})
    assert not (tmp_path / "c").exists()


def test_files_that_cannot_be_taken_are_named(tmp_path):
    with pytest.raises(FileNotFoundError):
        penstock.save(tmp_path / "c", {}, files={"config.json": tmp_path / "none"})
    with pytest.raises(TypeError, match=r"config\.json"):
        penstock.save(tmp_path / "c", {}, files={"config.json": 3})
    os.mkdir(tmp_path / "d")
    with open(tmp_path / "d" / "large.json", "wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match=r"large\.json has more than 64 MiB"):
        penstock.save(tmp_path / "c", {}, files=tmp_path / "d")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_in_the_way_of_a_copy_is_named_before_anything_is_written(
    tmp_path, name, overwrite
):
    store = penstock.CheckpointStore(tmp_path / "store")
    path, state = Path(store.path(1)), {"model": {"w": torch.ones(3)}}
    if overwrite:
        store.save(1, state)
    (path / name).mkdir(parents=True)
    before = sorted(os.listdir(path))
    given = {"groups": GROUPS, "files": {"config.json": b"{}"}, "overwrite": overwrite}
    with pytest.raises(StorageError, match=r"is a directory.*nothing was written") as one:
        penstock.save(path, state, **given)
    assert one.value.errno == errno.EISDIR
    assert one.value.path == str(path / name)
    with pytest.raises(StorageError, match="is a directory"):
        store.save_async(1, state, **given).result()
    assert sorted(os.listdir(path)) == before
    os.rename(path / name, tmp_path / "elsewhere")
    store.save(1, state, **given)
    assert (path / name).is_file()


def test_a_directory_gives_all_but_its_weights(tmp_path):
    for name in ("config.json", "tokenizer.model", "a.safetensors", "b.bin", INDEX, ".git"):
        (tmp_path / name).write_text("x")
    os.mkdir(tmp_path / "sub")
    penstock.save(tmp_path / "c", {"w": np.ones(3)}, files=str(tmp_path))
    found = {path.name.split(".", 2)[2] for path in (tmp_path / "c").glob("beside.*")}
    assert found == {"config.json", "tokenizer.model"}


@pytest.mark.parametrize("how", ["save", "lazy"])
@pytest.mark.parametrize(
    ("state", "group", "members"),
    [
        ({"w[0]": {"x": 1}, "w0": {"x": 2}}, r"w\[0]", {"x": 1}),
        ({"w[0]": {"x": 1}, "w0": {"x": 2}}, "w[0]", {"x": 1}),
        ({"a\\b": {"x": 1}}, r"a\\b", {"x": 1}),
        ({"a\\b": {"x": 1}}, "a\\b", {"x": 1}),
        ({"m": {"x": 1}, "m.ema": {"x": 2}}, "m", {"x": 1}),
        ({"m": {"x": 1}, "m.ema": {"x": 2}}, r"m\.ema", {"x": 2}),
        ({"m": {"x": 1}, "m.ema": {"x": 2}}, "m.ema", {"x": 2}),
        ({"1": {"x": 1}, 1: {"x": 2}}, "1", {"x": 1}),
        ({"1": {"x": 1}, 1: {"x": 2}}, r"\1", {"x": 2}),
        ({"m.x": 1, "m.y": 2, "n": 3}, "m", {"x": 1, "y": 2}),
        ({"m": {"*": 1, "a.b": 2, "a": {"b": 3}}}, "m", {"*": 1, "a.b": 2, "a.b~2": 3}),
    ],
)
def test_a_group_is_named_as_inspect_shows_names_or_by_its_keys(
    tmp_path, how, state, group, members
):
    def tensors(value):
        if isinstance(value, dict):
            return {key: tensors(inner) for key, inner in value.items()}
        return torch.full((2,), value)

    state = tensors(state)
    if how == "save":
        penstock.save(tmp_path / "c", state, groups={group: ""})
    else:
        penstock.Saver().save_async(tmp_path / "c", state, lazy=True, groups={group: ""}).result()
    found = {name: int(value[0]) for name, value in weights_by_vllms_rules(tmp_path / "c").items()}
    assert found == members
    penstock.export(tmp_path / "c", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as exported:
        assert set(exported.keys()) == set(members)
    assert_same(penstock.load(tmp_path / "c"), state)
