"""Builds a state from its tree and the memory that was read.

The tree is untrusted input: any defect is a `TreeError`, and nothing in it is evaluated. Tensors
and arrays are windows over the memory that was read, without copies.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.state.assembly import put_together
from penstock.checkpoint.state.registered import of_name
from penstock.checkpoint.state.tree.references import (
    COMPOSITE_TAGS,
    BytesLocation,
    is_composite,
    is_data,
    reference,
)
from penstock.checkpoint.state.tree.scalars import (
    TreeError,
    UnknownError,
    check_hashes,
    decode,
    decode_keys,
    member,
    refused,
)
from penstock.checkpoint.state.tree.tree import FACTORIES, LEVELS_MAX, SKIPPED, Node, pairs
from penstock.checkpoint.state.typed import DECODERS
from penstock.errors import MissingDependencyError
from penstock.tensors import dtypes
from penstock.tensors.memory import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from penstock._native import TensorEntry, _Alias
    from penstock.checkpoint.state.tree.references import Window


_ATOMS = frozenset({type(None), bool, int, float, str})


class Builder:
    """Builds values from nodes.

    Args:
        tensors: The checkpoint's stored tensors.
        aliases: Its aliases.
        places: The place of each needed tensor's bytes.
        device: The device of new tensors; None for the host.
        made: Contiguous tensors that already exist, by index.
    """

    def __init__(
        self,
        tensors: Sequence[TensorEntry],
        aliases: Sequence[_Alias],
        places: Mapping[int, BytesLocation],
        device: Any = None,
        made: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._tensors = tensors
        self._aliases = aliases
        self._places = places
        self._device = device
        self._made = made or {}
        self._built: dict[tuple[str, int, str, str], Any] = {}
        self._composites: dict[str, Any] = {}
        self._torch_types: dict[str, tuple[torch.dtype, int]] = {}
        self._numpy_types: dict[str, np.dtype[Any]] = {}
        # The module; None until a tensor is needed, False if it is not installed.
        self._torch: Any = None

    def build(self, node: Node, level: int = 0) -> Any:
        """Returns the value of a node.

        Raises:
            TreeError: The node, or a tensor that it refers to, is malformed.
            MissingDependencyError: A package that the value needs is not installed.
        """
        kind = type(node)
        if kind in _ATOMS:
            return node
        if kind is list:
            return self._children(node, level)
        if "$" not in node:
            _check_level(level)
            return {
                key: child if type(child) in _ATOMS else self.build(child, level + 1)
                for key, child in node.items()
                if child is not SKIPPED
            }
        if is_data(node):
            return self.leaf(node)
        tag = node["$"]
        container = _CONTAINERS.get(tag) if type(tag) is str else None
        return decode(node) if container is None else container(self, node, level)

    # Containers.

    def _children(self, nodes: list[Node], level: int) -> list[Any]:
        _check_level(level)
        return [
            child if type(child) in _ATOMS else self.build(child, level + 1)
            for child in nodes
            if child is not SKIPPED
        ]

    def _items(self, node: dict[str, Node], level: int) -> list[Any]:
        return self._children(member(node, "v", list), level)

    def _set(self, node: dict[str, Node], level: int) -> set[Any]:
        items = self._items(node, level)
        try:
            check_hashes(items)
            values = set(items)
        except TreeError:
            raise
        except (TypeError, ValueError) as error:
            raise TreeError(f"a set of unhashable values: {error}") from None
        if len(values) != len(items):
            raise TreeError("a set repeats a value")
        return values

    def _pairs(self, node: dict[str, Node], level: int) -> list[tuple[Any, Any]]:
        _check_level(level)
        wanted = [entry for entry in pairs(node) if entry[1] is not SKIPPED]
        keys = decode_keys(key for key, _ in wanted)
        entries = [
            (key, self.build(child, level + 1))
            for key, (_, child) in zip(keys, wanted, strict=True)
        ]
        if len(dict(entries)) != len(entries):
            raise TreeError("a dictionary repeats a key")
        return entries

    def _ordered_dict(self, node: dict[str, Node], level: int) -> OrderedDict[Any, Any]:
        value = OrderedDict(self._pairs(node, level))
        vars(value).update(self.attributes(node, level))
        return value

    def attributes(self, node: dict[str, Node], level: int) -> dict[str, Any]:
        """Returns the attributes of an ordered dictionary: ``_metadata`` or none."""
        if "attrs" not in node:
            return {}
        attributes = member(node, "attrs", dict)
        if set(attributes) != {"_metadata"}:
            kind = UnknownError if attributes else TreeError
            raise kind("'odict' has unknown attributes")
        return {"_metadata": self.build(attributes["_metadata"], level + 1)}

    def _default_dict(self, node: dict[str, Node], level: int) -> defaultdict[Any, Any]:
        word = member(node, "factory", str)
        if word not in FACTORIES:
            raise UnknownError(f"unknown factory {word!r:.80}")
        return defaultdict(FACTORIES[word], self._pairs(node, level))

    def _deque(self, node: dict[str, Node], level: int) -> deque[Any]:
        length_max = node.get("max")
        if length_max is not None and (type(length_max) is not int or length_max < 0):
            raise TreeError(f"{length_max!r:.80} is no length of a deque")
        items = self._items(node, level)
        if length_max is not None and len(items) > length_max:
            raise TreeError(f"a deque of {len(items)} where {length_max} are the most")
        try:
            return deque(items, length_max)
        except OverflowError as error:
            raise TreeError(f"no deque: {error}") from None

    # Values that consist of others.

    def _object(self, node: dict[str, Node], level: int) -> Any:
        _check_level(level)
        entry = of_name(member(node, "type", str))
        state = node.get("v")
        is_members = type(state) is dict and "$" not in state
        return entry.made_of(self.build(state, level if is_members else level + 1))

    def _composite(self, node: dict[str, Node], level: int) -> Any:
        """Builds a composite tensor; equal members give the same object, as tensors are tied."""
        _check_level(level)
        nodes = member(node, "v", dict)
        if not all(map(_is_tensor, nodes.values())):
            raise TreeError(f"{node['$']!r} is made of tensors")
        inner = {key: self.build(child, level + 1) for key, child in nodes.items()}
        rest = {**node, "v": [(key, id(one)) for key, one in inner.items()]}
        identity = repr(rest)
        value = self._composites.get(identity)
        if value is None:
            context = self.build(node.get("context"), level + 1)
            value = self._composites[identity] = put_together(node, inner, context)
        return value

    # Leaves whose bytes are in a shard.

    def leaf(self, node: dict[str, Node], kind: str | None = None) -> Any:
        """Returns the tensor, array or bytes of a leaf; ``kind`` overrides its own kind.

        Leaves of the same elements give the same object, and windows share its memory.
        """
        kind = kind or node["$"]
        index, window = reference(node, self._tensors, self._aliases)
        if kind in ("bytes", "bytearray"):
            # All of the tensor, under any name: a copy for each leaf would let a short tree create
            # any number of copies of a long tensor.
            window = None
        if kind == "tensor" and not (self._torch or self._find_torch()):
            kind = "ndarray"
        # Text has an unpredictable hash: a file may contain any number of windows whose numbers
        # have the same one.
        char = node.get("char") if kind == "ndarray" else None
        key = (
            kind,
            index,
            "" if window is None else repr(window),
            "" if char is None else repr(char),
        )
        value = self._built.get(key)
        if value is None:
            if window is not None:
                check_window(window, math.prod(self._tensors[index].shape))
            try:
                value = self._built[key] = self._make(kind, index, window, char)
            except TreeError as error:
                raise type(error)(f"tensor {self._tensors[index].name!r}: {error}") from None
            except MissingDependencyError as error:
                text = f"tensor {self._tensors[index].name!r}: {error}"
                raise MissingDependencyError(text, name=error.name) from None
        return value

    def _make(self, kind: str, index: int, window: Window | None, char: Any) -> Any:
        if kind == "tensor":
            return self._tensor(index, window)
        if kind != "ndarray":
            return self._bytes(index, kind)
        array = self._array(index, window)
        if char is None:
            return array
        try:
            dtype = dtypes.as_twin(array.dtype, char)
        except ValueError as error:
            raise refused(error) from None
        return array if dtype.char == array.dtype.char else array.view(dtype)

    def _find_torch(self) -> Any:
        """Returns PyTorch, or False: tensors are then returned as arrays if NumPy has the type."""
        if self._torch is None:
            try:
                self._torch = dtypes.import_torch()
            except MissingDependencyError:
                self._torch = False
        return self._torch

    def _bytes(self, index: int, kind: str) -> bytes | bytearray:
        entry = self._tensors[index]
        nbytes = entry.end - entry.begin
        if entry.dtype != "uint8" or entry.shape != (nbytes,):
            raise TreeError(f"it holds no {kind}")
        buffer, offset = self._place(index, nbytes)
        data = memoryview(buffer)[offset : offset + nbytes]
        return bytes(data) if kind == "bytes" else bytearray(data)

    def _tensor(self, index: int, window: Window | None) -> torch.Tensor:
        if window is not None:
            shape, strides, offset = window
            base = self.leaf({"$": "tensor", "i": index})
            try:
                tensor: torch.Tensor = base.as_strided(
                    shape, strides, base.storage_offset() + offset
                )
            except (RuntimeError, ValueError, OverflowError) as error:
                raise TreeError(f"a view of it is impossible: {error}") from None
            return tensor
        made = self._made.get(index)
        if made is not None:
            return made
        entry = self._tensors[index]
        shape = entry.shape
        dtype, item_bytes = self._torch_type(entry.dtype)
        items = math.prod(shape)
        buffer, offset = self._place(index, entry.end - entry.begin, items * item_bytes)
        try:
            if items == 0:
                tensor = self._torch.empty(shape, dtype=dtype, device="cpu")
            else:
                tensor = self._torch.frombuffer(buffer, dtype=dtype, count=items, offset=offset)
                tensor = tensor if len(shape) == 1 else tensor.view(shape)
        except (RuntimeError, ValueError, OverflowError, TypeError) as error:
            raise TreeError(f"no tensor of shape {shape}: {error}") from None
        return tensor if self._device is None else tensor.to(self._device)

    def _torch_type(self, name: str) -> tuple[torch.dtype, int]:
        known = self._torch_types.get(name)
        if known is None:
            try:
                known = self._torch_types[name] = dtypes.torch_dtype(name), dtypes.ITEM_BYTES[name]
            except ValueError as error:
                raise refused(error) from None
        return known

    def _array(self, index: int, window: Window | None) -> np.ndarray[Any, Any]:
        entry = self._tensors[index]
        shape = entry.shape
        dtype = self._numpy_type(entry.dtype)
        items = math.prod(shape)
        buffer, offset = self._place(index, entry.end - entry.begin, items * dtype.itemsize)
        strides = contiguous_strides(shape, 1)
        if window is not None:
            shape, strides, start = window
            offset += start * dtype.itemsize
        try:
            if 0 in shape:
                return np.empty(shape, dtype)
            strides_bytes = tuple(stride * dtype.itemsize for stride in strides)
            return np.ndarray(shape, dtype, buffer, offset, strides_bytes)
        except (ValueError, OverflowError, TypeError, MemoryError) as error:
            raise TreeError(f"no array of shape {shape}: {error}") from None

    def _numpy_type(self, name: str) -> np.dtype[Any]:
        dtype = self._numpy_types.get(name)
        if dtype is None:
            try:
                dtype = self._numpy_types[name] = dtypes.numpy_dtype(name)
            except ValueError as error:
                raise refused(error) from None
            except MissingDependencyError:
                if self._torch is False:
                    raise MissingDependencyError(
                        f"NumPy has no {name}, PyTorch has: pip install 'penstock[torch]'",
                        name="torch",
                    ) from None
                raise
        return dtype

    def _place(self, index: int, stored_bytes: int, nbytes: int | None = None) -> BytesLocation:
        """Returns the place of a tensor's bytes, checked against its type and shape."""
        if nbytes is not None and nbytes != stored_bytes:
            raise TreeError(f"{stored_bytes} bytes where {nbytes} are needed")
        if stored_bytes == 0:
            return b"", 0
        return self._places[index]


# Not a table of bound methods in each builder: that cycle would keep a loaded state alive until the
# next garbage collection.
_CONTAINERS: dict[str, Callable[[Builder, dict[str, Node], int], Any]] = {
    "tuple": lambda builder, node, level: tuple(builder._items(node, level)),
    "set": Builder._set,
    "frozenset": lambda builder, node, level: frozenset(builder._set(node, level)),
    "dict": lambda builder, node, level: dict(builder._pairs(node, level)),
    "odict": Builder._ordered_dict,
    "counter": lambda builder, node, level: Counter(dict(builder._pairs(node, level))),
    "defaultdict": Builder._default_dict,
    "deque": Builder._deque,
    "object": Builder._object,
    **dict.fromkeys(COMPOSITE_TAGS, Builder._composite),
    **{tag: lambda _, node, __: DECODERS[node["$"]](node) for tag in DECODERS},
}


def _is_tensor(node: Node) -> bool:
    if is_composite(node):
        return True
    return type(node) is dict and is_data(node) and node["$"] == "tensor"


def _check_level(level: int) -> None:
    if level >= LEVELS_MAX:
        raise TreeError(f"nested deeper than {LEVELS_MAX} levels")


def check_window(window: Window, items: int) -> None:
    """Refuses a window that exceeds its tensor."""
    shape, strides, offset = window
    if len(shape) != len(strides) or any(dim < 0 for dim in shape):
        raise TreeError("a view of impossible shape")
    reaches = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
    low = offset + sum(reach for reach in reaches if reach < 0)
    high = offset + sum(reach for reach in reaches if reach > 0)
    if 0 not in shape and (low < 0 or high >= items):
        raise TreeError("a view that reaches outside its tensor")
