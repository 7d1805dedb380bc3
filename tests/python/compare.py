"""A deep comparison of states, which judges every round trip.

`assert_same(actual, expected)` fails with the path of the first difference in types, order of
members, dtypes, shapes, bytes (so that NaN payloads and -0.0 count), attributes of ordered
dictionaries, and ties: one object has to stay one object, a view of another tensor has to share its
memory at the same place, and separate memory has to stay separate.

`COMES_BACK_AS` lists all changes by design.
"""

from __future__ import annotations

import datetime as dt
import decimal
import pathlib
import struct
import uuid
import zoneinfo
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import torch

COMES_BACK_AS: dict[type, type] = {
    torch.nn.Parameter: torch.Tensor,
    np.memmap: np.ndarray,
    memoryview: np.ndarray,
}
"""Documented in `penstock.save`: a plain type with the same elements."""

_PLAIN = (int, bool, str, bytes, bytearray, type(None), range, slice)
_TYPED = (dt.date, dt.time, dt.timedelta, dt.tzinfo, decimal.Decimal, pathlib.PurePath, uuid.UUID)


class Leaf(NamedTuple):
    """A tensor or array of the expected state, and the loaded one."""

    path: str
    expected: Any
    actual: Any


class Span(NamedTuple):
    """The memory range of a tensor or array."""

    low: int
    high: int
    address: int
    dtype: str
    is_contiguous: bool


def assert_same(actual: Any, expected: Any) -> None:
    """Fails unless two states are the same down to the bits, ties included."""
    leaves: list[Leaf] = []
    _compare(actual, expected, "state", leaves)
    _compare_ties(leaves)


def tensor_bytes(value: Any) -> bytes:
    """Returns the elements of a tensor or array in row-major order."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    value = value.detach().resolve_conj().resolve_neg()
    if value.numel() == 0:
        return b""
    item_bytes = value.element_size()
    # Bytes first: not every type has an operator that makes it contiguous.
    raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    first = value.storage_offset() * item_bytes
    strides = (*(stride * item_bytes for stride in value.stride()), 1)
    window = raw.as_strided((*value.shape, item_bytes), strides, first)
    return window.contiguous().numpy().tobytes()


def _compare(actual: Any, expected: Any, path: str, leaves: list[Leaf]) -> None:
    kind = COMES_BACK_AS.get(type(expected), type(expected))
    assert type(actual) is kind, f"{path}: {type(actual)} instead of {kind}"
    if issubclass(kind, torch.Tensor) and (inner := tensors_in(expected)):
        assert actual.layout == expected.layout, f"{path}: {actual.layout}"
        assert is_same_outside(actual, expected), f"{path}: {actual} != {expected}"
        _compare(tensors_in(actual), inner, path, leaves)
    elif kind is torch.Tensor:
        assert actual.dtype == expected.dtype, f"{path}: {actual.dtype} != {expected.dtype}"
        assert actual.shape == expected.shape, f"{path}: {actual.shape} != {expected.shape}"
        assert tensor_bytes(actual) == tensor_bytes(expected), f"{path}: other bytes"
        leaves.append(Leaf(path, expected, actual))
    elif kind is np.ndarray:
        array = np.asarray(expected)
        assert actual.dtype == array.dtype, f"{path}: {actual.dtype} != {array.dtype}"
        assert actual.dtype.str == array.dtype.str, f"{path}: another byte order"
        assert actual.shape == array.shape, f"{path}: {actual.shape} != {array.shape}"
        assert actual.tobytes() == array.tobytes(), f"{path}: other bytes"
        leaves.append(Leaf(path, array if type(expected) is memoryview else expected, actual))
    elif isinstance(expected, dict):
        _compare_dicts(actual, expected, path, leaves)
    elif kind is torch.Size:
        assert actual == expected, f"{path}: {actual} != {expected}"
    elif isinstance(expected, list | tuple | deque):
        assert getattr(actual, "maxlen", None) == getattr(expected, "maxlen", None), path
        assert len(actual) == len(expected), f"{path}: {len(actual)} of {len(expected)} items"
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            _compare(one, other, f"{path}[{index}]", leaves)
    elif isinstance(expected, set | frozenset):
        ours, theirs = sorted(map(plain_text, actual)), sorted(map(plain_text, expected))
        assert ours == theirs, f"{path}: {ours} != {theirs}"
    else:
        assert plain_text(actual) == plain_text(expected), f"{path}: {actual!r} != {expected!r}"


def tensors_in(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the tensors inside a composite tensor; none if it has elements of its own."""
    value = value.detach()
    if value.layout is torch.sparse_coo:
        return {"indices": value._indices(), "values": value._values()}
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed, plain = value.crow_indices(), value.col_indices()
        return {"compressed": compressed, "plain": plain, "values": value.values()}
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        compressed, plain = value.ccol_indices(), value.row_indices()
        return {"compressed": compressed, "plain": plain, "values": value.values()}
    if value.layout is torch.jagged:
        return {"values": value.values(), "offsets": value.offsets()}
    if value.is_nested:
        return {"values": value.values()}
    if hasattr(value, "__tensor_flatten__"):
        return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    return {}


def is_same_outside(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two composite tensors are equal except for their inner tensors."""
    if one.layout is torch.jagged:
        # Their ragged sizes are symbols, which differ for each tensor.
        return one._ragged_idx == other._ragged_idx and one.dtype == other.dtype
    if one.is_nested:
        # Without rows PyTorch has no table of sizes.
        sizes = [
            item._nested_tensor_size().tolist() if item.size(0) else [] for item in (one, other)
        ]
        return sizes[0] == sizes[1]
    if one.layout is torch.sparse_coo and one.is_coalesced() != other.is_coalesced():
        return False
    context = [
        one.__tensor_flatten__() if hasattr(one, "__tensor_flatten__") else None
        for one in (one, other)
    ]
    return one.shape == other.shape and one.dtype == other.dtype and context[0] == context[1]


def _compare_dicts(actual: Any, expected: Any, path: str, leaves: list[Leaf]) -> None:
    ours, theirs = [plain_text(key) for key in actual], [plain_text(key) for key in expected]
    assert ours == theirs, f"{path}: keys {ours} != {theirs}"
    if hasattr(expected, "default_factory"):
        assert actual.default_factory is expected.default_factory, f"{path}: another factory"
    for (key, one), other in zip(actual.items(), expected.values(), strict=True):
        _compare(one, other, f"{path}[{key!r}]", leaves)
    if type(expected) is OrderedDict:
        _compare(vars(actual), vars(expected), f"{path}.__dict__", leaves)


def plain_text(value: Any) -> str:
    """Returns text that is equal only for equal plain values, NaN payloads included."""
    if type(value) is float:
        return f"float {struct.pack('>d', value).hex()}"
    if type(value) is complex:
        return f"complex {struct.pack('>dd', value.real, value.imag).hex()}"
    if type(value) is tuple:
        return f"tuple ({', '.join(map(plain_text, value))})"
    if type(value) is frozenset:
        return f"frozenset ({', '.join(sorted(map(plain_text, value)))})"
    if type(value) is int:
        return f"int {value:#x}"
    if isinstance(value, np.generic):
        text = value.dtype.str
        data = bytes(value) if isinstance(value, np.bytes_) else np.asarray(value).tobytes()
        if isinstance(value, np.longdouble) and np.finfo(np.longdouble).nmant == 63:
            # 80 bits; NumPy 2.5 leaves the padding uninitialized.
            data = data[:10]
        return f"{type(value).__qualname__} {text} {data.hex()} {value!r}"
    if isinstance(value, zoneinfo.ZoneInfo):
        return f"zone {value.key}"
    if isinstance(value, np.dtype):
        return f"np.dtype {value.str}"
    assert isinstance(value, (*_PLAIN, *_TYPED, torch.dtype, torch.device, torch.Size)), type(value)
    return f"{type(value).__name__} {value!r}"


def _compare_ties(leaves: list[Leaf]) -> None:
    """Checks that memory is shared exactly where it was, at the same distances."""
    spans = [(_span(leaf.expected), _span(leaf.actual), leaf) for leaf in leaves]
    identities: dict[int, Leaf] = {}
    for leaf in leaves:
        twin = identities.setdefault(id(leaf.expected), leaf)
        assert twin.actual is leaf.actual, f"{leaf.path} is no longer {twin.path}"
    spans = [row for row in spans if row[0].high > row[0].low]
    spans.sort(key=lambda row: row[0].low)
    for index, (before, before_now, leaf) in enumerate(spans):
        for after, after_now, other in spans[index + 1 :]:
            if after.low >= before.high:
                break
            if not (_contains(before, after) or _contains(after, before)):
                continue
            distance, distance_now = (
                after.address - before.address,
                after_now.address - before_now.address,
            )
            assert distance == distance_now, f"{other.path} is no longer tied to {leaf.path}"
    _assert_apart(spans)


def _contains(outer: Span, inner: Span) -> bool:
    """Whether the format preserves this tie: same elements, or a view of whole elements."""
    is_inside = outer.low <= inner.low and inner.high <= outer.high
    return outer.is_contiguous and outer.dtype == inner.dtype and is_inside


def _assert_apart(spans: list[tuple[Span, Span, Leaf]]) -> None:
    """Checks that memory overlaps only where it did before."""
    now = sorted(spans, key=lambda row: row[1].low)
    for index, (before, before_now, leaf) in enumerate(now):
        for after, after_now, other in now[index + 1 :]:
            if after_now.low >= before_now.high:
                break
            were_apart = before.low >= after.high or after.low >= before.high
            assert not were_apart, f"{other.path} now shares memory with {leaf.path}"


def _span(value: Any) -> Span:
    if isinstance(value, np.ndarray):
        address = value.__array_interface__["data"][0]
        # NumPy 1.26 has it elsewhere.
        found_in: Any = getattr(np.lib, "array_utils", np)
        low, high = found_in.byte_bounds(value) if value.size else (address, address)
        return Span(low, high, address, value.dtype.str, value.flags.c_contiguous)
    if value.is_conj() or value.is_neg() or value.numel() == 0:
        # The bytes of such a view are not its values: it is stored on its own.
        return Span(0, 0, 0, "", False)
    item_bytes = value.element_size()
    address = value.data_ptr()
    reach = sum((dim - 1) * stride for dim, stride in zip(value.shape, value.stride(), strict=True))
    high = address + (reach + 1) * item_bytes
    return Span(address, high, address, _dtype_text(value.dtype), value.is_contiguous())


def _dtype_text(dtype: torch.dtype) -> str:
    """Returns NumPy's text for a type, if it has one: arrays and tensors may be tied."""
    try:
        return np.dtype(str(dtype).removeprefix("torch.")).str
    except TypeError:
        return str(dtype)
