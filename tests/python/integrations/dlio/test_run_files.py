"""The run files of examples/dlio: the sizes that their comments and the documentation name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from penstock_bench.workloads.models import MODELS, Model, dlio_bytes

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "dlio"
FILES = sorted(EXAMPLES.glob("workload/*.yaml"))
GIB = 1 << 30
ITEM_BYTES = {"int8": 1, "fp16": 2, "fp32": 4}
MLPERF = {
    "llama3_8b": ("llama3-8b", 8),
    "llama3_70b": ("llama3-70b", 64),
    "llama3_405b": ("llama3-405b", 512),
    "llama3_1t": ("1t", 1024),
}


def settings(name):
    return yaml.safe_load((EXAMPLES / "workload" / f"{name}.yaml").read_text())


def model_of(name):
    """The model that a run file describes, with the data parallelism that it names."""
    model = settings(name)["model"]
    transformer, parallelism = model["transformer"], model["parallelism"]
    return Model(
        vocabulary=transformer["vocab_size"],
        hidden=transformer["hidden_size"],
        ffn=transformer["ffn_hidden_size"],
        layers=model["num_layers"],
        heads=transformer["num_attention_heads"],
        kv_heads=transformer["num_kv_heads"],
        tp=parallelism["tensor"],
        pp=parallelism["pipeline"],
        dp=parallelism.get("data", 1),
        zero=parallelism["zero_stage"],
    )


@pytest.mark.parametrize("name", MLPERF)
def test_mlperfs_models_have_its_geometry_and_repeats(name):
    known, processes = MLPERF[name]
    expected, found = MODELS[known], model_of(name)
    same = ("vocabulary", "hidden", "ffn", "layers", "heads", "kv_heads", "tp", "pp", "zero")
    assert [getattr(found, one) for one in same] == [getattr(expected, one) for one in same]
    assert expected.world_size == processes
    checkpoint = settings(name)["checkpoint"]
    assert checkpoint["num_checkpoints_write"] == checkpoint["num_checkpoints_read"] == 10
    assert checkpoint["rank_sync"]
    text = (EXAMPLES / "workload" / f"{name}.yaml").read_text()
    assert f"mpirun -np {processes}" in text
    gib = dlio_bytes(expected) / GIB
    assert f"{gib:,.1f} GiB" in text or f"{gib:,.0f} GiB" in text


def test_the_scaled_model_is_as_large_as_it_says():
    whole, scaled = MODELS["llama3-8b"], model_of("llama3_8b_scaled")
    assert (scaled.hidden, scaled.ffn, scaled.zero) == (whole.hidden, whole.ffn, whole.zero)
    nbytes = dlio_bytes(scaled) * 2 / scaled.world_size
    assert nbytes / GIB == pytest.approx(2.28, abs=0.005)
    assert nbytes / dlio_bytes(whole) == pytest.approx(0.022, abs=0.0005)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("llama3_405b_fill", 5682), ("llama3_405b_fill_4_bytes", 1623)]
)
def test_a_save_of_a_fill_pass_is_as_large_as_it_says(name, gigabytes):
    model, types = model_of(name), settings(name)["model"]
    assert (model.tp, model.pp, model.world_size) == (4, 2, 8)
    of_model, of_optimizer = (
        ITEM_BYTES[types[f"{kind}_datatype"]] for kind in ("model", "optimizer")
    )
    nbytes = model.parameters * (of_model + 3 * of_optimizer)
    assert nbytes / 1e9 == pytest.approx(gigabytes, abs=0.6)
    assert f"{gigabytes:,} GB" in (EXAMPLES / "workload" / f"{name}.yaml").read_text()
    assert settings(name)["checkpoint"]["num_checkpoints_write"] == 33


def test_a_save_of_the_release_is_as_large_as_it_says():
    text = (EXAMPLES / "release" / "workload" / "llama3_405b_fill.yaml").read_text()
    checkpoint = yaml.safe_load(text)["checkpoint"]
    groups, layers = sum(checkpoint["optimization_groups"]), sum(checkpoint["layer_parameters"])
    files = checkpoint["num_layers"] + checkpoint["tensor_parallelism"]
    writers = 8 // checkpoint["pipeline_parallelism"]
    nbytes = 8 * (checkpoint["model_size"] + 3 * groups) + writers * files * layers
    assert nbytes / 1e9 == pytest.approx(1623, abs=0.6)
    assert "1,623 GB" in text


@pytest.mark.parametrize("path", FILES, ids=lambda one: one.stem)
def test_every_run_file_names_our_mechanism(path):
    checkpoint = yaml.safe_load(path.read_text())["checkpoint"]
    assert (
        checkpoint["checkpoint_mechanism_classname"] == "penstock.integrations.dlio.Checkpointing"
    )
