"""Determines, without bytes, which part of a fused tensor each published tensor is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.exporting.chosen import Weight
    from penstock.checkpoint.exporting.models import MetaModel

_COPIES = (torch.Tensor.contiguous, torch.Tensor.clone)


class TensorSlice(NamedTuple):
    """A part of a tensor."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]


def split_weights(weights: Sequence[Weight], model: MetaModel) -> list[Weight] | None:
    """Returns the published tensors, each as a part of a stored one.

    The model's library splits tensors without bytes: the results are views of them.

    Returns:
        None if a result is no such view, so that the split needs the bytes.
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
    # Otherwise a tensor is omitted or duplicated, for example if two get one name.
    if sum(one.nbytes for one in found) != sum(one.nbytes for one in weights):
        return None
    return found


def box_of(
    sizes: Sequence[int], offset: int, shape: Sequence[int], strides: Sequence[int]
) -> TensorSlice | None:
    """Returns the box of a view in a contiguous tensor; None if it is no box, or transposed."""
    if tuple(shape) == tuple(sizes) and offset == 0 and 0 in shape:
        return TensorSlice((0,) * len(shape), tuple(shape))
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
    return None if rest else TensorSlice(tuple(start), tuple(lengths))


class _Views(TorchFunctionMode):
    """Replaces plain copies of tensors by the tensors themselves."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func in _COPIES else func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    """Returns an id of a tensor's memory, also for tensors without bytes."""
    found: int = tensor.untyped_storage()._cdata
    return found
