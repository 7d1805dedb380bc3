"""`put_together`: builds composite tensors from their members.

Numbers come from a file, and PyTorch's kernels trust them: indices and pointers have to stay inside
the members. A save makes the same checks (`check_parts`), so that every stored tensor can be
loaded.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.composites import Parts, subclass_of
from penstock.checkpoint.state.registered import unknown
from penstock.checkpoint.state.tree.scalars import TreeError, UnknownError, integers, member
from penstock.errors import MissingDependencyError, StateMismatchError, UnsupportedStateError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.state.tree.tree import Node

    _Inner = dict[str, Any]

_LAYOUTS = ("csr", "csc", "bsr", "bsc")

_REMEDIES = {
    "sparse": "make it again with check_invariants=True; coalesce() one of _coalesced_(False)",
    "nested": "make it again of its rows",
    "jagged": "make it again with offsets and lengths inside of its values",
}


def check_parts(parts: Parts, name: str) -> None:
    """Refuses a tensor that a load would refuse, such as one with indices outside of its shape."""
    inner = parts.inner
    if parts.tag == "subclass" or any(one.is_meta for one in inner.values()):
        # Subclasses check their own members; tensors without elements are refused elsewhere.
        return
    try:
        put_together({"$": parts.tag, **parts.facts}, inner, None)
    except TreeError as error:
        raise UnsupportedStateError(
            f"{name}: it cannot be stored, as a load would refuse it ({error}): "
            f"{_REMEDIES[parts.tag]}",
            key=name,
        ) from None


def put_together(node: dict[str, Node], inner: _Inner, context: Any) -> Any:
    """Builds the tensor of a node of `COMPOSITE_TAGS` from its built members and context.

    Raises:
        TreeError: The members form no tensor.
        MissingDependencyError: The class is unknown in this process, or does not accept the
            members.
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
    # PyTorch creates tensors whose rows have unsorted or repeated indices, but its own check
    # requires sorted, distinct ones. It therefore checks a substitute with rows of the same lengths
    # and the indices 0, 1, …
    kind = getattr(torch, f"sparse_{layout}")
    at = torch.arange(plain.shape[-1], dtype=compressed.dtype, device=compressed.device)
    at = at.expand(plain.shape).contiguous()
    row = torch.searchsorted(compressed.contiguous(), at, right=True) - 1
    order = (at - compressed.gather(-1, row)).to(plain.dtype)
    torch.sparse_compressed_tensor(
        compressed, order, values, shape, layout=kind, check_invariants=True
    )
    if plain.numel() and not 0 <= int(plain.min()) <= int(plain.max()) < _plain_size(
        layout, plain, values, shape
    ):
        raise TreeError("an index of a sparse tensor is outside of its shape")
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=kind, check_invariants=False
    )


def _plain_size(layout: str, plain: Any, values: Any, shape: list[int]) -> int:
    """Returns the number of columns, rows or blocks to which the plain indices refer."""
    batches = plain.dim() - 1
    place = 1 if layout in ("csr", "bsr") else 0
    block = values.shape[plain.dim() + place] if layout in ("bsr", "bsc") else 1
    return int(shape[batches + place] // block)


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
    # Rows without dimensions, and tables without rows, give no type to infer: it is set.
    tables = [torch.tensor(one, dtype=torch.int64) for one in (sizes, strides, starts)]
    dims = len(sizes[0]) if sizes else 0
    rows_of = [one.reshape(len(sizes), dims) for one in tables[:2]]
    return torch._nested_view_from_buffer(values, *rows_of, tables[2])


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
    """Returns the lengths of the rows, checked to be inside the values: kernels trust them."""
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
        # Classes raise any error here if another version of them saved the tensor.
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
    """Returns the member tensors of these names, which must be all."""
    if not set(names) <= inner.keys() <= {*names, *optional}:
        raise TreeError(f"its tensors are {', '.join(inner):.80} and not {', '.join(names)}")
    return [inner[name] for name in names]
