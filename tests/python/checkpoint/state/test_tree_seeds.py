"""Seeds and findings of the tree's fuzzer, checked without a fuzzer (fuzz/tree.py)."""

from __future__ import annotations

import importlib.util
import tracemalloc

import pytest

import penstock
from conftest import REPOSITORY
from forge import Forgery
from penstock.errors import CorruptCheckpointError

FUZZ = REPOSITORY / "fuzz"
SEEDS = sorted((FUZZ / "seeds" / "tree").iterdir())


@pytest.fixture(scope="module")
def checks():
    pytest.importorskip("torch", reason="the seeds hold tensors")
    spec = importlib.util.spec_from_file_location("tree_checks", FUZZ / "tree_checks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    tracemalloc.stop()


def test_there_are_seeds():
    assert SEEDS


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
def test_a_seed_decodes_or_is_refused_in_little_memory(checks, seed):
    checks.check(seed.read_bytes())


def test_names_longer_than_any_writer_makes_them_are_damage(tmp_path):
    penstock.save(tmp_path / "ckpt", {"a": 1})
    forgery = Forgery(tmp_path / "ckpt")
    forgery.write_tree('{"' + "k" * 100_000 + '":[' + "0," * 300 + "0]}")
    with pytest.raises(CorruptCheckpointError, match="characters"):
        penstock.inspect(tmp_path / "ckpt").values()
    assert len(penstock.load(tmp_path / "ckpt", keys="k*.7")) == 1


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_of_one_tensor_are_one_object(tmp_path, kind):
    """Otherwise a few bytes of a tree could each copy a tensor of gigabytes."""
    value = kind(5000)
    penstock.save(tmp_path / "ckpt", [value, {"a": value}])
    first, rest = penstock.load(tmp_path / "ckpt")
    assert first == value
    assert first is rest["a"]
