"""Fused tensors taken apart without their bytes: which part of which one a tensor is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.exporting.chosen import Weight
    from penstock.checkpoint.exporting.models import Model

_COPIES = (torch.Tensor.contiguous, torch.Tensor.clone)


class Box(NamedTuple):
    """A part of a tensor.

    Attributes:
        start: Its first element, along each dimension of the tensor.
        sizes: How many there are along each.
    """

    start: tuple[int, ...]
    sizes: tuple[int, ...]


def taken_apart(weights: Sequence[Weight], model: Model) -> list[Weight] | None:
    """Tensors as they are published, each a part of one that is stored.

    The model's library takes tensors without bytes apart: what it makes are views of them.

    Returns:
        None where that is not so, and it takes the bytes to make them.
    """
    fused = {one.name: torch.empty(one.shape, dtype=one.kind, device="meta") for one in weights}
    weight_of = {_memory(fused[one.name]): one for one in weights}
    with _Views():
        made = model.as_published(fused)
    found = []
    for name, tensor in made.items():
        weight = weight_of.get(_memory(tensor))
        if weight is None:
            return None
        box = box_of(weight.shape, tensor.storage_offset(), tensor.shape, tensor.stride())
        if box is None or (weight.is_window and box.sizes != weight.shape):
            return None
        found.append(
            weight._replace(
                name=name,
                shape=tuple(tensor.shape),
                nbytes=tensor.nbytes,
                start=box.start,
                sizes=box.sizes,
            )
        )
    # Else one is left out, or there twice, as where two get one name.
    if sum(one.nbytes for one in found) != sum(one.nbytes for one in weights):
        return None
    return found


def box_of(
    sizes: Sequence[int], offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Box | None:
    """Where in a tensor without gaps a view of it lies; None where that is no box, or turned.

    Args:
        sizes: Of the tensor.
        offset: Of the view's first element.
        shape: Of the view.
        strides: Of the view.
    """
    if tuple(shape) == tuple(sizes) and offset == 0 and 0 in shape:
        return Box((0,) * len(shape), tuple(shape))
    rest = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    start, lengths = [], []
    step = math.prod(sizes)
    for size in sizes:
        step //= max(size, 1)
        begin, offset = divmod(offset, max(step, 1))
        length = rest.pop(0)[0] if rest and size > 1 and rest[0][1] == step else 1
        if begin + length > size:
            return None
        start.append(begin)
        lengths.append(length)
    return None if rest else Box(tuple(start), tuple(lengths))


class _Views(TorchFunctionMode):
    """Has what would copy a tensor as it is give the tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func in _COPIES else func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    """What tells the memory of a tensor from that of others, also where it has no bytes."""
    found: int = tensor.untyped_storage()._cdata
    return found
