"""A missing version, package or device is reported as such, and never as damage.

A step is marked as damaged on proof alone: bytes that do not match their digests, missing or
truncated files. Any other error may not occur with another version of Penstock, PyTorch or NumPy,
or with a package that is not installed here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import penstock
from forge import Forgery
from penstock.checkpoint.state.tree import scalars
from penstock.cli import cli
from penstock.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    MissingDependencyError,
    PenstockWarning,
)
from penstock.tensors import dtypes

LACKING = {
    "device of a backend that is not there": '{"$":"device","v":"npu:0"}',
    "torch dtype of a newer PyTorch": '{"$":"dtype","v":"float6_e3m2fn"}',
    "numpy dtype of a newer NumPy": '{"$":"np.dtype","v":"<f3"}',
    "numpy scalar of a newer NumPy": '{"$":"np","dtype":"<f32","v":"AAAA"}',
}
NEWER = {
    "kind of value": '{"$":"quaternion","v":[1,2,3,4]}',
    "factory": '{"$":"defaultdict","factory":"deque","v":[]}',
    "key": '{"$":"dict","v":[[{"$":"date","v":"2026-01-01"},1]]}',
    "attribute": '{"$":"odict","v":[],"attrs":{"_metadata":{},"_order":1}}',
    "numpy dtype": '{"$":"np.dtype","v":"StringDType()"}',
    "type of a shared tensor": '{"$":"tensor","g":"q","dtype":"float3_e1m1","shape":[4]}',
}
MALFORMED = {
    "tensor that is not there": '{"$":"tensor","i":99}',
    "repeated key": '{"$":"dict","v":[[1,1],[1,2]]}',
    "no float": '{"$":"float","v":"0x12"}',
}


@pytest.fixture
def store(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (1, 2):
        store.save(step, {"w": torch.full((4,), float(step)), "n": np.arange(3)})
    return store


def forge(store, step):
    return Forgery(Path(store.path(step)))


def assert_not_marked(store):
    assert 2 not in store.marks()
    assert {info.step for info in store.scan()} == {1, 2}


def every_way_in(store):
    """Returns all reads of the newest step that could mark it as damaged."""
    return (
        store.load,
        lambda: store.load(step=2),
        lambda: store.load(fallback=True),
        lambda: store.load(keys=["x*", "w"]),
    )


@pytest.mark.parametrize("node", LACKING.values(), ids=LACKING)
def test_what_a_package_lacks_is_named_and_no_step_is_passed_over_for_it(store, node):
    forge(store, 2).write_tree(f'{{"w":{{"$":"tensor","i":0}},"x":{node}}}')
    for call in every_way_in(store):
        with pytest.raises(MissingDependencyError, match="step-0000000002") as raised:
            call()
        assert raised.value.name in ("torch", "numpy", "npu")
    assert store.verify(2).ok
    assert store.marks()[2].is_good
    # Other keys still load.
    assert torch.equal(store.load(keys="w")["w"], torch.full((4,), 2.0))


@pytest.mark.parametrize("node", NEWER.values(), ids=NEWER)
def test_what_this_version_does_not_know_is_newer(store, node):
    forge(store, 2).write_tree(f'{{"w":{{"$":"tensor","i":0}},"x":{node}}}')
    for call in every_way_in(store):
        with pytest.raises(FormatVersionError, match="step-0000000002") as raised:
            call()
        assert raised.value.found == raised.value.supported
    assert_not_marked(store)


def test_a_kind_of_value_is_seen_before_it_is_loaded(store):
    forge(store, 2).write_tree('{"w":{"$":"quaternion","v":[]}}')
    state = {info.step: (info.state, info.reason) for info in store.scan()}
    assert state[1] == ("complete", None)
    assert state[2][0] == "newer"
    assert "quaternion" in state[2][1]
    # Commands that read manifests alone do not notice.
    assert (store.steps(), store.latest()) == ([1, 2], 1)
    listed = CliRunner().invoke(cli, ["ls", store.root, "--json"], standalone_mode=False).output
    assert [row["state"] for row in json.loads(listed)["steps"]] == ["complete", "newer"]


@pytest.mark.parametrize("member", ["dtype", "stored"])
def test_an_element_type_of_a_newer_version_is_newer(store, member):
    forgery = forge(store, 2)
    if member == "dtype":
        forgery.part["tensors"][0]["dtype"] = "float3_e1m1"
    else:
        forgery.part["tensors"][0]["stored"] = {"dtype": "F3", "shape": [4]}
    forgery.write_part()
    for call in (*every_way_in(store), lambda: store.verify(2)):
        with pytest.raises(FormatVersionError, match=r"float3_e1m1|F3"):
            call()
    assert_not_marked(store)
    assert [info.state for info in store.scan()] == ["complete", "newer"]
    states = {step.step: step.state for step in store.scrub().steps}
    assert states == {1: "verified", 2: "skipped"}
    assert_not_marked(store)


def test_a_part_of_a_newer_version_is_newer(store):
    forgery = forge(store, 2)
    forgery.part["version"] = 2
    forgery.write_part()
    with pytest.raises(FormatVersionError) as raised:
        store.load()
    assert (raised.value.found, raised.value.supported) == (2, 1)
    assert_not_marked(store)


@pytest.mark.parametrize("node", MALFORMED.values(), ids=MALFORMED)
def test_a_tree_without_sense_is_no_proof_of_damage(store, node):
    forge(store, 2).write_tree(f'{{"x":{node}}}')
    with pytest.raises(CorruptCheckpointError, match="digest is right") as raised:
        store.load()
    assert not raised.value.is_proven
    with pytest.warns(PenstockWarning, match="makes no sense"):
        assert torch.equal(store.load(fallback=True)["w"], torch.ones(4))
    assert_not_marked(store)


@pytest.mark.parametrize("lie", ["range", "header"])
def test_nor_are_numbers_without_sense(store, lie):
    forgery = forge(store, 2)
    if lie == "range":
        forgery.part["tensors"][0]["range"] = [0, 1 << 40]
        forgery.write_part()
    else:
        data = forgery.shard_file().read_bytes()
        forgery.write_shard(data.replace(b'"w"', b'"v"'))
    result = store.verify(2)
    assert not result.ok
    assert not any(problem.is_proven for problem in result.problems)
    states = {step.step: step.state for step in store.scrub().steps}
    assert states == {1: "verified", 2: "damaged"}
    assert_not_marked(store)


@pytest.mark.parametrize("how", ["load", "verify", "scrub"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_is_proven_by_bytes_and_remembered(store, damage, how):
    file = forge(store, 2).shard_file()
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    if how == "load":
        with pytest.raises(CorruptCheckpointError) as raised:
            store.load(step=2)
        assert raised.value.is_proven
    elif how == "verify":
        assert any(problem.is_proven for problem in store.verify(2).problems)
    else:
        store.scrub()
    if how == "scrub" and damage != "flipped":
        # Found from file sizes without reading, so it needs no mark.
        assert 2 not in store.marks()
    else:
        assert not store.marks()[2].is_good


@pytest.mark.parametrize("package", ["torch", "ml_dtypes"])
def test_a_package_that_is_not_installed_is_named(store, monkeypatch, package):
    """The remedy names a package that exists."""
    node = {"torch": '{"$":"size","v":[1]}', "ml_dtypes": '{"$":"np.dtype","v":"bfloat16"}'}
    forge(store, 2).write_tree(f'{{"x":{node[package]}}}')
    importing = dtypes.importlib.import_module

    def refuse(name):
        if name == package:
            raise ImportError(name)
        return importing(name)

    monkeypatch.setattr(dtypes.importlib, "import_module", refuse)
    # If an extra of Penstock installs the package, the remedy names the extra.
    remedy = {"torch": r"pip install 'penstock\[torch\]'"}.get(package, f"pip install {package}")
    with pytest.raises(MissingDependencyError, match=remedy) as raised:
        store.load(fallback=True)
    assert raised.value.name == package
    assert_not_marked(store)


def test_both_sides_know_the_same_tags():
    source = Path(__file__).parents[3] / "crates/store/src/format/tree.rs"
    table = source.read_text().partition("const TAGS")[2].partition("];")[0]
    # The tree of a sealed part, which the store opens or refuses before Python reads a tree.
    assert set(re.findall(r'"([a-z.]+)"', table)) - {"sealed"} == scalars.TAGS
