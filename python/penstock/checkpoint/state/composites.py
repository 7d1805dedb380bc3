"""Composite tensors: sparse and nested tensors, and wrapper subclasses.

Such a tensor is one leaf of a state. Its *inner* tensors are stored like any others; its other
properties, the *facts*, are in the tree. Supported subclasses are those that PyTorch itself
decomposes, by ``__tensor_flatten__``: torchao's quantized tensors and moments, and its float8
tensors. A class named by a checkpoint is looked up among the imported classes of PyTorch and
torchao and the registered ones; nothing is imported. `penstock.checkpoint.state.assembly` builds
the tensors again.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from penstock.checkpoint.state.refusals import refusal
from penstock.checkpoint.state.registered import (
    imported,
    is_wrapper,
    name_of,
    of_class,
    wrapper_of,
)
from penstock.errors import UnsupportedStateError

_PACKAGES = ("torch", "torchao")
_NOT_ALONE = ("torch.distributed.", "torch._subclasses.", "torch.testing.")
"""Modules of PyTorch whose subclasses belong to something larger, or have no elements."""


class Parts(NamedTuple):
    """A composite tensor in parts: tensors to store, and the properties to write into the tree.

    Attributes:
        tag: Kind of composite tensor; the value of ``"$"`` in its node of the tree.
        inner: Inner tensors by name, each stored like any other tensor.
        facts: Other properties, such as the shape; JSON values, stored in the node by name.
        context: The context that ``__tensor_flatten__`` returned; None unless the tag is
            ``"subclass"``.
    """

    tag: str
    inner: dict[str, Any]
    facts: dict[str, Any]
    context: Any = None


def take_apart(value: Any, name: str) -> Parts | None:
    """Returns the members of a tensor; None for a tensor with elements of its own."""
    torch = sys.modules["torch"]
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        layout = str(value.layout).removeprefix("torch.")
        if layout.startswith("sparse_"):
            return _sparse(value.detach(), layout.removeprefix("sparse_"))
        return _nested(value.detach()) if value.is_nested else None
    if not isinstance(value, torch.Tensor) or not is_wrapper(kind):
        return None
    if layout_of(value) == "jagged":
        return _jagged(value.detach())
    return _subclass(value, name)


def layout_of(value: Any) -> str:
    """Returns the name of a tensor's layout, without ``torch.``."""
    return str(value.layout).removeprefix("torch.")


def _sparse(value: Any, layout: str) -> Parts:
    facts: dict[str, Any] = {"layout": layout, "shape": list(value.shape)}
    if layout == "coo":
        inner = {"indices": value._indices(), "values": value._values()}
        return Parts("sparse", inner, {**facts, "coalesced": value.is_coalesced()})
    is_by_row = layout in ("csr", "bsr")
    inner = {
        "compressed": value.crow_indices() if is_by_row else value.ccol_indices(),
        "plain": value.col_indices() if is_by_row else value.row_indices(),
        "values": value.values(),
    }
    return Parts("sparse", inner, facts)


def _nested(value: Any) -> Parts:
    # A view, such as a transposed one, is stored as a copy.
    value = value.contiguous()
    # Without rows the sizes form no table.
    sizes = value._nested_tensor_size().tolist() if value.size(0) else []
    return Parts("nested", {"values": value.values()}, {"sizes": sizes})


def _jagged(value: Any) -> Parts:
    inner = {"values": value.values(), "offsets": value.offsets()}
    lengths = value.lengths()
    if lengths is not None:
        inner["lengths"] = lengths
    bounds = {"min": value._maybe_min_seqlen, "max": value._maybe_max_seqlen}
    known = {key: int(bound) for key, bound in bounds.items() if bound is not None}
    return Parts("jagged", inner, {"ragged": value._ragged_idx, **known})


def _subclass(value: Any, name: str) -> Parts:
    kind = type(value)
    entry = of_class(kind)
    stored_name = name_of(kind) if entry is None else entry.name
    if subclass_of(stored_name) is not kind:
        raise refusal(value, name)
    names, context = value.__tensor_flatten__()
    inner = {one: getattr(value, one) for one in names}
    shape, strides = list(value.shape), list(value.stride())
    numbers = [*shape, *strides]
    if not all(type(number) is int for number in numbers):
        raise UnsupportedStateError(
            f"{name}: a {stored_name} of shape {value.shape} cannot be stored: its sizes are no "
            "integers",
            key=name,
        )
    dtype = str(value.dtype).removeprefix("torch.")
    facts = {"type": stored_name, "dtype": dtype, "shape": shape, "strides": strides}
    return Parts("subclass", inner, facts, context)


def refuse_part(local: Any, name: str) -> None:
    """Refuses a `DTensor` whose local tensor is itself made of other tensors.

    Its placements say how the whole tensor is split over ranks, not how those inner tensors are.
    """
    kind = type(local)
    if is_wrapper(kind) and subclass_of(name_of(kind)) is kind:
        raise UnsupportedStateError(
            f"{name}: a DTensor whose local tensor is a {name_of(kind)} cannot be stored, as that "
            "is made of other tensors: save penstock.PerRank(tensor.to_local()), which the same "
            "number of ranks loads",
            key=name,
        )


def subclass_of(name: str) -> type | None:
    """Returns the tensor class that a checkpoint names; None if this process does not know it."""
    cls = wrapper_of(name)
    if cls is None and name.partition(".")[0] in _PACKAGES and not name.startswith(_NOT_ALONE):
        cls = imported(name)
    return cls if cls is not None and is_wrapper(cls) else None
