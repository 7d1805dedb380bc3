"""Tied parameters: one in the model, possibly several in its files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.errors import StateMismatchError, storage_errors
from penstock.io.files.extents import TensorExtent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from penstock.io.files.extents import Composed, FileRange

    Weight = TensorExtent | Composed

_PIECE_BYTES = 16 << 20


def tied(parameters: Mapping[str, Any], found: Mapping[str, Weight]) -> dict[str, Weight]:
    """Locates each parameter, also those stored under another of their names."""
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        if name not in found:
            continue
        other = first.setdefault(id(parameter), name)
        if not _is_same(found[name], found[other]):
            raise StateMismatchError(
                f"{name} and {other} are one parameter in the model, and the files have other "
                "bytes for each: build the model without the tie",
                key=name,
            )
    return {
        name: found[first[id(parameter)]]
        for name, parameter in parameters.items()
        if id(parameter) in first
    }


def _is_same(one: Weight, other: Weight) -> bool:
    """Whether two weights are the same, or have the same bytes."""
    if one == other:
        return True
    if not isinstance(one, TensorExtent) or not isinstance(other, TensorExtent):
        return False
    kinds = [(each.shape, each.dtype, each.arrangement) for each in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    return all(a == b for a, b in zip(_pieces(one), _pieces(other), strict=False))


def _pieces(stored: TensorExtent) -> Iterator[bytes]:
    """Yields a tensor's bytes in pieces of one size, however its file ranges are cut."""
    held = bytearray()
    for run in stored.runs:
        for read in _read(run):
            held += read
            while len(held) >= _PIECE_BYTES:
                yield bytes(held[:_PIECE_BYTES])
                del held[:_PIECE_BYTES]
    yield bytes(held)


def _read(run: FileRange) -> Iterator[bytes]:
    with storage_errors("read", run.path), open(run.path, "rb", buffering=0) as file:
        for begin in range(0, run.nbytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, run.nbytes - begin)
            yield os.pread(file.fileno(), count, run.offset + begin)
