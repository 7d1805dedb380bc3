"""Hypothesis strategies for all states that a checkpoint may hold."""

from __future__ import annotations

import datetime as dt
import pathlib
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from penstock.tensors.dtypes import ITEM_BYTES

_UNPRINTABLE = re.compile(r"u?int[1-7]|bits.+|b?complex32|float4_.+")
"""PyTorch cannot print these, so a failure could not be shown; `test_round_trip` covers them."""

TORCH_DTYPES = [
    getattr(torch, name)
    for name in ITEM_BYTES
    if hasattr(torch, name) and not _UNPRINTABLE.fullmatch(name)
]

NUMPY_DTYPES = ["?", "u1", "<i2", ">i4", "<u8", "<f2", ">f8", "<c8", ">c16", "<U3", "|S5", "|V3"]
NUMPY_DTYPES += ["<M8[ns]", ">m8[25us]", "<f16"]

# Lone surrogates, NUL, JSON's escapes, special characters of file names and patterns.
TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=()),
        st.sampled_from("\0\ud800\udc00/.*?[]$~\"\\'\u2028"),
    ),
    max_size=8,
)
FLOATS = st.one_of(
    st.floats(),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0]),
)
INTEGERS = st.one_of(
    st.integers(-9, 9), st.integers(), st.integers(-(2**54), 2**54), st.integers(-(2**200), 2**200)
)

_KEYS = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXT),
    lambda keys: st.lists(keys, max_size=3).map(tuple),
    max_leaves=4,
)

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    INTEGERS,
    FLOATS,
    st.builds(complex, FLOATS, FLOATS),
    TEXT,
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.binary(min_size=1, max_size=3).map(lambda data: data * 2000),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([-2, 1, 3])),
    st.builds(slice, st.none() | INTEGERS, st.none() | INTEGERS),
    st.lists(st.integers(0, 2**62), max_size=4).map(torch.Size),
    st.sampled_from(TORCH_DTYPES),
    st.sampled_from(["cpu", "cuda", "cuda:1", "meta", "mps"]).map(torch.device),
    st.sampled_from(NUMPY_DTYPES).map(np.dtype),
    st.builds(
        lambda dtype, data: np.frombuffer(data, dtype)[0],
        st.sampled_from(["?", "<i4", ">f8", "<c16", "<M8[D]", "<f2"]),
        st.binary(min_size=16, max_size=16).map(lambda data: bytes(byte & 1 for byte in data)),
    ),
    TEXT.map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
    st.datetimes(timezones=st.none() | st.just(dt.UTC) | st.timezones()),
    st.times(),
    st.dates(),
    st.timedeltas(),
    st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone),
    st.decimals(),
    st.uuids(),
    TEXT.map(pathlib.PureWindowsPath),
    TEXT.map(pathlib.Path),
)


# As functions, which hypothesis prints briefly; it prints nested strategies in full.


@st.composite
def keys(draw: Any) -> Any:
    """Draws every kind of key."""
    return draw(_KEYS)


@st.composite
def scalars(draw: Any) -> Any:
    """Draws every kind of plain leaf."""
    return draw(_SCALARS)


SET_ITEMS = st.one_of(keys(), st.binary(max_size=5), st.frozensets(st.integers(), max_size=3))


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Draws any type, any bits; whole, stepped, transposed, expanded, narrowed or conjugated."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 33]), max_size=3))
    if draw(st.integers(0, 9)) == 0:
        # Some cross pages and digest chunks.
        shape = [draw(st.sampled_from([1024, 4097, 300_001]))]
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64))
    data = np.random.Generator(np.random.PCG64(draw(st.integers(0, 2**32)))).bytes(
        count * item_bytes
    )
    raw = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: count * item_bytes]
    if dtype is torch.bool:
        raw = raw % 2
    tensor = raw.clone().view(dtype).view(shape)
    for _ in range(draw(st.integers(0, 2))):
        tensor = _view(draw, tensor)
    return tensor


def _view(draw: Any, tensor: torch.Tensor) -> torch.Tensor:
    kind = draw(st.sampled_from(["step", "transpose", "expand", "narrow", "conj", "parameter"]))
    if kind == "conj" and tensor.dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    if kind == "parameter" and tensor.dtype in (torch.float32, torch.bfloat16):
        return torch.nn.Parameter(tensor) if tensor.is_leaf else tensor
    if tensor.dim() == 0:
        return tensor.expand(draw(st.integers(1, 4))) if kind == "expand" else tensor
    dim = draw(st.integers(0, tensor.dim() - 1))
    if kind == "step":
        index = [slice(None)] * tensor.dim()
        index[dim] = slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3)))
        return tensor.detach()[tuple(index)]
    if kind == "transpose":
        return tensor.detach().transpose(dim, draw(st.integers(0, tensor.dim() - 1)))
    if kind == "expand":
        return tensor.detach().unsqueeze(dim).expand(*[-1] * dim, 3, *[-1] * (tensor.dim() - dim))
    if kind == "narrow":
        length = draw(st.integers(0, tensor.shape[dim]))
        return tensor.detach().narrow(dim, tensor.shape[dim] - length, length)
    return tensor


@st.composite
def composites(draw: Any) -> torch.Tensor:
    """Draws a composite tensor: sparse in each layout, or nested in either."""
    kind = draw(st.sampled_from(["coo", "uncoalesced", "csr", "csc", "bsr", "bsc", *_NESTED]))
    seed = draw(st.integers(0, 2**32))
    values = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))
    values[values < draw(st.sampled_from([0.0, 0.5, 1.1]))] = 0
    if kind in _NESTED:
        lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        return torch.nested.nested_tensor(
            [values[:length] for length in lengths], layout=getattr(torch, kind)
        )
    if kind == "uncoalesced":
        indices = torch.tensor([[1, 1, 0], [2, 2, 5]])
        return torch.sparse_coo_tensor(indices, values[0, :3].clone(), (4, 6))
    blocks = (2, 3) if kind in ("bsr", "bsc") else None
    return values.to_sparse(layout=getattr(torch, f"sparse_{kind}"), blocksize=blocks)


_NESTED = ("strided", "jagged")


@st.composite
def arrays(draw: Any) -> np.ndarray:
    """Draws any type and byte order; C or Fortran order, forward or backward."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = int(np.prod(shape, dtype=np.int64))
    data = np.random.Generator(np.random.PCG64(draw(st.integers(0, 2**32)))).bytes(
        count * dtype.itemsize
    )
    if dtype.kind in "U?":
        # Other bits are invalid characters or booleans.
        data = bytes(
            byte & 1 if i % 4 == 0 or dtype.kind == "?" else 0 for i, byte in enumerate(data)
        )
    array = np.frombuffer(bytearray(data or b"\0"), np.uint8)[: count * dtype.itemsize]
    array = array.copy().view(dtype).reshape(shape)
    kind = draw(st.sampled_from(["as is", "fortran", "backward", "stepped", "read-only"]))
    if kind == "fortran":
        return np.asfortranarray(array)
    if kind == "backward" and array.ndim:
        return array[::-1]
    if kind == "stepped" and array.ndim:
        return array[..., ::2]
    if kind == "read-only":
        array.flags.writeable = False
    return array


def _ordered(pairs: list[tuple[Any, Any]], with_metadata: bool) -> OrderedDict[Any, Any]:
    value = OrderedDict(pairs)
    if with_metadata:
        value._metadata = OrderedDict({"": {"version": 1}})
    return value


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draws every container of the format, around given children."""
    pairs = st.lists(st.tuples(keys(), children), max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(deque),
        st.lists(children, max_size=3).map(lambda items: deque(items, 3)),
        st.dictionaries(TEXT, children, max_size=4),
        st.dictionaries(keys(), children, max_size=4),
        st.builds(_ordered, pairs, st.booleans()),
        pairs.map(lambda items: defaultdict(list, items)),
        st.dictionaries(keys(), INTEGERS, max_size=3).map(Counter),
        st.sets(SET_ITEMS, max_size=4),
        st.frozensets(SET_ITEMS, max_size=4),
    )


class Again(NamedTuple):
    """A tensor of the pool, while the structure is drawn: cheap to show and to shrink."""

    index: int
    is_view: bool


POOL_SIZE = 3
AGAIN = st.builds(Again, st.integers(0, POOL_SIZE - 1), st.booleans())
FAMILY = st.recursive(
    st.one_of(scalars(), tensors(), composites(), arrays(), AGAIN), containers, max_leaves=12
)


@st.composite
def states(draw: Any) -> Any:
    """Draws a nested state in which some tensors occur more than once, whole or as views."""
    either = st.one_of(tensors(), arrays())
    pool = [draw(either) for _ in range(POOL_SIZE)]
    return _fill_in(draw(FAMILY), pool)


def _fill_in(value: Any, pool: list[Any]) -> Any:
    """Returns the state with the tensors of the pool in their places."""
    if type(value) is Again:
        return _view_of(pool[value.index]) if value.is_view else pool[value.index]
    if isinstance(value, dict):
        for key in value:
            value[key] = _fill_in(value[key], pool)
    elif type(value) is deque:
        return deque((_fill_in(item, pool) for item in value), value.maxlen)
    elif type(value) in (list, tuple):
        return type(value)(_fill_in(item, pool) for item in value)
    return value


def _view_of(value: Any) -> Any:
    """Returns a view that shares the memory of a tensor or an array."""
    if isinstance(value, torch.nn.Parameter):
        value = value.detach()
    if value.ndim == 0:
        return value.reshape(1)
    return value[1:] if value.shape[0] > 1 else value.T if value.ndim == 2 else value.reshape(-1)
