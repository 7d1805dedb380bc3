"""`PytreeMatching`: compares a checkpoint's tree with the pytree ``like``, leaf by leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import tree_util
from jax.sharding import Sharding

from penstock.checkpoint.state.tree.references import is_data
from penstock.errors import StateMismatchError
from penstock.integrations.jax.leaves import ArrayLeaf, KeyLeaf, Leaf, NumpyLeaf, ValueLeaf
from penstock.integrations.jax.trees import (
    KEY_DATA,
    KEY_IMPL,
    children,
    is_key,
    named,
    unknown_generator,
)
from penstock.plugin import LEVELS_MAX, ROOT, SKIPPED, TreeError, branches
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from penstock.plugin import Node, OpenCheckpoint, StoredTensor

_REPORTED_MAX = 10


class PytreeMatching:
    """The leaves to load into a pytree of the structure of ``like``.

    Args:
        opened: An open checkpoint.
        root: Its tree, with `SKIPPED` in place of parts that were not requested.
        like: A pytree of arrays, of descriptions of arrays, or of shardings.

    Attributes:
        leaves: The leaves to read, in order.

    Raises:
        StateMismatchError: Tree and pytree do not fit.
        TreeError: The tree is malformed.
    """

    def __init__(self, opened: OpenCheckpoint, root: Node, like: Any) -> None:
        self.leaves: list[Leaf] = []
        self._opened = opened
        self._mismatches: list[tuple[str, str]] = []
        self._structure = tree_util.tree_structure(like)
        self._found: list[Any] = []
        self._match(root, like, "", 0)
        if self._mismatches:
            raise self._mismatch()

    def build(self) -> Any:
        """The pytree, once all of its leaves are read."""
        return tree_util.tree_unflatten(self._structure, [_filled(one) for one in self._found])

    def _match(self, node: Node, like: Any, name: str, level: int) -> None:
        if level > LEVELS_MAX:
            raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
        if like is None:
            if node is not None:
                self._add(name, "None in like, something else in the checkpoint")
            return
        found = children(like)
        if found is None:
            self._found.append(self._leaf(node, like, name, level))
            return
        stored = branches(node)
        if stored is None:
            what = "None" if node is None else "a leaf"
            self._add(name, f"{type(like).__name__} in like, {what} in the checkpoint")
            return
        there = {key: child for key, child in stored if child is not SKIPPED}
        for key, child in found:
            if key in there:
                self._match(there.pop(key), child, named(name, key), level + 1)
            elif child is not None:
                self._add(named(name, key), "is in like, not in the checkpoint")
        for key in there:
            self._add(named(name, key), "is in the checkpoint, not in like")

    def _leaf(self, node: Node, like: Any, name: str, level: int) -> Any:
        """The value in place of a leaf of ``like``: a leaf to load, or a container of such."""
        if isinstance(like, Sharding):
            return self._placed(node, like, name, level)
        if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
            return self._key(node, like, name) if is_key(like) else self._array(node, like, name)
        if isinstance(like, np.ndarray):
            tensor = self._stored(node, like, name)
            return None if tensor is None else self._read(NumpyLeaf(name, node, tensor))
        if is_data(node) and node["$"] in ("tensor", "ndarray"):
            self._add(name, f"an array in the checkpoint, {type(like).__name__} in like")
            return None
        if branches(node) is not None and type(like) not in (set, frozenset):
            self._add(name, f"a container in the checkpoint, {type(like).__name__} in like")
            return None
        return self._read(ValueLeaf(name, node))

    def _placed(self, node: Node, sharding: Sharding, name: str, level: int) -> Any:
        """Everything below a node, with its arrays on the devices of a sharding."""
        if level > LEVELS_MAX:
            raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
        stored = branches(node)
        if stored is None:
            if not (is_data(node) and node["$"] in ("tensor", "ndarray")):
                return self._read(ValueLeaf(name, node))
            tensor = self._opened.tensor(node)
            return self._to_devices(node, tensor, sharding, name, is_weak=False)
        if dict(stored).keys() == {KEY_IMPL, KEY_DATA}:
            return self._read(self._key_leaf(dict(stored), sharding, name))
        items = [
            (key, self._placed(child, sharding, named(name, key), level + 1))
            for key, child in stored
            if child is not SKIPPED
        ]
        if type(node) is list:
            return [item for _, item in items]
        return tuple(item for _, item in items) if node.get("$") == "tuple" else dict(items)

    def _array(self, node: Node, like: Any, name: str) -> Leaf | None:
        tensor = self._stored(node, like, name)
        if tensor is None:
            return None
        return self._to_devices(node, tensor, sharding_of(like), name, is_weak=bool(like.weak_type))

    def _to_devices(
        self,
        node: Node,
        tensor: StoredTensor,
        sharding: Sharding | None,
        name: str,
        *,
        is_weak: bool,
    ) -> Leaf | None:
        dtype = dtypes.numpy_dtype(tensor.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            self._add(
                name,
                f"JAX makes {jax.dtypes.canonicalize_dtype(dtype)} of {dtype} here: set the "
                "flag jax_enable_x64",
            )
            return None
        leaf = ArrayLeaf(name, node, tensor, sharding, is_weak=is_weak)
        try:
            leaf.plan()
        except (ValueError, IndexError) as error:
            self._add(name, f"{tensor.shape} does not lie as {sharding} says: {error}")
            return None
        return self._read(leaf)

    def _key(self, node: Node, like: Any, name: str) -> Leaf | None:
        stored = dict(branches(node) or ())
        if stored.keys() != {KEY_IMPL, KEY_DATA}:
            self._add(name, "typed keys of jax.random in like, something else in the checkpoint")
            return None
        leaf = self._key_leaf(stored, sharding_of(like), name)
        if leaf.dtype != like.dtype:
            self._add(name, f"keys of {leaf.impl} in the checkpoint, {like.dtype} in like")
        elif leaf.key_shape != like.shape:
            self._add(name, _differ("shape", leaf.key_shape, like.shape))
        return self._read(leaf)

    def _key_leaf(self, stored: dict[Any, Node], sharding: Sharding | None, name: str) -> KeyLeaf:
        impl = stored[KEY_IMPL]
        if type(impl) is not str:
            raise TreeError(f"the name of a generator of random numbers is {impl!r:.80}")
        tensor = self._opened.tensor(stored[KEY_DATA])
        try:
            return KeyLeaf(name, stored[KEY_DATA], tensor, impl, sharding)
        except TreeError:
            raise
        except ValueError as error:
            raise unknown_generator(impl, self._opened.path, name, error) from error

    def _stored(self, node: Node, like: Any, name: str) -> StoredTensor | None:
        """The tensor of a node with the type and shape of ``like``; else records a mismatch."""
        if not (is_data(node) and node["$"] in ("tensor", "ndarray")):
            what = "a plain value" if branches(node) is None else "a container"
            self._add(name, f"{what} in the checkpoint, an array in like")
            return None
        tensor = self._opened.tensor(node)
        shape = tensor.shape if tensor.window is None else tuple(tensor.window[0])
        own_dtype = dtypes.numpy_name(np.dtype(like.dtype))
        if shape != tuple(like.shape):
            self._add(name, _differ("shape", shape, tuple(like.shape)))
        elif tensor.dtype != own_dtype:
            self._add(name, _differ("dtype", tensor.dtype, own_dtype))
        else:
            return tensor
        return None

    def _read(self, leaf: Leaf) -> Leaf:
        self.leaves.append(leaf)
        return leaf

    def _add(self, name: str, text: str) -> None:
        self._mismatches.append((name or ROOT, text))

    def _mismatch(self) -> StateMismatchError:
        shown = [f"{name}: {text}" for name, text in self._mismatches[:_REPORTED_MAX]]
        if len(self._mismatches) > _REPORTED_MAX:
            shown.append(f"and {len(self._mismatches) - _REPORTED_MAX} more")
        return StateMismatchError(
            f"{self._opened.path}: like= does not fit the checkpoint: {'; '.join(shown)}; make "
            "like= as the pytree that was saved was made, choose leaves with keys=, or load "
            "without like=, which gives plain containers",
            key=self._mismatches[0][0],
            path=self._opened.path,
        )


def sharding_of(like: Any) -> Sharding | None:
    """The sharding of an array in ``like``; None to let JAX choose."""
    if isinstance(like, jax.Array) and not like.committed:
        return None
    sharding: Sharding | None = like.sharding
    return sharding


def _differ(what: str, stored: object, own: object) -> str:
    return f"{what} {stored} in the checkpoint, {own} in like"


def _filled(found: Any) -> Any:
    """The value of a leaf, or a container of values."""
    if isinstance(found, Leaf):
        return found.value
    if type(found) is dict:
        return {key: _filled(one) for key, one in found.items()}
    if type(found) is list or type(found) is tuple:
        return type(found)(map(_filled, found))
    return found
