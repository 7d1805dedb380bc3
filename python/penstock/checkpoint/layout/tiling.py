"""Finds tensors whose pieces do not cover them once, on one process or on all ranks together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checkpoint.layout.boxes import check_tiled
from penstock.errors import UnsupportedStateError
from penstock.tensors import dtypes
from penstock.tensors.memory import of_array, of_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.checkpoint.layout.boxes import Block
    from penstock.tensors.marks import Boxes
    from penstock.tensors.memory import Memory


class Pieces(NamedTuple):
    """The pieces of an array or tensor that this process gives."""

    name: str
    shape: tuple[int, ...]
    blocks: list[Block]


class Mistiled(NamedTuple):
    """A tensor whose pieces do not cover it once."""

    name: str
    why: str


def check_pieces(pieces: Pieces, *, is_whole: bool) -> None:
    """Refuses pieces of one process that overlap or reach beyond the whole.

    ``is_whole``: they have to cover the whole, as no other process has any.
    """
    name, shape, blocks = pieces
    try:
        if len(set(blocks)) < len(blocks):
            raise ValueError("two of its pieces are in the same place")
        check_tiled(tuple(shape), blocks, is_whole=is_whole)
    except ValueError as error:
        raise UnsupportedStateError(
            f"{name}: it is not whole: {error}: every element has to be in one piece", key=name
        ) from None


def find_mistiled(parts: Iterable[str]) -> Mistiled | None:
    """Returns the first tensor that the parts do not cover once; None if there is none.

    Args:
        parts: The tensors in the part of each rank, as JSON.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    blocks: dict[str, list[Block]] = {}
    for text in parts:
        for entry in json.loads(text):
            box = entry.get("box")
            if box is None:
                continue
            name, kind = box["tensor"], (entry["dtype"], tuple(box["shape"]))
            if kinds.setdefault(name, kind) != kind:
                return Mistiled(name, f"ranks give it as {kinds[name]} and as {kind}")
            blocks.setdefault(name, []).append((tuple(box["start"]), tuple(entry["shape"])))
    for name, found in blocks.items():
        if len(set(found)) < len(found):
            return Mistiled(name, "two ranks wrote the same piece of it")
        try:
            check_tiled(kinds[name][1], found, is_whole=True)
        except ValueError as error:
            return Mistiled(name, str(error))
    return None


def dtype_of(value: Boxes, name: str) -> str:
    """Returns the name of the element type of an array or tensor in pieces."""
    dtype: Any = value.dtype
    known = None if value.is_array else dtypes.torch_names().get(dtype)
    found = dtypes.numpy_name(dtype) if value.is_array else known and known[0]
    if found is None:
        raise UnsupportedStateError(
            f"{name}: pieces of dtype {dtype} cannot be stored: convert them first", key=name
        )
    return found


def memory_of_piece(elements: Any, name: str, dtype: str, *, is_array: bool) -> Memory:
    """The memory of a piece, whose elements have to be of the type of the whole."""
    if dtypes.is_tensor(elements) == is_array:
        raise UnsupportedStateError(
            f"{name}: a piece is a {type(elements).__name__}: give pieces of "
            f"{'an array as arrays' if is_array else 'a tensor as tensors'}",
            key=name,
        )
    memory = of_array(elements, name) if is_array else of_tensor(elements, name)
    if memory.dtype != dtype:
        raise UnsupportedStateError(
            f"{name}: a piece has elements of {memory.dtype}, and the whole of {dtype}: convert "
            "the piece, or name its type as that of the whole",
            key=name,
        )
    return memory
