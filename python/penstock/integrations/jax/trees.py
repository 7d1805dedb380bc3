"""Converts a pytree to a plain state: containers to dicts, lists and tuples, arrays to NumPy's.

| in the pytree | in the state |
|---|---|
| ``list``, ``tuple``, ``None`` | the same |
| ``dict`` and its kin | a ``dict`` with the same keys |
| any other node: a `NamedTuple`, a dataclass | a ``dict`` by the names of fields, or numbers |
| a `jax.Array` | an array; of several devices one array |
| typed keys of `jax.random` | ``{"prng_impl": "…", "prng_data": array}`` |
| any other leaf | as `penstock.save` has it |

The static fields of a node belong to the program and are not stored.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from penstock.checkpoint.state.tree.scalars import label
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.plugin import ROOT, Boxes

if TYPE_CHECKING:
    from collections.abc import Hashable

_Piece: TypeAlias = "tuple[tuple[int, ...], np.ndarray[Any, Any]]"

KEY_IMPL, KEY_DATA = "prng_impl", "prng_data"
"""Keys of the stored form of typed keys: the generator's name, and the key data."""


def children(value: Any) -> list[tuple[Hashable, Any]] | None:
    """The children of a node of a pytree with their keys; None for a leaf."""
    if tree_util.default_registry.flatten_one_level(value) is None:
        return None
    # `flatten_one_level_with_keys` would give all fields of a NamedTuple one name.
    pairs, _ = tree_util.tree_flatten_with_path(value, is_leaf=lambda one: one is not value)
    return [(_key(path[0]), child) for path, child in pairs]


def _key(entry: Any) -> Hashable:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            found: Hashable = getattr(entry, attribute)
            return found
    return str(entry)


def named(name: str, key: object) -> str:
    """The dotted name of a child."""
    return f"{name}.{label(key)}" if name else label(key)


def is_key(value: Any) -> bool:
    """Whether an array, or the description of one, is of typed keys of `jax.random`."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_state(pytree: Any, *, copies: bool, is_shared: bool = False) -> Any:
    """The state to save for a pytree.

    Args:
        pytree: The pytree. JAX arrays are not copied, unless they are on an accelerator.
        copies: Whether to copy leaves that are not JAX's, as they may change before the save.
        is_shared: Whether several processes save it together: arrays that each process has whole
            are written by the first.

    Raises:
        UnsupportedStateError: A leaf cannot be stored; the message names it.
    """
    for leaf in tree_util.tree_leaves(pytree):
        # Starts all copies to the host before waiting for the first.
        if _is_array(leaf) and not (is_key(leaf) or leaf.is_deleted() or _is_on_host(leaf)):
            leaf.copy_to_host_async()
    return _Walk(copies, is_shared).state(pytree, "")


class _Walk:
    """The conversion of one pytree."""

    def __init__(self, copies: bool, is_shared: bool) -> None:
        self._copies = copies
        self._is_shared = is_shared
        self._boxes: dict[int, Boxes] = {}

    def state(self, value: Any, name: str) -> Any:
        if value is None:
            return None
        found = children(value)
        if found is None:
            return self._leaf(value, name or ROOT)
        states = [(key, self.state(child, named(name, key))) for key, child in found]
        if type(value) is list or type(value) is tuple:
            return type(value)(state for _, state in states)
        if len(states) != len(dict(states)):
            raise UnsupportedStateError(
                f"{name or ROOT}: two children of this {type(value).__name__} have one key: give "
                "them keys of their own with jax.tree_util.register_pytree_with_keys",
                key=name or ROOT,
            )
        return dict(states)

    def _leaf(self, value: Any, name: str) -> Any:
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedStateError(
                f"{name}: it is traced, and has no value yet: save outside of jit, grad and vmap",
                key=name,
            )
        if _is_array(value):
            return self._key(value, name) if is_key(value) else self._array(value, name)
        if isinstance(value, jax.ShapeDtypeStruct):
            raise UnsupportedStateError(
                f"{name}: a jax.ShapeDtypeStruct has no elements: save the array", key=name
            )
        if self._copies:
            value = copy.deepcopy(value)
        if self._is_shared and isinstance(value, np.ndarray):
            pieces = [((0,) * value.ndim, value)] if value.size else []
            return Boxes(value.shape, value.dtype, _of_first(pieces))
        return value

    def _key(self, value: jax.Array, name: str) -> dict[str, Any]:
        _check_alive(value, name)
        impl = jax.random.key_impl(value)
        if not isinstance(impl, str):
            raise UnsupportedStateError(
                f"{name}: keys of {impl}, which is not registered under a name, cannot be stored: "
                "save jax.random.key_data(…) of them",
                key=name,
            )
        return {KEY_IMPL: impl, KEY_DATA: self._array(jax.random.key_data(value), name)}

    def _array(self, value: jax.Array, name: str) -> Any:
        _check_alive(value, name)
        known = self._boxes.get(id(value))
        if known is not None:
            return known
        if value.size == 0 and not self._is_shared:
            return np.zeros(value.shape, value.dtype)
        pieces = [
            (_start(shard.index), np.asarray(shard.data))
            for shard in value.addressable_shards
            if shard.replica_id == 0 and value.size
        ]
        if not self._is_shared and len(pieces) == 1:
            # One device has the whole array, or each device has a replica.
            return pieces[0][1]
        if self._is_shared and value.is_fully_addressable:
            pieces = _of_first(pieces)
        boxes = Boxes(value.shape, np.dtype(value.dtype), pieces)
        # The pytree keeps the array alive, so that its id stays unique during this conversion.
        self._boxes[id(value)] = boxes
        return boxes


def _of_first(pieces: list[_Piece]) -> list[_Piece]:
    """The pieces of an array that each process has whole: only the first process writes them."""
    return [] if jax.process_index() else pieces


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def _is_on_host(value: jax.Array) -> bool:
    devices: Any = value.sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def _check_alive(value: jax.Array, name: str) -> None:
    if value.is_deleted():
        raise UnsupportedStateError(
            f"{name}: this array is deleted, as arrays are that a jitted function was given with "
            "donate_argnums: save what that function returned, or save before it is called",
            key=name,
        )


def _start(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(one.start or 0 for one in index)


def with_keys(state: Any, path: str, name: str = "") -> Any:
    """Restores typed keys of `jax.random` in a loaded state.

    Raises:
        StateMismatchError: JAX does not know their generator here.
    """
    kind = type(state)
    if kind is dict and state.keys() == {KEY_IMPL, KEY_DATA}:
        try:
            return jax.random.wrap_key_data(state[KEY_DATA], impl=state[KEY_IMPL])
        except (TypeError, ValueError) as error:
            raise unknown_generator(state[KEY_IMPL], path, name, error) from error
    if kind is dict:
        return {key: with_keys(value, path, named(name, key)) for key, value in state.items()}
    if kind is list or kind is tuple:
        return kind(with_keys(value, path, named(name, at)) for at, value in enumerate(state))
    return state


def unknown_generator(impl: Any, path: str, name: str, error: Exception) -> StateMismatchError:
    """The error for keys of a generator that is not registered in this program."""
    return StateMismatchError(
        f"{path}: {name or ROOT}: keys of {impl!r} cannot be made here ({error}): define that "
        "generator first, as the program did that saved them; penstock.load gives their words",
        key=name or ROOT,
        path=path,
    )
