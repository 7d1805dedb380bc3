"""Reading the bytes of a view: stored tensors as they lie, wholes and boxes put together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from penstock import _native
    from penstock._native import _Fill
    from penstock.calls.progress import Progress
    from penstock.loading.targets import Targets
    from penstock.loading.view import View
    from penstock.state.references import Place, Row

_SUMS = ("bytes", "bytes_read", "bounced_bytes", "device_bytes", "tensors", "files", "seconds")
"""What adds up in the reports of two reads."""


class Fetched(NamedTuple):
    """What was read.

    Attributes:
        places: Where each tensor's bytes are, of those that were not read into targets.
        fields: Of the `LoadReport`.
        is_whole: Whether every byte of every file was read.
    """

    places: dict[int, Place]
    fields: dict[str, Any]
    is_whole: bool


def fetch(
    checkpoint: _native.Checkpoint,
    seen: View,
    selection: set[int] | None,
    targets: Targets | None,
    *,
    options: dict[str, Any],
    progress: Progress | None,
) -> Fetched:
    """Reads tensors and boxes.

    Args:
        checkpoint: The checkpoint, open.
        seen: The view of it that indices belong to.
        selection: Indices of the tensors to read; None for everything in every file.
        targets: Memory for some of them, and for boxes of others.
        options: How bytes move.
        progress: Called with the bytes done and in all; anew for each of two reads.
    """
    stored = None if selection is None else sorted(selection - seen.wholes.keys())
    native = None if targets is None else targets.native()
    requests = [] if targets is None else targets.requests()
    places: dict[int, Place] = {}
    for index in sorted(seen.wholes.keys() & (selection or set())):
        if seen.tensors[index][5]:
            memory, request = whole_request(seen.wholes[index], seen.tensors[index])
            places[index] = (memory, 0)
            requests.append(request)
    reads = []
    if stored or stored is None or not requests:
        buffers, found, fields = checkpoint.load(stored, native, options=options, progress=progress)
        reads.append(fields)
        indices = range(len(seen.tensors)) if stored is None else stored
        places |= {
            index: (buffers[place[0]], place[1])
            for index, place in zip(indices, found, strict=True)
            if place is not None
        }
    if requests:
        reads.append(checkpoint.fill(requests, options=options, progress=progress))
    return Fetched(places, merged(reads), stored is None)


def whole_request(key: str | int, row: Row) -> tuple[np.ndarray[Any, Any], _Fill]:
    """Memory for all of a tensor that has elements, and what the native module fills it by.

    Args:
        key: Its name in the parts, or the index of its entry.
        row: What a view says of it.
    """
    _, _, shape, _, begin, end = row
    memory = np.empty(end - begin, np.uint8)
    item_bytes = memory.nbytes // math.prod(shape)
    zeros = (0,) * len(shape)
    return memory, (key, zeros, shape, memory.ctypes.data, None, item_bytes, memory, None)


def merged(reads: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of one read or two."""
    if len(reads) == 1:
        return reads[0]
    one, other = reads
    merged = {**one, **other}
    merged |= {name: one[name] + other[name] for name in _SUMS}
    merged["phases"] = {
        name: one["phases"].get(name, 0.0) + other["phases"].get(name, 0.0)
        for name in one["phases"] | other["phases"]
    }
    merged["fallbacks"] = list(dict.fromkeys(one["fallbacks"] + other["fallbacks"]))
    # Only of what was read at all: of one that read nothing no file was opened.
    moved = [read["direct_io"] for read in reads if read["bytes_read"]]
    merged["direct_io"] = bool(moved) and all(moved)
    merged["staging_peak_bytes"] = max(one["staging_peak_bytes"], other["staging_peak_bytes"])
    return merged
