"""Sizes of models' checkpoints, against published ones."""

import pytest

from penstock_bench.workloads.models import MODELS, Model, dlio_bytes, tensors

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "gib", "tolerance"),
    [
        # A published summary of MLPerf Storage.
        ("llama3-8b", 104.704521, 1e-8),
        ("llama3-70b", 911.2, 1e-3),
        ("llama3-405b", 5292.2, 1e-3),
        ("1t", 15_427, 1e-3),
    ],
)
def test_a_checkpoint_has_the_published_size(name, gib, tolerance):
    assert dlio_bytes(MODELS[name]) / GIB == pytest.approx(gib, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.03), ("llama3-70b", 69.9), ("llama3-405b", 405.85), ("1t", 1183)],
)
def test_a_model_has_the_published_parameters(name, billions):
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "llama3-70b", "llama3-405b-tp4-pp2"])
def test_ranks_together_hold_14_bytes_of_every_parameter(name):
    model = MODELS[name]
    held = sum(one.nbytes for rank in range(model.world_size) for one in tensors(model, rank))
    assert held == pytest.approx(14 * model.parameters, rel=1e-3)


def test_blocks_go_to_stages_in_order_and_the_first_have_more():
    model = Model(hidden=64, ffn=128, layers=10, heads=4, kv_heads=4, pp=4)
    assert [[*model.stage(rank)] for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_names_are_apart_on_a_rank_and_sizes_are_those_of_a_real_state():
    found = list(tensors(MODELS["llama3-405b"], 0))
    assert len({one.name for one in found}) == len(found)
    sizes = sorted(one.nbytes for one in found)
    assert sizes[0] == 4
    assert sizes[-1] > 100 << 20


def test_what_is_sharded_is_written_once():
    model = Model(
        vocabulary=1000, hidden=96, ffn=200, layers=3, heads=6, kv_heads=2, tp=2, pp=2, dp=3, zero=1
    )
    written = [one for rank in range(model.world_size) for one in tensors(model, rank)]
    weights = sum(one.nbytes for one in written if one.name.startswith("model."))
    assert weights == 2 * model.parameters
    moments = sum(one.nbytes for one in written if one.name.endswith("exp_avg"))
    assert moments == 4 * model.parameters
