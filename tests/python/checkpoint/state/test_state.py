"""Supported values of a state, and that they are restored exactly.

The states are saved to real files; `identical` is stricter than ``==``: types, bits of NaNs, order
of dictionaries, dtypes.
"""

import collections
import math
import os
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.checkpoint.state.flatten import flatten
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.tensors.dtypes import ITEM_BYTES, torch_dtypes


@pytest.fixture(scope="module")
def roundtrip(tmp_path_factory):
    """Returns a function that saves a state over the last one and loads it."""
    path = tmp_path_factory.mktemp("state") / "ckpt"

    def through_files(state):
        penstock.save(path, state, overwrite=True)
        return penstock.load(path)

    return through_files


def tensor_bytes(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    # PyTorch cannot copy int4 and similar types, only bytes.
    plain = plain.view(torch.uint8) if plain.itemsize == 1 else plain
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def same_items(a, b):
    # Extended floats have padding, which NumPy itself does not preserve.
    return a.tobytes() == b.tobytes() or (a.dtype.char in "gG" and str(a) == str(b))


def identical(a, b):
    """Whether two states are equal in everything that Penstock promises to preserve."""
    if isinstance(a, torch.Tensor):
        return (
            type(b) is torch.Tensor
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and torch.equal(tensor_bytes(a), tensor_bytes(b))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and same_items(a, b)
    if isinstance(a, dict):
        return (
            len(a) == len(b)
            and all(map(identical, a, b))
            and all(map(identical, a.values(), b.values()))
            and getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
            and identical(getattr(a, "_metadata", None), getattr(b, "_metadata", None))
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and same_items(a, b)
    if isinstance(a, set | frozenset):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return a == b


# Plain values.

floats = st.one_of(
    st.floats(allow_nan=False),
    st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 5e-324]),
    st.integers(0, 2**64 - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0]),
)
texts = st.text(st.characters(codec=None, categories=None), max_size=12)
numpy_scalars = st.one_of(
    st.sampled_from([np.float16, np.float32, np.float64, np.longdouble, np.complex64]).flatmap(
        lambda kind: st.floats(width=16).map(kind)
    ),
    st.sampled_from([np.int8, np.uint64, np.bool_]).map(lambda kind: kind(1)),
    texts.map(np.str_),
    st.binary(max_size=9).map(np.bytes_),
    st.sampled_from(
        [np.datetime64("NaT"), np.datetime64("2026-01-01", "s"), np.timedelta64(3, "s")]
    ),
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.tuples(inner) | st.tuples(inner, inner),
    max_leaves=3,
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**2000), max_value=2**2000),
    floats,
    st.builds(complex, floats, floats),
    texts,
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.sampled_from([4096, 4097]).flatmap(lambda n: st.sampled_from([bytes(n), bytearray(n)])),
    numpy_scalars,
    st.builds(range, st.integers(), st.integers(), st.integers(1, 3)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.sampled_from([torch.Size([]), torch.Size([2, 3]), torch.float32, torch.qint8]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("mps")]),
    st.sampled_from([np.dtype("f4"), np.dtype(">i2"), np.dtype("U7"), np.dtype("M8[us]")]),
    st.frozensets(keys, max_size=3),
    st.frozensets(keys, max_size=3).map(set),
)
arrays = st.one_of(
    st.sampled_from([(), (0,), (3,), (2, 0), (2, 3)]).flatmap(
        lambda shape: st.sampled_from(
            [torch.bfloat16, torch.float64, torch.bool, torch.complex128, torch.int16]
        ).map(lambda dtype: torch.ones(shape, dtype=dtype))
    ),
    st.sampled_from([np.arange(6.0), np.array("abc"), np.zeros((0, 2), ">f4"), np.eye(3).T[::2]]),
)


def containers(inner):
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts | st.just("$"), inner, max_size=4),
        pairs.map(dict),
        pairs.map(OrderedDict),
        pairs.map(dict).map(Counter),
        pairs.map(lambda items: defaultdict(list, items)),
    )


states = st.recursive(atoms | arrays, containers, max_leaves=20)


# `make test-slow` draws more of them.
@settings(
    max_examples=int(os.environ.get("PENSTOCK_TORTURE_FAMILIES", 100)),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(states)
def test_any_nesting_of_anything_comes_back(roundtrip, state):
    assert identical(state, roundtrip(state))


@settings(max_examples=50, deadline=None)
@given(states)
def test_saving_what_was_loaded_stores_the_same(roundtrip, state):
    before, after = flatten(state), flatten(roundtrip(state))
    assert [source[:3] for source in before.tensors] == [source[:3] for source in after.tensors]


@pytest.mark.parametrize("factory", [None, int, list, dict, set, str, tuple, float])
def test_a_defaultdict_of_a_builtin_goes_on_making_values(roundtrip, factory):
    state = defaultdict(factory, {"a": 1})
    again = roundtrip(state)
    assert identical(state, again)
    if factory is not None:
        assert again["new"] == factory()


def test_integers_longer_than_python_prints_come_back(roundtrip):
    state = {10**6000: [-(10**6000)], "plain": torch.ones(2)}
    assert identical(state, roundtrip(state))


def test_levels_are_bounded(roundtrip):
    def nested(levels):
        state = 1
        for level in range(levels):
            state = [state] if level % 3 else {7: state} if level % 2 else (state,)
        return state

    deepest = nested(128)
    assert identical(deepest, roundtrip(deepest))
    with pytest.raises(UnsupportedStateError, match="deeper than 128 levels"):
        flatten(nested(129))


# Tensors and arrays.


@pytest.mark.filterwarnings("ignore:.*Complex.* support is experimental")
@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_torch_dtype_comes_back_bit_exact(roundtrip, name):
    dtype = torch_dtypes().get(name)
    if dtype is None:
        pytest.skip(f"this PyTorch has no {name}")
    generator = np.random.default_rng(7)
    top = 2 if name == "bool" else 256
    raw = torch.from_numpy(generator.integers(0, top, 12 * ITEM_BYTES[name], np.uint8))
    flat = raw.view(dtype)
    state = {
        "flat": flat,
        "matrix": flat.view(3, 4),
        "other": raw.clone().view(dtype).view(3, 4).t(),
        "scalar": raw[: ITEM_BYTES[name]].clone().view(dtype).view(()),
        "empty": flat[:0].view(0, 3),
    }
    assert identical(state, roundtrip(state))


@pytest.mark.parametrize(
    "dtype",
    [*"?bBhHiIlLefdgFDG", "<U5", ">U2", "S3", "V4", ">f4", ">i8", "M8[ns]", "m8[25s]", "M8"],
)
def test_every_plain_numpy_dtype_comes_back(roundtrip, dtype):
    array = np.array([[b"1", b"0", b"11"], [b"", b"01", b"0"]], "S2")
    array = (array == b"0").astype(dtype) if np.dtype(dtype).kind != "V" else np.ones(6, "i4")
    array = array.view(dtype).reshape(2, 3)
    state = {"array": array, "turned": array.copy().T, "scalar": array[0, 0], "empty": array[:0]}
    assert identical(state, roundtrip(state))


def test_layouts_are_read_where_they_are(roundtrip):
    base = torch.arange(60.0).view(3, 4, 5)
    image = torch.arange(48.0).view(1, 3, 4, 4).to(memory_format=torch.channels_last)
    array = np.arange(24).reshape(4, 6)
    state = {
        "transposed": base.clone().transpose(0, 2),
        "strided": base.clone()[::2, 1:, ::3],
        "expanded": torch.tensor([1.0, 2.0]).view(2, 1).expand(2, 3),
        "channels_last": image,
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "graph": torch.ones(3, requires_grad=True) * 2,
        "fortran": np.asfortranarray(array),
        "backwards": array.copy()[::-1, ::-2],
        "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
        "read_only": np.frombuffer(b"abcdefgh", np.uint16),
    }
    loaded = roundtrip(state)
    assert identical(state, loaded)
    assert all(value.flags.writeable for value in loaded.values() if isinstance(value, np.ndarray))
    assert not loaded["parameter"].requires_grad


def test_buffers_and_dlpack_come_back_as_arrays(roundtrip, tmp_path):
    import array

    class Dlpack:
        def __init__(self, value):
            self._value = value

        def __dlpack__(self, **kwargs):
            return self._value.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self._value.__dlpack_device__()

    mapped = np.memmap(tmp_path / "map", np.int32, "w+", shape=(2, 2))
    mapped[:] = 7
    loaded = roundtrip(
        {
            "array": array.array("d", [1, 2]),
            "view": memoryview(b"abcdef").cast("B", (2, 3)),
            "dlpack": Dlpack(torch.arange(3)),
            "mapped": mapped,
        }
    )
    assert identical(loaded["array"], np.array([1.0, 2.0]))
    assert identical(loaded["view"], np.frombuffer(b"abcdef", np.uint8).reshape(2, 3))
    assert identical(loaded["dlpack"], np.arange(3))
    assert identical(loaded["mapped"], np.full((2, 2), 7, np.int32))


def test_tensors_of_another_device_come_back_on_the_host(roundtrip, tmp_path):
    lazy = pytest.importorskip("torch._lazy.ts_backend", reason="the only device here is the CPU")
    lazy.init()
    on_device = torch.arange(6.0).view(2, 3).to("lazy")
    host = torch.arange(6.0).view(2, 3)
    loaded = roundtrip({"a": on_device, "same": on_device, "turned": on_device.t()})
    assert identical({"a": host, "same": host, "turned": host.t()}, loaded)
    assert loaded["a"] is loaded["same"]
    penstock.save(tmp_path / "ckpt", {"a": host, "n": np.ones(2)})
    placed = penstock.load(tmp_path / "ckpt", device="lazy")
    assert placed["a"].device.type == "lazy"
    assert isinstance(placed["n"], np.ndarray)
    target = torch.zeros(2, 3, device="lazy")
    penstock.load(tmp_path / "ckpt", into={"a": target, "n": np.zeros(2)})
    assert identical(host, target.cpu())


# Ties.


def test_ties_are_stored_once_and_come_back(roundtrip):
    w = torch.randn(4, 6)
    state = {
        "turned": w.t(),
        "rows": w[1:3],
        "column": w[:, 2],
        "flat": w.view(-1),
        "one": w[0, 0].expand(3),
        "w": w,
        "same": w,
        "detached": torch.nn.Parameter(w).detach(),
        "array": w.numpy()[::-1],
    }
    assert len(flatten(state).tensors) == 1
    loaded = roundtrip(state)
    assert identical(state, loaded)
    loaded["w"].fill_(7)
    assert all((value == 7).all() for value in loaded.values())
    assert loaded["w"] is loaded["same"]


def test_arrays_are_tied_like_tensors(roundtrip):
    w = np.arange(12.0).reshape(3, 4)
    loaded = roundtrip([w, w.T, w[1], torch.from_numpy(w)])
    loaded[0][:] = 7
    assert all((value == 7).all() for value in loaded)


def test_overlaps_without_a_container_are_independent(roundtrip):
    base = torch.arange(10.0)
    left, right = base[:6], base[4:]
    loaded = roundtrip([left, right])
    assert identical([left, right], loaded)
    loaded[0].fill_(0)
    assert identical(right, loaded[1])


def test_other_types_over_the_same_memory_are_stored_apart(roundtrip):
    w = torch.arange(4.0)
    state = [w, w.view(torch.int32), w.view(torch.uint8)]
    assert len(flatten(state).tensors) == 3
    assert identical(state, roundtrip(state))


def test_empty_tensors_are_tied_by_identity_alone(roundtrip):
    empty = torch.empty(0)
    loaded = roundtrip([empty, torch.empty(0), empty])
    assert loaded[0] is loaded[2]
    assert loaded[0] is not loaded[1]


def test_a_freed_storage_is_never_read():
    parameter = torch.ones(1000)
    parameter.untyped_storage().resize_(8)
    with pytest.raises(UnsupportedStateError, match=r"^w: .*freed or resized"):
        flatten({"w": parameter})


# Modules and optimizers.


def test_module_and_optimizer_states_come_back_and_load(roundtrip):
    def build():
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        return module, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])

    trained = build()
    for _ in range(2):
        trained[0](torch.ones(3, 4) * 0.5).pow(2).sum().backward()
        trained[1].step()
        trained[2].step()
    state = [part.state_dict() for part in trained]
    loaded = roundtrip(state)
    assert identical(state, loaded)
    fresh = build()
    for part, part_state in zip(fresh, loaded, strict=True):
        part.load_state_dict(part_state)
    assert identical(state, [part.state_dict() for part in fresh])


# Names.


def test_names_of_tensors_are_unique_and_printable():
    one = [torch.ones(1) for _ in range(6)]
    state = {"a.b": one[0], "a": {"b": one[1]}, "": one[2], "__metadata__": one[3], 3: [one[4]]}
    names = [source[0] for source in flatten({**state, "\ud800": one[5]}).tensors]
    assert names == ["a.b", "a.b~2", "~2", "__metadata__~2", "3.0", "\\ud800"]
    assert [source[0] for source in flatten(one[0]).tensors] == ["value"]


# Parts of a state.


@pytest.fixture
def saved(tmp_path):
    state = {
        "model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)},
        "optim": [(torch.zeros(2), 0.1), {"lr": 0.5, 3: "three"}],
        "none": {},
        "step": 7,
    }
    state["model"]["tied"] = state["model"]["w"].t()
    path = tmp_path / "ckpt"
    penstock.save(path, state, step=7, metadata={"run": [1, 2.5, None]})
    return path, state


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("step", lambda s: {"step": 7}),
        (["model.b", "step"], lambda s: {"model": {"b": s["model"]["b"]}, "step": 7}),
        ("optim.*", lambda s: {"optim": s["optim"]}),
        ("*.0.1", lambda s: {"optim": [(0.1,)]}),
        ("optim.1.3", lambda s: {"optim": [{3: "three"}]}),
        ("model.tied", lambda s: {"model": {"tied": s["model"]["tied"]}}),
        ("n?ne", lambda s: {"none": {}}),
        ("*", lambda s: s),
    ],
)
def test_keys_choose_leaves(saved, keys, expected):
    path, state = saved
    assert identical(expected(state), penstock.load(path, keys=keys))


def test_only_what_was_asked_for_is_read(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, {"large": torch.zeros(4 << 20), "small": torch.ones(4)})
    reports = []
    penstock.load(path, keys="small", report=reports.append)
    assert reports[0].bytes == 16
    assert reports[0].bytes_read < 4 << 20
    assert set(reports[0].phases) == {"open", "read", "build"}


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [("model", r"model\.\*"), ("model.v", "did you mean 'model.w'"), ("???", "inspect")],
)
def test_a_key_that_matches_nothing_says_what_would(saved, keys, remedy):
    with pytest.raises(StateMismatchError, match=remedy) as caught:
        penstock.load(saved[0], keys=["step", keys])
    assert caught.value.key == keys


def test_a_state_of_one_leaf_is_called_value(tmp_path):
    penstock.save(tmp_path / "ckpt", 5)
    assert penstock.load(tmp_path / "ckpt", keys="value") == 5


def test_inspect_lists_tensors_aliases_and_values(saved):
    path, _ = saved
    info = penstock.inspect(path)
    assert (info.step, info.metadata, info.world_size) == (7, {"run": [1, 2.5, None]}, 1)
    assert [(t.name, t.dtype, t.shape, t.bytes) for t in info.tensors] == [
        ("model.w", "float32", (2, 3), 24),
        ("model.b", "float32", (3,), 12),
        ("optim.0.0", "float32", (2,), 8),
    ]
    assert info.aliases == {"model.tied": "model.w"}
    assert info.tensor_bytes == 44
    assert info.bytes == sum(file.bytes for file in info.files)
    assert info.values() == {
        "optim.0.1": 0.1,
        "optim.1.lr": 0.5,
        "optim.1.3": "three",
        "none": {},
        "step": 7,
    }


# Into existing memory.


def test_into_fills_in_place(saved):
    path, state = saved
    w, b, moment = torch.zeros(2, 3), torch.zeros(3, 2)[:, 0], np.zeros(2, "f4")
    target = {
        "model": {"w": w, "b": b, "tied": torch.zeros(2, 3).t()},
        "optim": [(moment, 0), {"lr": 0, 3: ""}],
        "none": {},
        "step": 0,
    }
    assert penstock.load(path, into=target) is target
    assert target["model"]["w"] is w
    assert target["model"]["b"] is b
    assert target["optim"][0][0] is moment
    moment_tensor = torch.from_numpy(moment)
    target["optim"][0] = (moment_tensor, target["optim"][0][1])
    assert identical(state, target)


def test_into_keeps_ties_of_the_target(saved):
    path, state = saved
    w = torch.nn.Parameter(torch.zeros(2, 3))
    version = w._version
    target = {"model": {"w": w, "tied": w.detach().t()}}
    penstock.load(path, keys=["model.w", "model.tied"], into=target)
    assert identical(state["model"]["w"], w.detach())
    assert identical(state["model"]["tied"], target["model"]["tied"])
    assert w._version > version


def test_into_with_keys_touches_nothing_else(saved):
    path, state = saved
    target = {"model": {"b": torch.zeros(3)}, "optim": [None, {"lr": 0}], "mine": "kept"}
    penstock.load(path, keys=["model.b", "optim.1.lr"], into=target)
    expected = {"model": {"b": state["model"]["b"]}, "optim": [None, {"lr": 0.5}], "mine": "kept"}
    assert identical(expected, target)


def test_into_fills_module_and_optimizer_states_with_their_metadata(tmp_path):
    module = torch.nn.Linear(3, 3)
    penstock.save(tmp_path / "ckpt", module.state_dict())
    other = torch.nn.Linear(3, 3)
    target = other.state_dict()
    del target._metadata
    penstock.load(tmp_path / "ckpt", into=target)
    assert identical(module.state_dict(), other.state_dict())
    assert target._metadata == module.state_dict()._metadata


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (lambda t: t["model"].pop("w"), "model.w", "not in the target"),
        (lambda t: t.update(more=1), "more", "not in the checkpoint"),
        (lambda t: t["model"].update(w=torch.zeros(3, 2)), "model.w", r"shape \[2, 3\]"),
        (lambda t: t["model"].update(b=torch.zeros(3).half()), "model.b", "dtype float32"),
        (lambda t: t["model"].update(b=torch.zeros(1).expand(3)), "model.b", "expanded"),
        (lambda t: t["model"].update(b=torch.zeros(3, device="meta")), "model.b", "meta"),
        (lambda t: t["model"].update(b=torch.zeros(3).to_sparse()), "model.b", "sparse"),
        (lambda t: t["model"].update(b=np.frombuffer(bytes(12), "f4")), "model.b", "read-only"),
        (lambda t: t["model"].update(b=3), "model.b", "a value of type int"),
        (lambda t: t.update(step=torch.zeros(1)), "step", "a plain value"),
        (lambda t: t.update(optim={}), "optim", "list in the checkpoint, dict"),
        (lambda t: t["optim"].append(1), "optim.2", "not in the checkpoint"),
        (lambda t: t["model"].update(b=t["model"]["w"][0]), "model.w", "shares memory"),
    ],
)
def test_into_that_does_not_fit_changes_nothing(saved, change, key, words):
    path, _ = saved
    w, moment = torch.zeros(2, 3), torch.zeros(2)
    target = {
        "model": {"w": w, "b": torch.zeros(3), "tied": torch.zeros(3, 2)},
        "optim": [(moment, 0), {"lr": 0, 3: ""}],
        "none": {},
        "step": 0,
    }
    change(target)
    with pytest.raises(StateMismatchError, match=words) as caught:
        penstock.load(path, into=target)
    assert caught.value.key == key
    assert key in str(caught.value)
    assert caught.value.path == str(path)
    assert not w.any()
    assert not moment.any()


def test_columns_of_one_matrix_are_different_targets(tmp_path):
    penstock.save(tmp_path / "ckpt", [torch.full((3,), float(i)) for i in range(4)])
    matrix = torch.zeros(3, 4)
    penstock.load(tmp_path / "ckpt", into=list(matrix.unbind(1)))
    assert identical(torch.arange(4.0).repeat(3, 1), matrix)


def test_a_single_element_is_filled_whatever_its_stride(tmp_path):
    one = torch.ones(1)
    penstock.save(tmp_path / "tied", {"a": one, "b": one})
    target = {"a": torch.zeros(4)[::2][:1], "b": torch.zeros(1)}
    penstock.load(tmp_path / "tied", into=target)
    assert identical({"a": one, "b": one}, target)


def test_a_graph_over_what_was_filled_fails_instead_of_lying(tmp_path):
    penstock.save(tmp_path / "ckpt", torch.zeros(3))
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    penstock.load(tmp_path / "ckpt", into=weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_device_and_into_exclude_each_other(saved):
    with pytest.raises(ValueError, match="device="):
        penstock.load(saved[0], into={}, device="cpu")
    with pytest.raises(ValueError, match="cannot be used"):
        penstock.load(saved[0], device="nonsense")


# Without PyTorch.


def test_without_torch_tensors_come_back_as_arrays(tmp_path):
    w = torch.arange(6.0).view(2, 3)
    penstock.save(tmp_path / "ckpt", {"w": w, "t": w.t(), "half": torch.ones(2).bfloat16()})
    program = """
import sys
sys.modules["torch"] = sys.modules["ml_dtypes"] = None
import numpy, penstock
loaded = penstock.load(sys.argv[1], keys=["w", "t"])
assert loaded["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
assert numpy.shares_memory(loaded["w"], loaded["t"])
into = {"w": numpy.zeros((2, 3), "f4")}
assert penstock.load(sys.argv[1], keys="w", into=into)["w"][1, 2] == 5
try:
    penstock.load(sys.argv[1])
except ImportError as error:
    assert isinstance(error, penstock.PenstockError), error
    assert "pip install 'penstock[torch]'" in str(error), error
else:
    raise AssertionError("bfloat16 has no NumPy type")
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "ckpt")], check=True)


def test_paths_of_every_kind_are_taken(tmp_path):
    for path in (tmp_path / "a", str(tmp_path / "b"), bytes(tmp_path / "c") + b"\xff"):
        report = penstock.save(path, {"step": 1})
        assert penstock.load(path) == {"step": 1}
        assert report.path == penstock.inspect(path).path == os.fsdecode(path)
    for path, error in [("", ValueError), ("a\0b", ValueError), (3.5, TypeError)]:
        with pytest.raises(error):
            penstock.save(path, {})


def test_a_step_may_be_any_whole_number(tmp_path):
    store = penstock.CheckpointStore(bytes(tmp_path) + b"/\xff")
    store.save(np.int64(3), {})
    assert store.steps() == [3]
    for step, error in [(-1, ValueError), (True, TypeError), (1.0, TypeError), (2**63, ValueError)]:
        with pytest.raises(error, match="step="):
            store.path(step)


def test_ordered_collections_keep_their_order(roundtrip):
    state = {"z": 1, "a": 2, 10: 3, 9: 4}
    assert list(roundtrip(state)) == list(state)
    assert list(roundtrip(collections.OrderedDict(state))) == list(state)
