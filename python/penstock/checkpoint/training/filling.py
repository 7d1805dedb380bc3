"""Fills the live values of a state in place, and compares them with the stored ones."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.loading.target import NEW, is_sharded
from penstock.checkpoint.state.tree.references import is_data, reference
from penstock.checkpoint.state.tree.tree import SKIPPED, Node, branches
from penstock.tensors.copying import copy_elements
from penstock.tensors.marks import PerRank
from penstock.tensors.memory import CPU

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.view.view import View


ATOMS = frozenset({type(None), bool, int, float, str})
"""Types of values that need no traversal."""


def differences(value: Any, state: Any) -> Iterator[str]:
    """Yields the reasons why a tensor or array cannot be filled; other values take anything."""
    value = value.value if isinstance(value, PerRank) else value
    if is_array(value):
        yield from differences_of(state, value)


def refilled(value: Any, state: Any) -> Any:
    """Returns the new value in place of a live one.

    Tensors and arrays are filled in place, and lists, dictionaries and sets keep their identity:
    every reference to one sees the new contents.
    """
    if isinstance(value, PerRank):
        state = state.value if isinstance(state, PerRank) else state
        return PerRank(refilled(value.value, state))
    if value is state:
        return value
    if is_array(value) and not any(differences_of(state, value)):
        if _is_expanded(value):
            return state
        if isinstance(value, np.ndarray):
            if not value.flags.writeable:
                return state
            np.copyto(value, state)
        else:
            copy_elements(value, state)
        return value
    if isinstance(value, dict) and isinstance(state, dict):
        found = {
            key: refilled(value[key], one) if key in value else one for key, one in state.items()
        }
        value.clear()
        value.update(found)
        return value
    if isinstance(value, list) and isinstance(state, list):
        common = len(value)
        value[:] = [
            refilled(value[index], one) if index < common else one
            for index, one in enumerate(state)
        ]
        return value
    if isinstance(value, set) and isinstance(state, set):
        value.clear()
        value |= state
        return value
    return state


def filled(value: Any, state: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields name, live and stored value of each tensor or array that `refilled` fills."""
    value = value.value if isinstance(value, PerRank) else value
    state = state.value if isinstance(state, PerRank) else state
    if is_array(value):
        if not any(differences_of(state, value)) and not _is_expanded(value):
            yield name, value, state
        return
    if isinstance(value, dict) and isinstance(state, dict):
        pairs = [(key, value[key], one) for key, one in state.items() if key in value]
    elif isinstance(value, list) and isinstance(state, list):
        pairs = [(key, *pair) for key, pair in enumerate(zip(value, state, strict=False))]
    else:
        return
    for key, one, other in pairs:
        if type(one) not in ATOMS:
            yield from filled(one, other, f"{name}.{key}" if name else str(key))


def like(live: Any, node: Node) -> Any:
    """Returns the targets filled in place: the state's `DTensor`s at the positions of the node."""
    live = live.value if isinstance(live, PerRank) else live
    if is_sharded(live):
        return target_like(live)
    children = branches(node)
    if children is None:
        return NEW
    if isinstance(live, dict):
        found = {key: like(live[key], child) if key in live else NEW for key, child in children}
        made: Any = OrderedDict(found) if isinstance(live, OrderedDict) else found
    elif type(live) in (list, tuple) and len(live) == len(children):
        found = {index: like(live[index], child) for index, child in children}
        made = type(live)(found.values())
    else:
        return NEW
    return NEW if all(one is NEW for one in found.values()) else made


def holds_sharded(value: Any) -> bool:
    """Whether a plain value contains `DTensor`s, which a single rank cannot store."""
    value = value.value if isinstance(value, PerRank) else value
    if isinstance(value, dict | list | tuple):
        return any(map(holds_sharded, value.values() if isinstance(value, dict) else value))
    return is_sharded(value)


def target_like(value: Any) -> Any:
    """Returns a host `DTensor` to fill, with the layout of another.

    The tensor in use is written only after all ranks have compared everything and agreed: its part
    copies the elements there. A tensor without memory is returned itself, to be refused by name.
    """
    torch = sys.modules["torch"]
    value = value.detach()
    return value if value.is_meta else torch.empty_like(value, device=CPU)


def has_wholes(node: Node, seen: View) -> bool:
    """Whether a node contains tensors that several ranks hold."""
    rest = [node]
    while rest:
        one = rest.pop()
        if is_data(one):
            if reference(one, seen.tensors, seen.aliases)[0] in seen.wholes:
                return True
        elif type(one) is list:
            rest += one
        elif type(one) is dict:
            rest += one.values()
    return False


def stored_type(leaf: Node, seen: View) -> tuple[str, tuple[int, ...]] | None:
    """Returns type and shape of a stored tensor; None for anything else."""
    if not is_data(leaf) or leaf["$"] != "tensor":
        return None
    index, view = reference(leaf, seen.tensors, seen.aliases)
    entry = seen.tensors[index]
    return entry.dtype, entry.shape if view is None else view[0]


def has_gaps(node: Node) -> bool:
    """Whether parts of a node were not requested or are missing."""
    children = branches(node) or ()
    return any(child is SKIPPED or has_gaps(child) for _, child in children)


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array, which can be filled."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    return isinstance(value, np.ndarray)


def differences_of(state: Any, live: Any) -> Iterator[str]:
    """Yields the differences between a stored tensor or array and its live counterpart."""
    if is_array(state) != is_array(live) or isinstance(state, np.ndarray) != isinstance(
        live, np.ndarray
    ):
        yield f"{type(state).__name__} in the checkpoint, {type(live).__name__} in the training"
    elif not is_array(live) or _is_lazy(live):
        return
    elif tuple(state.shape) != tuple(live.shape):
        yield f"shape {list(state.shape)} in the checkpoint, {list(live.shape)} in the training"
    elif state.dtype != live.dtype:
        yield f"dtype {state.dtype} in the checkpoint, {live.dtype} in the training"


def unfillable(live: Any) -> Iterator[str]:
    """Yields the reasons why a model's tensor cannot be filled at all.

    PyTorch finds the second and the third only after it has filled the tensors before; for the
    first it warns, and leaves the tensor without values.
    """
    torch = sys.modules["torch"]
    if not isinstance(live, torch.Tensor):
        return
    if live.is_meta:
        yield "is on the meta device: give the model memory first, with model.to_empty(device=…)"
    elif live.is_inference() and not torch.is_inference_mode_enabled():
        yield "is of inference mode, in which alone it can be filled: make it outside of that"
    elif _is_expanded(live):
        yield "is expanded, so that its elements share memory: give it its own, with .clone()"


def _is_expanded(value: Any) -> bool:
    """Whether several elements of a tensor share a place, by a stride of 0."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    if _is_lazy(value) or not value.numel():
        return False
    dimensions = zip(value.stride(), value.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in dimensions)


def _is_lazy(value: Any) -> bool:
    """Whether a tensor takes its shape from the value that fills it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.nn.parameter.is_lazy(value)
