"""A leaf that cannot be restored exactly is refused by name with a remedy; nothing is written."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import fractions
import functools
import os
import pathlib
import random
import threading
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import UnsupportedStateError


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


class Integer(int):
    pass


class Float(float):
    pass


class Bytes(bytes):
    pass


class List(list):
    pass


class Tuple(tuple):
    __slots__ = ()


class Dict(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class Tensor(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    """A tensor subclass that PyTorch can flatten, but that is not registered."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, shape, strides):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


class Deque(collections.deque):
    pass


class Day(dt.date):
    pass


class Zone(dt.tzinfo):
    def utcoffset(self, when):
        return dt.timedelta(0)


class Route(pathlib.PurePosixPath):
    pass


class Array(np.ndarray):
    pass


Point = collections.namedtuple("Point", "x y")


@dataclass
class Data:
    x: int = 1


def dtensor():
    from torch.distributed.tensor import DeviceMesh, distribute_tensor
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("fake", store=store, rank=0, world_size=1)
    try:
        return distribute_tensor(torch.ones(2), DeviceMesh("cpu", [0]))
    finally:
        torch.distributed.destroy_process_group()


def fake_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def functional_tensor():
    return torch._to_functional_tensor(torch.ones(3))


def batched_tensor():
    """A tensor inside vmap has no memory of its own."""
    kept = []
    torch.vmap(lambda x: kept.append(x) or x)(torch.ones(2, 3))
    return kept[0]


def freed_tensor():
    """FSDP frees the storage of parameters like this."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_tensor():
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(2000)
    return tensor


def structured():
    return np.zeros(3, [("a", "<f4"), ("b", "<i8")])


def ordered_with_attributes():
    value = collections.OrderedDict(a=1)
    value.note = "x"
    return value


def quantized():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


TENSORS = {
    "quantized": quantized,
    "quantized-per-channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.quint8
    ),
    "meta": lambda: torch.empty(3, device="meta"),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "dtensor": dtensor,
    "fake": fake_tensor,
    "functional": functional_tensor,
    "batched": batched_tensor,
    "freed": freed_tensor,
    "cut": cut_tensor,
    "subclass": lambda: torch.ones(3).as_subclass(Tensor),
    "wrapper": lambda: Wrapper(torch.ones(3)),
    "buffer": lambda: torch.nn.parameter.UninitializedParameter(),
}

OTHERS = {
    "function": lambda: print,
    "lambda": lambda: lambda: None,
    "partial": lambda: functools.partial(int),
    "method": lambda: [].append,
    "class": lambda: int,
    "module": lambda: os,
    "object": object,
    "dataclass": Data,
    "enum": lambda: Colour.RED,
    "int-enum": lambda: Number.ONE,
    "named-tuple": lambda: Point(1, 2),
    "str-subclass": lambda: Text("a"),
    "int-subclass": lambda: Integer(1),
    "float-subclass": lambda: Float(1),
    "bytes-subclass": lambda: Bytes(b"a"),
    "list-subclass": lambda: List([1]),
    "tuple-subclass": lambda: Tuple((1,)),
    "dict-subclass": lambda: Dict(a=1),
    "ordered-subclass": lambda: Ordered(a=1),
    "ordered-attributes": ordered_with_attributes,
    "mapping-proxy": lambda: types.MappingProxyType({}),
    "default-of-code": lambda: collections.defaultdict(lambda: 0),
    "iterator": lambda: iter([1]),
    "generator": lambda: (x for x in [1]),
    "deque-subclass": lambda: Deque([1]),
    "date-subclass": lambda: Day(2024, 1, 1),
    "zone-of-code": lambda: dt.datetime(2024, 1, 1, tzinfo=Zone()),
    "path-subclass": lambda: Route("x"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "lock": threading.Lock,
    "random": random.Random,
    "numpy-generator": np.random.default_rng,
    "torch-generator": torch.Generator,
    "module-of-torch": lambda: torch.nn.Linear(1, 1),
    "optimizer": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1),
    "structured-array": structured,
    "structured-scalar": lambda: structured()[0],
    "object-array": lambda: np.array([None, {}], dtype=object),
    "array-subclass": lambda: np.zeros(3).view(Array),
    "masked-array": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "matrix": lambda: np.matrix([[1]]),
    "record-array": lambda: np.rec.array([(1, 2.0)], names="a,b"),
    "string-array": lambda: np.array(["a"], dtype=np.dtypes.StringDType()),
    "structured-dtype": lambda: np.dtype([("a", "i4")]),
    "slice-of-others": lambda: slice("a"),
    "ellipsis": lambda: ...,
    "not-implemented": lambda: NotImplemented,
    "exception": lambda: ValueError("x"),
    "key-of-bytes": lambda: {b"a": 1},
    "key-of-enum": lambda: {Colour.RED: 1},
    "key-of-numpy": lambda: {np.float64(1): 1},
    "key-of-frozenset": lambda: {frozenset(): 1},
    "key-of-tensor": lambda: {torch.ones(1): 1},
    "set-of-tensors": lambda: {torch.ones(1)},
    "set-of-long-bytes": lambda: {bytes(5000)},
    "set-of-enums": lambda: {Colour.RED},
}

ALL = {**TENSORS, **OTHERS}


@pytest.mark.parametrize("kind", list(ALL))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PendingDeprecationWarning")
def test_a_leaf_that_cannot_be_stored_is_named_and_nothing_is_written(tmp_path, kind):
    state = {"model": {"good": torch.ones(3), "layers": [0, ALL[kind]()]}, "step": 1}
    with pytest.raises(UnsupportedStateError) as raised:
        penstock.save(tmp_path / "ckpt", state)
    error = raised.value
    assert error.key == "model.layers.1" or error.key.startswith("model.layers.1.")
    assert error.key in str(error)
    assert isinstance(error, TypeError)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", list(ALL))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PendingDeprecationWarning")
def test_the_message_of_a_refusal_says_what_can_be_done(tmp_path, kind):
    with pytest.raises(UnsupportedStateError, match=r": .{8}") as raised:
        penstock.save(tmp_path / "ckpt", {"x": ALL[kind]()})
    assert not str(raised.value).endswith(".")


@pytest.mark.parametrize("kind", ["quantized", "function"])
def test_a_refusal_leaves_the_checkpoint_that_is_there(tmp_path, kind):
    penstock.save(tmp_path / "ckpt", {"x": 1})
    before = sorted(os.listdir(tmp_path / "ckpt"))
    with pytest.raises(UnsupportedStateError):
        penstock.save(tmp_path / "ckpt", {"x": ALL[kind]()}, overwrite=True)
    assert sorted(os.listdir(tmp_path / "ckpt")) == before
    assert penstock.load(tmp_path / "ckpt") == {"x": 1}


@pytest.mark.parametrize("make", [list, dict, collections.OrderedDict], ids=lambda c: c.__name__)
def test_a_cycle_is_refused(tmp_path, make):
    inner = make()
    outer = {"a": [inner]}
    if isinstance(inner, dict):
        inner["back"] = outer
        key = "a.0.back"
    else:
        inner.append(outer)
        key = "a.0.0"
    with pytest.raises(UnsupportedStateError, match="contains itself") as raised:
        penstock.save(tmp_path / "ckpt", outer)
    assert raised.value.key == key
    assert not os.listdir(tmp_path)


def test_a_container_that_occurs_twice_is_no_cycle(tmp_path):
    shared = [1]
    penstock.save(tmp_path / "ckpt", [shared, shared, {"a": shared}])
    assert penstock.load(tmp_path / "ckpt") == [[1], [1], {"a": [1]}]


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}])
def test_129_levels_are_refused(tmp_path, make):
    state = 0
    for _ in range(129):
        state = make(state)
    with pytest.raises(UnsupportedStateError, match="128 levels"):
        penstock.save(tmp_path / "ckpt", state)
    assert not os.listdir(tmp_path)


def test_a_million_levels_are_refused(tmp_path):
    state = []
    for _ in range(1_000_000):
        state = [state]
    with pytest.raises(UnsupportedStateError, match="128 levels"):
        penstock.save(tmp_path / "ckpt", state)
    while state:
        state = state.pop()


def test_a_key_of_a_thousand_nested_tuples_is_refused(tmp_path):
    key = ()
    for _ in range(1000):
        key = (key,)
    with pytest.raises(UnsupportedStateError):
        penstock.save(tmp_path / "ckpt", {key: 1})
    assert not os.listdir(tmp_path)


def test_metadata_that_is_no_json_is_refused(tmp_path):
    for metadata in ({"a": object()}, {"a": (1,)}, {1: 2}, {"a": float("nan")}, {"a": 2**70}):
        with pytest.raises(UnsupportedStateError) as raised:
            penstock.save(tmp_path / "ckpt", {}, metadata=metadata)
        assert raised.value.key == "metadata"
    assert not os.listdir(tmp_path)
