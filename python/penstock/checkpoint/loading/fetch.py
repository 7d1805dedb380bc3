"""Reads the bytes of a view: stored tensors, whole tensors assembled from boxes, and boxes."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.tensors.native_rows import Fill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import _native
    from penstock._native import TensorEntry
    from penstock.checkpoint.state.tree.references import BytesLocation
    from penstock.checkpoint.view.view import View
    from penstock.common.progress import Progress
    from penstock.tensors.native_rows import LoadTarget

_SUMS = (
    "bytes",
    "bytes_read",
    "bounced_bytes",
    "device_bytes",
    "opened_bytes",
    "tensors",
    "files",
    "seconds",
)
"""Fields that are added up when the reports of two reads are merged."""


class Fetched(NamedTuple):
    """The result of a read.

    Attributes:
        places: The place of each tensor's bytes, except those read into targets.
        fields: Fields of the `LoadReport`.
        is_whole: Whether every byte of every file was read.
    """

    places: dict[int, BytesLocation]
    fields: dict[str, Any]
    is_whole: bool


class _Destinations(Protocol):
    """Memory that the native module fills: targets of a load, or tensors made on a device."""

    def native(self) -> dict[int, LoadTarget]:
        """Returns the memory of stored tensors, by index."""
        ...

    def requests(self) -> list[Fill]:
        """Returns the requests for boxes and assembled tensors."""
        ...


def fetch(
    checkpoint: _native.Checkpoint,
    seen: View,
    selection: set[int] | None,
    targets: _Destinations,
    *,
    options: dict[str, Any],
    progress: Progress | None,
) -> Fetched:
    """Reads tensors and boxes.

    Args:
        checkpoint: The open checkpoint.
        seen: The view of the checkpoint to which indices refer.
        selection: Indices of the tensors to read; None for everything in every file.
        targets: Memory for some of the tensors, and for boxes of others, selected or not.
        options: How bytes move.
        progress: Called with the bytes done and the total bytes, separately for each of two reads.
    """
    stored = None if selection is None else sorted(selection - seen.wholes.keys())
    requests = targets.requests()
    places: dict[int, BytesLocation] = {}
    for index in sorted(seen.wholes.keys() & (selection or set())):
        if seen.tensors[index].end:
            memory, request = whole_request(seen.wholes[index], seen.tensors[index])
            places[index] = (memory, 0)
            requests.append(request)
    reads = []
    if stored or stored is None or not requests:
        # Not kept in a local variable: an error may keep this frame, and its locals, for long.
        buffers, found, fields = checkpoint.load(
            stored, targets.native(), options=options, progress=progress
        )
        reads.append(fields)
        indices = range(len(seen.tensors)) if stored is None else stored
        places |= {
            index: (buffers[place[0]], place[1])
            for index, place in zip(indices, found, strict=True)
            if place is not None
        }
    if requests:
        try:
            reads.append(checkpoint.fill(requests, options=options, progress=progress))
        finally:
            requests.clear()
    return Fetched(places, merged(reads), stored is None)


def whole_request(key: str | int, entry: TensorEntry) -> tuple[np.ndarray[Any, Any], Fill]:
    """Allocates a whole non-empty tensor; ``key`` is its name in parts, or its entry's index."""
    memory = np.empty(entry.end - entry.begin, np.uint8)
    item_bytes = memory.nbytes // math.prod(entry.shape)
    zeros = (0,) * len(entry.shape)
    return memory, Fill(key, zeros, entry.shape, memory.ctypes.data, None, item_bytes, memory, None)


def merged(reads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the reports of several reads."""
    return functools.reduce(_merged, reads)


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = {**one, **other}
    merged |= {name: one[name] + other[name] for name in _SUMS}
    merged["phases"] = {
        name: one["phases"].get(name, 0.0) + other["phases"].get(name, 0.0)
        for name in one["phases"] | other["phases"]
    }
    merged["fallbacks"] = list(dict.fromkeys(one["fallbacks"] + other["fallbacks"]))
    # A read without bytes opened no file and says nothing about direct I/O.
    moved = [read["direct_io"] for read in (one, other) if read["bytes_read"]]
    merged["direct_io"] = bool(moved) and all(moved)
    merged["staging_peak_bytes"] = max(one["staging_peak_bytes"], other["staging_peak_bytes"])
    return merged
