"""Every shard opens with the `safetensors` package and holds the same tensors."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import penstock
from compare import tensor_bytes
from forge import Forgery
from penstock.errors import StateMismatchError
from penstock.tensors.dtypes import ITEM_BYTES

# Types that safetensors names and reads into PyTorch; others are stored under a carrier.
NAMED = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    "float4_e2m1fn_x2",
)
TORCH_TYPES = [name for name in ITEM_BYTES if isinstance(getattr(torch, name, None), torch.dtype)]
GROUPS = {"model": ""}
INDEX = "model.safetensors.index.json"


def make_state():
    generator = torch.Generator().manual_seed(5)
    state = {}
    for name in NAMED:
        dtype = getattr(torch, name)
        item_bytes = torch.empty(0, dtype=dtype).element_size()
        most = 2 if name == "bool" else 256
        raw = torch.randint(0, most, (4 * 7 * item_bytes,), dtype=torch.uint8, generator=generator)
        state[name] = raw.view(dtype).reshape(4, 7)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.empty(0, 3)
    state["transposed"] = torch.rand(40, 30).t()
    state["pages"] = torch.rand(3, 4096)
    state["deep"] = {"list": [torch.rand(5)]}
    state["plain"] = "not a tensor"
    return state


def named_tensors(state):
    flat = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {**flat, "deep.list.0": state["deep"]["list"][0]}


@pytest.fixture(params=[None, 4096], ids=["one shard", "many shards"])
def saved(request, tmp_path):
    """Saves a checkpoint in one file or in many; returns it and its state."""
    state = make_state()
    options = penstock.Options(shard_bytes=request.param)
    penstock.save(tmp_path / "ckpt", state, options=options)
    files = sorted((tmp_path / "ckpt").glob("*.safetensors"))
    assert (len(files) > 2) == (request.param is not None)
    return files, named_tensors(state)


def assert_tensors(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert tensor_bytes(found[name]) == tensor_bytes(tensor), name


def test_load_file_gives_the_same_tensors(saved):
    files, expected = saved
    found = {}
    for file in files:
        tensors = safetensors.torch.load_file(file)
        assert not found.keys() & tensors.keys()
        found.update(tensors)
    assert_tensors(found, expected)


def test_loading_from_bytes_gives_the_same_tensors(tmp_path):
    expected = named_tensors(make_state())
    # safetensors' table for this function lacks two types that its `load_file` reads.
    del expected["float8_e8m0fnu"], expected["float4_e2m1fn_x2"]
    penstock.save(tmp_path / "ckpt", expected)
    (file,) = (tmp_path / "ckpt").glob("*.safetensors")
    assert_tensors(safetensors.torch.load(file.read_bytes()), expected)


def test_safe_open_gives_the_same_tensors(saved):
    files, expected = saved
    found = {}
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt", "penstock": "1"}
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    assert_tensors(found, expected)


def test_safe_open_gives_slices(saved):
    files, expected = saved
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            if "pages" in opened.keys():  # noqa: SIM118
                assert torch.equal(opened.get_slice("pages")[1:, 5:9], expected["pages"][1:, 5:9])
                return
    pytest.fail("no shard has the tensor")


def test_numpy_gives_the_same_arrays(tmp_path):
    dtypes = ("bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
    state = {name: np.arange(6).astype(name).reshape(2, 3) for name in dtypes}
    penstock.save(tmp_path / "ckpt", state)
    (file,) = (tmp_path / "ckpt").glob("*.safetensors")
    found = safetensors.numpy.load_file(file)
    assert set(found) == set(state)
    for name, array in state.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


CARRIED = {
    "complex128": (torch.float64, 2),
    "complex32": (torch.float16, 2),
    "bits8": (torch.uint8, None),
    "bits16": (torch.uint16, None),
    "int4": (torch.uint8, None),
    "uint7": (torch.uint8, None),
}


@pytest.mark.parametrize("name", list(CARRIED))
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_type_without_a_name_lies_under_a_carrier_of_the_same_bytes(tmp_path, name):
    carrier, last = CARRIED[name]
    dtype = getattr(torch, name)
    raw = torch.arange(96, dtype=torch.uint8)
    value = raw.view(dtype).reshape(2, -1)
    penstock.save(tmp_path / "ckpt", {"x": value})
    (file,) = (tmp_path / "ckpt").glob("*.safetensors")
    found = safetensors.torch.load_file(file)["x"]
    assert found.dtype == carrier
    assert found.shape == ((*value.shape, last) if last else value.shape)
    assert tensor_bytes(found) == tensor_bytes(raw)


@pytest.mark.parametrize("name", TORCH_TYPES)
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_another_reader_sees_the_same_elements_or_is_not_led_to_them(tmp_path, name):
    raw = torch.arange(96, dtype=torch.uint8) % (2 if name == "bool" else 251)
    value = raw.view(getattr(torch, name)).reshape(2, -1)
    state = {"model": {"x": value, "y": torch.ones(3)}}
    report = penstock.save(tmp_path / "ckpt", state, groups=GROUPS)
    assert penstock.verify(tmp_path / "ckpt").ok
    assert tensor_bytes(penstock.load(tmp_path / "ckpt")["model"]["x"]) == tensor_bytes(raw)
    reasons = [str(one) for one in report.fallbacks if one.kind == "unindexed"]
    assert (tmp_path / "ckpt" / INDEX).exists() == (name in NAMED)
    if name in NAMED:
        assert not reasons
        places = json.loads((tmp_path / "ckpt" / INDEX).read_text())["weight_map"]
        penstock.export(tmp_path / "ckpt", tmp_path / "out", check=False)
        files = (tmp_path / "ckpt" / places["x"], tmp_path / "out" / "model.safetensors")
        for file in files:
            assert_tensors(safetensors.torch.load_file(file), state["model"])
        return
    (reason,) = reasons
    assert name in reason
    assert "x has" in reason
    for out in (None, tmp_path / "out"):
        with pytest.raises(StateMismatchError):
            penstock.export(tmp_path / "ckpt", out, check=False)
    assert not (tmp_path / "out").exists()


def test_a_scalar_of_two_halves_has_no_name_of_its_own(tmp_path):
    value = torch.tensor(7, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    report = penstock.save(tmp_path / "ckpt", {"model": {"x": value}}, groups=GROUPS)
    assert [one.kind for one in report.fallbacks if one.kind == "unindexed"] == ["unindexed"]
    assert penstock.load(tmp_path / "ckpt")["model"]["x"].view(torch.uint8) == 7
    with pytest.raises(StateMismatchError, match=r"x has elements of type float4"):
        penstock.export(tmp_path / "ckpt", tmp_path / "out", check=False)


def test_a_group_with_text_has_no_index(tmp_path):
    state = {"model": {"x": np.array(["ab", "c"]), "y": np.ones(3)}}
    report = penstock.save(tmp_path / "ckpt", state, groups=GROUPS)
    (reason,) = (str(one) for one in report.fallbacks if one.kind == "unindexed")
    assert "numpy:<U2" in reason
    assert not (tmp_path / "ckpt" / INDEX).exists()


def as_earlier_writers_had_it(path):
    """Renames element types to plain bytes, as earlier versions wrote them."""
    forgery = Forgery(path)
    file = forgery.shard_file()
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    for row in forgery.part["tensors"]:
        row["stored"] = {"dtype": "U8", "shape": row["shape"]}
        header[row.get("stored_name", row["name"])] |= row["stored"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(begin - 8)
    forgery.write_shard(data[:8] + text + data[begin:])


def test_shards_of_earlier_writers_are_read_and_exported_under_the_names_of_now(tmp_path):
    path = tmp_path / "ckpt"
    expected = {
        name: torch.arange(12, dtype=torch.uint8).view(getattr(torch, name)).reshape(3, 4)
        for name in ("float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    }
    penstock.save(path, {"model": expected}, groups=GROUPS)
    as_earlier_writers_had_it(path)
    assert penstock.verify(path).ok
    for name, tensor in penstock.load(path)["model"].items():
        assert tensor_bytes(tensor) == tensor_bytes(expected[name])
    # Its index leads other tools to the plain bytes.
    with pytest.raises(StateMismatchError, match="misread"):
        penstock.export(path)
    report = penstock.export(path, tmp_path / "out", check=False, hard_link=True)
    assert report.way == "copy"
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert_tensors(found, expected)


def test_text_lies_in_a_shard_as_bytes(tmp_path):
    value = np.array(["ab", "c"])
    penstock.save(tmp_path / "ckpt", {"x": value})
    (file,) = (tmp_path / "ckpt").glob("*.safetensors")
    found = safetensors.numpy.load_file(file)["x"]
    assert (found.dtype, found.shape) == (np.uint8, (2, 8))
    assert found.tobytes() == value.tobytes()


def test_every_tensor_starts_aligned_and_data_on_a_page(saved):
    files, _ = saved
    for file in files:
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        assert start % 4096 == 0
        header = json.loads(data[8:start])
        header.pop("__metadata__")
        sizes = {"BOOL": 1, "BF16": 2, "C64": 8}
        for name, row in header.items():
            digits = "".join(filter(str.isdigit, row["dtype"].partition("_")[0]))
            item_bytes = sizes.get(row["dtype"]) or max(int(digits) // 8, 1)
            assert row["data_offsets"][0] % item_bytes == 0, name


def test_no_shard_is_larger_than_asked_for(tmp_path):
    state = [torch.zeros(1000) for _ in range(20)]
    options = penstock.Options(shard_bytes=10_000)
    report = penstock.save(tmp_path / "ckpt", state, options=options)
    files = list((tmp_path / "ckpt").glob("*.safetensors"))
    assert report.files == len(files) + 2
    for file in files:
        header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size - header_bytes <= 10_000


def test_a_state_without_tensors_has_no_shard(tmp_path):
    penstock.save(tmp_path / "ckpt", {"step": 1})
    assert not list((tmp_path / "ckpt").glob("*.safetensors"))
    assert penstock.load(tmp_path / "ckpt") == {"step": 1}


def test_transformers_loads_a_model_from_our_shard(tmp_path):
    from transformers import GPT2LMHeadModel

    from training import gpt2

    model = gpt2()
    penstock.save(tmp_path / "ckpt", model.state_dict())
    (file,) = (tmp_path / "ckpt").glob("*.safetensors")
    (tmp_path / "hub").mkdir()
    model.config.save_pretrained(tmp_path / "hub")
    shutil.copy(file, tmp_path / "hub" / "model.safetensors")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "hub").state_dict()
    assert set(loaded) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert tensor_bytes(loaded[name]) == tensor_bytes(tensor), name
