"""Locates the tensors of a checkpoint in its files, for readers that access them in place."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.plain import plain
from penstock.checkpoint.state.tree.references import BYTES_TAGS, is_data, reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._native import TensorEntry
    from penstock.checkpoint.loading.opened import OpenCheckpoint
    from penstock.checkpoint.state.tree.references import Window


class StoredRange(NamedTuple):
    """A byte range that is contiguous in a file and in a tensor.

    Attributes:
        file: The path of the file.
        begin: Offset in the file.
        nbytes: Number of bytes.
        place: Offset in the row-major tensor, in bytes.
    """

    file: str
    begin: int
    nbytes: int
    place: int


class PlacedTensor(NamedTuple):
    """A tensor of a state, with its byte ranges.

    Attributes:
        name: Its dotted name.
        dtype: Name of the element type.
        shape: The sizes.
        runs: All byte ranges, in order; None if they are not contiguous, as for a transposed view,
            or for boxes that are cut along an inner dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[StoredRange, ...] | None


def placed(checkpoint: OpenCheckpoint, *, is_plain: bool = False) -> Iterator[PlacedTensor]:
    """Yields the tensors of the state that the checkpoint was viewed for.

    ``is_plain`` includes members of composite tensors, such as the values of a sparse tensor, and
    tensors in values of classes.
    """
    seen = checkpoint.seen
    boxes: dict[str, list[tuple[TensorEntry, tuple[int, ...]]]] = {}
    for box in checkpoint.native.boxes():
        boxes.setdefault(box.tensor, []).append((seen.tensors[box.index], box.start))
    for name, leaf in tree.leaves(plain(seen.node) if is_plain else seen.node):
        if type(leaf) is not dict or not is_data(leaf) or leaf["$"] in BYTES_TAGS:
            continue
        index, window = reference(leaf, seen.tensors, seen.aliases)
        entry = seen.tensors[index]
        shape = entry.shape
        if index in seen.wholes:
            stored = boxes.get(seen.wholes[index], [])
        else:
            stored = [(entry, (0,) * len(shape))]
        item_bytes = (entry.end - entry.begin) // max(1, math.prod(shape))
        runs = _runs(checkpoint.path, stored, shape, item_bytes)
        if window is not None:
            shape = window[0]
            runs = _within(runs, window, item_bytes)
        yield PlacedTensor(name, entry.dtype, tuple(shape), runs)


def _runs(
    path: str,
    stored: Sequence[tuple[TensorEntry, tuple[int, ...]]],
    shape: tuple[int, ...],
    item_bytes: int,
) -> tuple[StoredRange, ...] | None:
    """Returns the boxes as byte ranges of the whole tensor; None if one is not contiguous there."""
    strides = _row_major(shape)
    runs = []
    for entry, start in stored:
        # Behind its first dimension of more than one index, the box must be as large as the tensor.
        cut = next((dim for dim, size in enumerate(entry.shape) if size != 1), len(shape))
        if tuple(entry.shape[cut + 1 :]) != tuple(shape[cut + 1 :]):
            return None
        place = sum(index * stride for index, stride in zip(start, strides, strict=True))
        nbytes = entry.end - entry.begin
        if nbytes:
            file = os.path.join(path, entry.file)
            runs.append(StoredRange(file, entry.begin, nbytes, place * item_bytes))
    return tuple(sorted(runs, key=lambda run: run.place))


def _within(
    runs: tuple[StoredRange, ...] | None, window: Window, item_bytes: int
) -> tuple[StoredRange, ...] | None:
    """Returns a window's part of a tensor's byte ranges; None if it is not contiguous."""
    shape, strides, offset = window
    sides = zip(shape, strides, _row_major(shape), strict=True)
    is_plain = all(size == 1 or stride == expected for size, stride, expected in sides)
    if runs is None or not is_plain:
        return None
    begin = offset * item_bytes
    end = begin + math.prod(shape) * item_bytes
    found = []
    for run in runs:
        first, last = max(begin, run.place), min(end, run.place + run.nbytes)
        if first < last:
            inside = first - run.place
            found.append(StoredRange(run.file, run.begin + inside, last - first, first - begin))
    return tuple(found)


def _row_major(shape: Sequence[int]) -> list[int]:
    """Returns the row-major strides, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
