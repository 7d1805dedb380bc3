"""Tensors made of other tensors are stored: sparse, nested, and torchao's quantized ones."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchao.optim
import torchao.quantization as quantization
from click.testing import CliRunner
from safetensors import safe_open

import penstock
from compare import assert_same, tensors_in
from forge import Forgery
from penstock.cli import cli
from penstock.errors import CorruptCheckpointError, MissingDependencyError, StateMismatchError
from penstock.integrations.dcp import StorageReader, StorageWriter

CONFIGS = {
    "int8": quantization.Int8WeightOnlyConfig,
    "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
    "float8": quantization.Float8WeightOnlyConfig,
    "intx": quantization.IntxWeightOnlyConfig,
}
OPTIMIZERS = {
    "8-bit": torchao.optim.AdamW8bit,
    "4-bit": torchao.optim.AdamW4bit,
    "float8": torchao.optim.AdamWFp8,
}


def quantized(kind, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)).bfloat16()
    quantization.quantize_(model, CONFIGS[kind]())
    return model


def sparse(seed=0):
    values = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))
    # The seed changes values, not which elements are nonzero.
    values = (values + 1) * (torch.arange(24).view(4, 6) % 5 == 0)
    rows = [values[:2].clone(), values[:3].clone()]
    return {
        "coo": values.to_sparse(),
        "twice": torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values[0, :2].clone(), (4,)),
        "csr": values.to_sparse_csr(),
        "csc": values.to_sparse_csc(),
        "bsr": values.to_sparse_bsr((2, 3)),
        "bsc": values.to_sparse_bsc((2, 3)),
        "nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ckpt"


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantized_model_comes_back_and_computes_the_same(path, kind):
    model = quantized(kind)
    penstock.save(path, {"model": model.state_dict()})
    found = penstock.load(path)
    assert_same(found["model"], model.state_dict())
    other = quantized(kind, seed=1)
    other.load_state_dict(found["model"])
    given = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(other(given), model(given))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantized_model_is_filled_in_place(path, kind):
    model, other = quantized(kind), quantized(kind, seed=1)
    penstock.save(path, model.state_dict())
    penstock.load(path, into=other.state_dict())
    assert_same(other.state_dict(), model.state_dict())


def test_tied_quantized_weights_stay_tied_and_are_stored_once(path):
    weight = quantized("int8").state_dict()["0.weight"]
    report = penstock.save(path, {"embedding": weight, "head": weight})
    found = penstock.load(path)
    assert found["embedding"] is found["head"]
    assert report.tensors == len(tensors_in(weight))


@pytest.mark.parametrize("kind", sparse())
def test_sparse_and_nested_tensors_come_back_and_are_filled(path, kind):
    value, target = sparse()[kind], sparse(seed=1)[kind]
    penstock.save(path, {"x": value})
    assert_same(penstock.load(path)["x"], value)
    state = {"x": target}
    penstock.load(path, into=state)
    assert state["x"] is target
    assert_same(target, value)


def test_the_parts_are_ordinary_tensors_of_the_shard(path):
    penstock.save(path, {"m": quantized("int8").state_dict(), **sparse()})
    names = {one.name for one in penstock.inspect(path).tensors}
    assert {"m.0.weight.qdata", "m.0.weight.scale", "coo.indices", "csr.values"} <= names
    found = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            found |= set(shard.keys())
    assert found == names
    assert penstock.verify(path).ok
    one = penstock.load(path, keys="m.0.weight.qdata", plain=True)
    assert one["m"]["0.weight"]["qdata"].dtype == torch.int8


def test_diff_looks_into_them(path, tmp_path):
    penstock.save(path, {"m": quantized("int8").state_dict(), **sparse()})
    same = CliRunner().invoke(cli, ["diff", "--json", str(path), str(path)])
    assert json.loads(same.output)["same"]
    penstock.save(tmp_path / "b", {"m": quantized("int8", seed=1).state_dict(), **sparse()})
    found = CliRunner().invoke(cli, ["diff", "--json", str(path), str(tmp_path / "b")])
    assert "m.0.weight.qdata" in {row["name"] for row in json.loads(found.output)["tensors"]}


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (lambda: sparse()["csr"], lambda: sparse()["csc"]),
        (lambda: sparse()["coo"], lambda: torch.zeros(4, 6)),
        (lambda: torch.zeros(4, 6), lambda: sparse()["coo"]),
        (lambda: sparse()["coo"], lambda: torch.zeros(4, 6).to_sparse()),
        (lambda: sparse()["jagged"], lambda: sparse()["nested"]),
        (
            lambda: quantized("int8").state_dict()["0.weight"],
            lambda: quantized("float8").state_dict()["0.weight"],
        ),
        (
            lambda: quantized("int8").state_dict()["0.weight"],
            lambda: quantized("int8-dynamic").state_dict()["0.weight"],
        ),
        (lambda: quantized("int8").state_dict()["0.weight"], lambda: torch.zeros(32, 64)),
    ],
)
def test_a_target_of_another_kind_is_refused_and_not_changed(path, saved, target):
    penstock.save(path, {"x": saved()})
    state = {"x": target()}
    before = {"x": target()}
    with pytest.raises(StateMismatchError, match="x"):
        penstock.load(path, into=state)
    assert_same(state, before)


@pytest.fixture
def eager():
    """Disables compilation of the step, which takes half a minute and leaves workers behind."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def run(kind, steps, store, every=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 64)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-2)
    training = penstock.Training(model=model, optimizer=optimizer, step=0)
    store.resume(training)
    while training.step < steps:
        torch.manual_seed(training.step)
        optimizer.zero_grad()
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
        training.step += 1
        if training.step == every:
            store.save(training.step, training)
            break
    return training


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_with_moments_of_few_bits_goes_on_where_it_was(tmp_path, eager, kind):
    whole = run(kind, 6, penstock.CheckpointStore(tmp_path / "none"))
    store = penstock.CheckpointStore(tmp_path / "store")
    run(kind, 6, store, every=3)
    resumed = run(kind, 6, store)
    assert_same(resumed.state_dict(), whole.state_dict())


def test_dcp_saves_and_loads_what_it_does_by_itself(path, eager):
    def state(seed):
        model = quantized("int8", seed)
        moments = run("8-bit", 1 + seed, penstock.CheckpointStore(path.parent / "none")).optimizer
        return {
            "model": model.state_dict(),
            "optimizer": moments.state_dict(),
            "sparse": sparse(seed)["coo"],
        }

    saved, loaded = state(0), state(1)
    kept = loaded["model"]["0.weight"]
    dcp.save(saved, storage_writer=StorageWriter(path), no_dist=True)
    dcp.load(loaded, storage_reader=StorageReader(path), no_dist=True)
    assert_same(loaded, saved)
    assert loaded["model"]["0.weight"] is kept
    assert_same(penstock.load(path)["model"], dict(saved["model"]))


# Checkpoints are input: PyTorch's kernels trust the indices of such tensors.


@pytest.mark.parametrize(
    "node",
    [
        '{"$":"sparse","layout":"coo","shape":[2,2],"coalesced":false,"v":{"indices":I,"values":V}}',
        '{"$":"sparse","layout":"coo","shape":[4,9],"coalesced":true,"v":{"indices":I,"values":V}}',
        '{"$":"sparse","layout":"csr","shape":[2,9],"v":{"compressed":P,"plain":P,"values":V}}',
        '{"$":"sparse","layout":"coo","shape":[9,9],"coalesced":false,"v":{"indices":I}}',
        '{"$":"nested","sizes":[[9]],"v":{"values":V}}',
        '{"$":"nested","sizes":[[-1],[4]],"v":{"values":V}}',
        '{"$":"jagged","ragged":1,"v":{"values":V,"offsets":P}}',
        '{"$":"jagged","ragged":5,"v":{"values":V,"offsets":P}}',
        '{"$":"jagged","ragged":1,"v":{"values":V,"offsets":V}}',
        '{"$":"nested","sizes":[[3]],"v":{"values":{"$":"nested","sizes":[],"v":{}}}}',
        '{"$":"sparse","layout":"coo","shape":[9,9],"coalesced":false,"v":{"indices":1}}',
    ],
)
def test_numbers_that_reach_outside_are_refused(path, node):
    penstock.save(
        path,
        {
            "i": torch.tensor([[3, 1, 0], [0, 8, 0]]),
            "v": torch.ones(3),
            "p": torch.tensor([0, 7, 3]),
        },
    )
    for word, index in (("I", 0), ("V", 1), ("P", 2)):
        names = [one.name for one in penstock.inspect(path).tensors]
        number = names.index("ivp"[index])
        node = node.replace(f":{word}", f':{{"$":"tensor","i":{number}}}')
    Forgery(path).write_tree(f'{{"x":{node}}}')
    with pytest.raises(CorruptCheckpointError):
        penstock.load(path)


@pytest.mark.parametrize("name", ["torchao.nothing.Tensor", "torch.Tensor", "os.path", "evil.T"])
def test_a_class_that_is_not_known_is_named_and_is_no_damage(path, name):
    penstock.save(path, {"w": torch.ones(3)})
    Forgery(path).write_tree(
        f'{{"$":"subclass","type":"{name}","dtype":"float32","shape":[3],"strides":[1],'
        '"context":null,"v":{"w":{"$":"tensor","i":0}}}'
    )
    with pytest.raises(MissingDependencyError, match="register_type"):
        penstock.load(path)
    assert penstock.load(path, plain=True)["w"].tolist() == [1.0, 1.0, 1.0]
    assert penstock.verify(path).ok
