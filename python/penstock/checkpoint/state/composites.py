"""Tensors that consist of other tensors: sparse ones, nested ones, and subclasses that wrap some.

Such a tensor is one leaf of a state. Its *inner* tensors are stored like any others; what else it
is made of, its *facts*, stands in the tree. Subclasses are those that PyTorch itself takes apart,
by ``__tensor_flatten__``: torchao's quantized tensors and moments, its float8 tensors. A class that
a checkpoint names is looked up among those that this process has imported, of PyTorch's and
torchao's own, and those registered; nothing is imported.
"""

from __future__ import annotations

import math
import sys
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checkpoint.state.refusals import refusal
from penstock.checkpoint.state.registered import (
    imported,
    is_wrapper,
    name_of,
    of_class,
    unknown,
    wrapper_of,
)
from penstock.checkpoint.state.scalars import TreeError, UnknownError, integers, member
from penstock.errors import MissingDependencyError, StateMismatchError, UnsupportedStateError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.state.tree import Node

    _Inner = dict[str, Any]

_PACKAGES = ("torch", "torchao")
_NOT_ALONE = ("torch.distributed.", "torch._subclasses.", "torch.testing.")
"""Modules of PyTorch whose subclasses are parts of something larger, or have no elements."""

_LAYOUTS = ("csr", "csc", "bsr", "bsc")


class Parts(NamedTuple):
    """The parts of a tensor that is made of others.

    Attributes:
        tag: Its tag in the tree.
        inner: Its tensors by name.
        facts: Further members of its node, in JSON.
        context: The state that a subclass needs beside its tensors.
    """

    tag: str
    inner: dict[str, Any]
    facts: dict[str, Any]
    context: Any = None


def take_apart(value: Any, name: str) -> Parts | None:
    """The parts of a tensor; None for a tensor with elements of its own.

    Raises:
        UnsupportedStateError: It is made of others, and cannot be stored.
    """
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
    """The name of a tensor's layout, without ``torch.``."""
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
    # A view, such as a transposed one, is stored as a copy of its own.
    value = value.contiguous()
    sizes = value._nested_tensor_size().tolist()
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
    """Refuses what a rank holds of a `DTensor` where that is made of other tensors.

    Nothing says which part of each of those belongs to which part of the whole.

    Raises:
        UnsupportedStateError: It is.
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
    """The class of tensors that a checkpoint names; None where this process knows none."""
    cls = wrapper_of(name)
    if cls is None and name.partition(".")[0] in _PACKAGES and not name.startswith(_NOT_ALONE):
        cls = imported(name)
    return cls if cls is not None and is_wrapper(cls) else None


# Putting together. Numbers come out of a file: PyTorch trusts those that it is given.


def put_together(node: dict[str, Node], inner: _Inner, context: Any) -> Any:
    """The tensor of a node.

    Args:
        node: The node, one of `COMPOSITE_TAGS`.
        inner: Its tensors, built.
        context: That of a subclass, built.

    Raises:
        TreeError: They make none.
        MissingDependencyError: The class is not known in this process, or takes no such parts.
    """
    torch = dtypes.import_torch()
    if not all(isinstance(one, torch.Tensor) for one in inner.values()):
        raise TreeError(f"{node['$']!r} is made of tensors")
    if node["$"] == "subclass":
        return _make_subclass(torch, node, inner, context)
    make: Callable[[Any, dict[str, Node], _Inner], Any] = {
        "sparse": _make_sparse,
        "nested": _make_nested,
        "jagged": _make_jagged,
    }[node["$"]]
    try:
        return make(torch, node, inner)
    except TreeError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, OverflowError) as error:
        raise TreeError(f"no {node['$']} tensor: {error}") from None


def _make_sparse(torch: Any, node: dict[str, Node], inner: _Inner) -> Any:
    layout, shape = member(node, "layout", str), integers({**node, "v": node.get("shape")})
    if layout == "coo":
        indices, values = _take(inner, "indices", "values")
        return torch.sparse_coo_tensor(
            indices,
            values,
            shape,
            is_coalesced=member(node, "coalesced", bool),
            check_invariants=True,
        )
    if layout not in _LAYOUTS:
        raise UnknownError(f"unknown layout {layout!r:.80} of a sparse tensor")
    compressed, plain, values = _take(inner, "compressed", "plain", "values")
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        shape,
        layout=getattr(torch, f"sparse_{layout}"),
        check_invariants=True,
    )


def _make_nested(torch: Any, node: dict[str, Node], inner: _Inner) -> Any:
    (values,) = _take(inner, "values")
    rows = member(node, "sizes", list)
    sizes = [integers({"$": "nested", "v": row}) for row in rows]
    if any(size < 0 for row in sizes for size in row):
        raise TreeError("a nested tensor of impossible sizes")
    counts = [math.prod(row) for row in sizes]
    if len({len(row) for row in sizes}) > 1 or sum(counts) != values.numel() or values.dim() != 1:
        raise TreeError("the sizes of a nested tensor are not those of its elements")
    strides = [[math.prod(row[at + 1 :]) for at in range(len(row))] for row in sizes]
    starts = [0, *accumulate(counts)][: len(counts)]
    return torch._nested_view_from_buffer(
        values, torch.tensor(sizes), torch.tensor(strides), torch.tensor(starts)
    )


def _make_jagged(torch: Any, node: dict[str, Node], inner: _Inner) -> Any:
    values, offsets = _take(inner, "values", "offsets", optional=("lengths",))[:2]
    ragged, lengths = member(node, "ragged", int), inner.get("lengths")
    low, high = (member(node, key, int) if key in node else None for key in ("min", "max"))
    if not 1 <= ragged <= values.dim():
        raise TreeError(f"a jagged tensor has no dimension {ragged}")
    sizes = _sizes_of_rows(offsets, lengths, values.shape[ragged - 1])
    if any((low is not None and one < low) or (high is not None and one > high) for one in sizes):
        raise TreeError("a row of a jagged tensor is shorter or longer than all are said to be")
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets,
        lengths,
        jagged_dim=ragged,
        min_seqlen=low,
        max_seqlen=high,
    )


def _sizes_of_rows(offsets: Any, lengths: Any, size: int) -> list[int]:
    """How long the rows are, all inside of what there is: kernels trust these numbers."""
    for one in (offsets, lengths):
        if one is not None and (one.dim() != 1 or one.is_floating_point() or one.is_complex()):
            raise TreeError("the places of a jagged tensor are no list of integers")
    starts = offsets.tolist()
    if lengths is None:
        sizes = [end - start for start, end in pairwise(starts)]
        is_fitting = starts[:1] == [0]
    else:
        sizes = lengths.tolist()
        is_fitting = len(sizes) == len(starts) - 1
    rows = list(zip(starts, sizes, strict=False))
    if not is_fitting or not all(0 <= start <= start + one <= size for start, one in rows):
        raise TreeError("a row of a jagged tensor reaches outside its elements")
    return sizes


def _make_subclass(torch: Any, node: dict[str, Node], inner: _Inner, context: Any) -> Any:
    name = member(node, "type", str)
    cls: Any = subclass_of(name)
    if cls is None:
        raise unknown(name)
    shape = torch.Size(integers({**node, "v": node.get("shape")}))
    strides = tuple(integers({**node, "v": node.get("strides")}))
    try:
        value = cls.__tensor_unflatten__(inner, context, shape, strides)
    except Exception as error:
        # Classes raise anything here where another version of them saved the tensor.
        package = name.partition(".")[0]
        raise MissingDependencyError(
            f"{name} of this version of {package} does not take what was stored "
            f"({type(error).__name__}: {error}): install the version that saved it, or "
            "penstock.load with plain=True loads what is stored",
            name=package,
        ) from error
    if type(value) is not cls or value.shape != shape:
        raise StateMismatchError(f"{name} is put together as another tensor than was stored")
    return value


def _take(inner: _Inner, *names: str, optional: tuple[str, ...] = ()) -> list[Any]:
    """The inner tensors of these names, which have to be all there are."""
    if not set(names) <= inner.keys() <= {*names, *optional}:
        raise TreeError(f"its tensors are {', '.join(inner):.80} and not {', '.join(names)}")
    return [inner[name] for name in names]
