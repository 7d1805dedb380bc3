"""Names of leaves: every displayed name means one leaf, wherever it is passed."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import penstock
from penstock import features, offload
from penstock.checkpoint.state.tree.names import escaped, is_wild, matcher, unescaped
from penstock.cli import cli
from penstock.errors import PartialCheckpointError, StateMismatchError

FAMILY = settings(
    max_examples=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.text("ab1.*?[]\\!~-\ud800é", max_size=3) | st.sampled_from(["1", "nan", "None", "1.5"])
KEYS = TEXTS | st.sampled_from([1, 2, 1.5, math.nan, True, None, -1, (1, "a.*"), (1,)])
LEAVES = st.sampled_from(["plain", "table"])


def containers(inner):
    mapping = st.dictionaries(KEYS, inner, min_size=1, max_size=4)
    return mapping | st.lists(inner, min_size=1, max_size=2)


STATES = containers(st.recursive(LEAVES, containers, max_leaves=6))


def leaves_of(state):
    if isinstance(state, dict):
        state = list(state.values())
    return (
        [leaf for one in state for leaf in leaves_of(one)] if isinstance(state, list) else [state]
    )


def numbered(state):
    """Replaces each leaf by a number, or by an array filled with it."""
    count = iter(range(1000))

    def made(one):
        if isinstance(one, dict):
            return {key: made(value) for key, value in one.items()}
        if isinstance(one, list):
            return [made(value) for value in one]
        number = next(count)
        return np.full((2, 2), number) if one == "table" else number

    return made(state)


def run(command, *arguments):
    """Runs a command of the command line; names may begin with a dash."""
    options = [one for one in arguments if str(one).startswith("--")]
    rest = [str(one) for one in arguments if one not in options]
    return CliRunner().invoke(cli, [command, *options, "--", *rest], standalone_mode=False)


def number_of(leaf):
    return int(leaf.reshape(-1)[0]) if isinstance(leaf, np.ndarray) else leaf


@FAMILY
@given(state=STATES)
@example(state={"a": {"b": "plain"}, "a.b": "table", "a\\.b": "plain"})
@example(state={"1": "table", 1: "table", "\\1": "plain"})
@example(state={"*": "table", "a": "table", "[a]": "plain", "?": "plain"})
@example(state={"": "table", ".": "plain", "__metadata__": "table"})
@example(state={math.nan: "plain", float("nan"): "table", "nan": "plain"})
@example(state={"a": {"": "plain"}, "a.": "table"})
def test_every_name_that_is_shown_selects_its_leaf_alone(disk_path, state):
    state = numbered(state)
    path = Path(tempfile.mkdtemp(dir=disk_path)) / "ckpt"
    penstock.save(path, state)
    info = penstock.inspect(path)
    tables = [tensor.name for tensor in info.tensors]
    names = [*tables, *info.values()]
    assert len(set(names)) == len(names)
    found = {}
    for name in names:
        assert not is_wild(name)
        (leaf,) = leaves_of(penstock.load(path, keys=name))
        found[name] = number_of(leaf)
        shown = json.loads(run("inspect", "--json", "--values", f"--keys={name}", path).output)
        assert [*(one["name"] for one in shown["tensors"]), *shown["values"]] == [name]
    assert sorted(found.values()) == sorted(map(number_of, leaves_of(state)))
    for name in tables:
        assert info.tensors[tables.index(name)].shape == (2, 2)
        with features.open(path, key=name) as table:
            assert int(table.gather([1])[0, 0]) == found[name]
    same = run("diff", path, path)
    assert (same.return_value, same.exception) == (0, None), same.output


@given(text=st.text("ab.*?[]\\!\ud800é"))
def test_an_escaped_key_is_a_pattern_of_itself(text):
    name = escaped(text)
    assert not is_wild(name)
    assert matcher(name)(name)
    assert matcher("*")(name)
    if text.isascii():
        assert unescaped(name) == text


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("w*", ["w0", r"w\[0]", r"w\*"]),
        (r"w\*", [r"w\*"]),
        (r"w\[0]", [r"w\[0]"]),
        ("w[[]0]", [r"w\[0]"]),
        ("w[0]", ["w0", r"w\[0]"]),
        ("w?", ["w0", r"w\*"]),
        (r"a\.*", [r"a\.b"]),
        ("a.*", ["a.b"]),
        ("?1", [r"\1", r"\\1"]),
        (r"\\*", [r"\\1"]),
    ],
)
def test_patterns_take_characters_with_a_backslash_as_they_are(pattern, matching):
    names = ["w0", r"w\[0]", r"w\*", "a.b", r"a\.b", "1", r"\1", r"\\1"]
    assert [name for name in names if matcher(pattern)(name)] == matching


def test_simple_names_are_what_they_were(tmp_path):
    state = {
        "model": {"layers.0.weight": torch.ones(2), "layers.0.bias": torch.ones(1)},
        "optimizer": {"state": {0: {"step": 1}}, "lr": 0.1, "lr.warmup": 5, "betas": (0.9, 0.99)},
        "a": {},
        "a.b": 3,
    }
    penstock.save(tmp_path / "ckpt", state)
    info = penstock.inspect(tmp_path / "ckpt")
    assert [one.name for one in info.tensors] == ["model.layers.0.weight", "model.layers.0.bias"]
    assert list(info.values()) == [
        *("optimizer.state.0.step", "optimizer.lr", "optimizer.lr.warmup"),
        *("optimizer.betas.0", "optimizer.betas.1", "a", "a.b"),
    ]


def test_a_key_as_it_is_in_the_state_is_told_its_name(tmp_path):
    penstock.save(tmp_path / "ckpt", {"a\\b": np.ones((2, 2)), "c": 1})
    with pytest.raises(StateMismatchError, match=r"did you mean 'a\\\\b'\?"):
        penstock.load(tmp_path / "ckpt", keys="a\\b")
    penstock.save(tmp_path / "odd", {"w[0]": np.ones((2, 2)), "c": 1})
    assert list(penstock.load(tmp_path / "odd", keys="w[0]")) == ["w[0]"]
    assert features.open(tmp_path / "odd", key="w[0]").gather([0]).shape == (1, 2)


@pytest.mark.parametrize("key", [r"my\*", "my*"])
def test_weights_and_exports_are_found_under_names_with_special_characters(tmp_path, key):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            made = {name: torch.nn.Linear(2, 2, bias=False) for name in ("w[0]", "*")}
            self.parts = torch.nn.ModuleDict(made)

        def forward(self, x):
            return self.parts["*"](self.parts["w[0]"](x))

    model, x = Model(), torch.ones(1, 2)
    expected = model(x).detach()
    penstock.save(tmp_path / "ckpt", {"my*": model.state_dict(), "w": torch.ones(2)})
    streamed = offload.stream(
        Model(),
        weights=tmp_path / "ckpt",
        key=key,
        blocks=["parts.w[0]", "parts.*"],
        memory_bytes=100_000,
    )
    with torch.inference_mode():
        assert torch.equal(streamed(x), expected)
    penstock.export(tmp_path / "ckpt", tmp_path / "out", key=key)
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {
        "parts.w[0].weight",
        "parts.*.weight",
    }


ODD = {
    "w[0]": np.ones(4),
    "a": {"b": np.ones(4)},
    "a.b": np.ones(4),
    1: np.ones(4),
    "1": np.ones(4),
    "tied\\": {"*": torch.eye(3).to_sparse()},
}


def hit(path):
    """Changes a byte of every tensor of a checkpoint."""
    tensors = penstock.inspect(path).tensors
    for one in tensors:
        with (path / one.file).open("r+b") as file:
            file.seek(one.begin)
            file.write(b"?")
    return [one.name for one in tensors]


def test_damage_is_shown_under_the_names_that_inspect_shows(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "steps")
    for step in (1, 2):
        store.save(step, ODD)
    path = Path(store.path(2))
    names = hit(path)
    assert names == [
        *(r"w\[0]", "a.b", r"a\.b", r"\1", "1", r"tied\\.\*.indices", r"tied\\.\*.values"),
    ]
    # One digest chunk covers all of them: the first damaged tensor is named.
    for problems in (penstock.verify(path).problems, store.scrub().steps[1].problems):
        assert {one.tensor for one in problems} == {names[0]}
    assert [one.name for one in penstock.explain(path).hit] == names
    assert (
        json.loads(run("verify", "--json", "--explain", path).output)["tensors"][0]["name"]
        == (names[0])
    )
    found = penstock.salvage(path, tmp_path / "salvaged")
    assert [one.name for one in found.missing] == names
    assert [one.name for one in penstock.inspect(tmp_path / "salvaged").missing] == names
    again = penstock.explain(tmp_path / "salvaged")
    assert again.ok, again
    with pytest.raises(PartialCheckpointError, match=r"w\\\\\[0\]"):
        penstock.load(tmp_path / "salvaged")
