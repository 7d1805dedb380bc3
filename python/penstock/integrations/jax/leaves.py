"""Leaves of a pytree being loaded: the bytes to read for each, and the value made from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax._src.lax import lax
from numpy.lib.stride_tricks import as_strided

from penstock.checkpoint.state.build import check_window
from penstock.plugin import BoxRead, TreeError, of_array
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax.sharding import Sharding

    from penstock.plugin import Node, OpenCheckpoint, StoredTensor

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of a box of an array in every dimension."""

_PAGE_BYTES = 4096
_LINE_BYTES = 64
"""Alignment for direct reads (pages), and for memory that XLA takes over without a copy (lines)."""


class Leaf:
    """A leaf to load.

    Attributes:
        name: Its dotted name.
        value: Its value, after `finish`.
        nbytes: Bytes to read for it.
    """

    nbytes = 0

    def __init__(self, name: str, node: Node) -> None:
        self.name = name
        self.value: Any = None
        self._node = node

    def reads(self) -> Iterator[BoxRead]:
        """The boxes to read, each with the memory to read it into."""
        return iter(())

    def finish(self, opened: OpenCheckpoint, options: dict[str, Any]) -> None:
        """Makes the value, once all boxes are read.

        Raises:
            TreeError: Its node is malformed.
            CorruptCheckpointError: Its bytes are damaged.
        """
        raise NotImplementedError


class ValueLeaf(Leaf):
    """A plain value."""

    def finish(self, opened: OpenCheckpoint, options: dict[str, Any]) -> None:
        """Builds the value from its node."""
        (self.value,) = opened.values([self._node], options)


class NumpyLeaf(Leaf):
    """A NumPy array."""

    def __init__(self, name: str, node: Node, tensor: StoredTensor) -> None:
        super().__init__(name, node)
        self._tensor = tensor
        self._dtype = dtypes.numpy_dtype(tensor.dtype)
        if tensor.window is not None:
            check_window(tensor.window, math.prod(tensor.shape))
        self._boxes: dict[Box, np.ndarray[Any, Any]] = {}
        # The array of which a strided part is requested.
        self._base: np.ndarray[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        window = self._tensor.window
        return self._tensor.shape if window is None else tuple(window[0])

    def plan(self) -> list[Box]:
        """The boxes to load: begin and end of each in every dimension."""
        return [tuple((0, size) for size in self.shape)]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes to read."""
        items = sum(math.prod(end - begin for begin, end in box) for box in self.plan())
        return items * self._dtype.itemsize

    def reads(self) -> Iterator[BoxRead]:
        """The boxes to load; for a strided part the whole array that contains it."""
        tensor = self._tensor
        if tensor.window is not None:
            self._base = _room(tensor.shape, self._dtype)
            yield BoxRead(tensor, (0,) * len(tensor.shape), of_array(self._base, self.name))
            return
        for box in self.plan():
            memory = _room(tuple(end - begin for begin, end in box), self._dtype)
            self._boxes[box] = memory
            start = tuple(begin for begin, _ in box)
            yield BoxRead(self._tensor, start, of_array(memory, self.name))

    def finish(self, opened: OpenCheckpoint, options: dict[str, Any]) -> None:
        """Makes the array from the boxes that were read."""
        self.value = self._made()
        self._boxes.clear()
        self._base = None

    def _made(self) -> Any:
        return self._part(self.plan()[0])

    def _part(self, box: Box) -> np.ndarray[Any, Any]:
        window, base = self._tensor.window, self._base
        if window is None or base is None:
            return self._boxes[box]
        shape, strides, offset = window
        steps = [stride * base.itemsize for stride in strides]
        part = as_strided(base.reshape(-1)[offset:], shape, steps)
        return np.ascontiguousarray(part[tuple(slice(begin, end) for begin, end in box)])


class ArrayLeaf(NumpyLeaf):
    """A JAX array; only the boxes held by devices of this process are read, each once."""

    def __init__(
        self,
        name: str,
        node: Node,
        tensor: StoredTensor,
        sharding: Sharding | None,
        *,
        is_weak: bool = False,
    ) -> None:
        super().__init__(name, node, tensor)
        self._sharding = sharding
        self._is_weak = is_weak

    def plan(self) -> list[Box]:
        """The boxes held by devices of this process, each once.

        Raises:
            ValueError: The sharding does not fit the shape.
        """
        if self._sharding is None:
            return super().plan()
        held = self._sharding.addressable_devices_indices_map(self.shape).values()
        return list(dict.fromkeys(_box(index, self.shape) for index in held))

    def _made(self) -> Any:
        if self._sharding is None:
            array = jax.device_put(self._part(self.plan()[0]))
        else:
            array = jax.make_array_from_callback(
                self.shape,
                self._sharding,
                lambda index: self._part(_box(index, self.shape)),
                dtype=self._dtype,
            )
        # A weak type, as of an array made from a Python scalar, yields to types it is combined
        # with.
        return lax._convert_element_type(array, weak_type=True) if self._is_weak else array


class KeyLeaf(NumpyLeaf):
    """Typed keys of `jax.random`.

    Attributes:
        impl: Name of their generator.
        dtype: Their type.
        key_shape: Shape of the array of keys.

    Raises:
        ValueError: JAX knows no generator of that name.
        TreeError: The stored array does not have the type or shape of their key data.
    """

    def __init__(
        self, name: str, node: Node, tensor: StoredTensor, impl: str, sharding: Sharding | None
    ) -> None:
        super().__init__(name, node, tensor)
        self.impl = impl
        self._sharding = sharding
        blank = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
        self.dtype = blank.dtype
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
        self._ndim = len(self.shape) - len(words.shape)
        if self._dtype != words.dtype or self.shape[max(self._ndim, 0) :] != words.shape:
            raise TreeError(f"{self._dtype} {self.shape} are no words of keys of {impl}")

    @property
    def key_shape(self) -> tuple[int, ...]:
        """Shape of the array of keys."""
        return self.shape[: self._ndim]

    def _made(self) -> Any:
        keys = jax.random.wrap_key_data(super()._made(), impl=self.impl)
        return keys if self._sharding is None else jax.device_put(keys, self._sharding)


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    index = index or ()
    full = (*index, *(slice(None) for _ in shape[len(index) :]))
    return tuple(
        (one.start or 0, size if one.stop is None else one.stop)
        for one, size in zip(full, shape, strict=True)
    )


def _room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Uninitialized memory, aligned so that nothing has to copy it."""
    nbytes = math.prod(shape) * dtype.itemsize
    align_bytes = _PAGE_BYTES if nbytes >= _PAGE_BYTES else _LINE_BYTES
    raw = np.empty(nbytes + align_bytes, np.uint8)
    first = -raw.ctypes.data % align_bytes
    return raw[first : first + nbytes].view(dtype).reshape(shape)
