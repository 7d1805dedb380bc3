"""The layout of state in files and its division into windows, for any parameters."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.offload.optim import layout
from penstock.offload.optim.layout import LINE_BYTES, ParameterEntry, StateSegment
from penstock.tensors.file_tensor import CHUNK_BYTES

ENTRIES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 1, 3, 17, 64, 129, 1024]), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    ),
    min_size=1,
    max_size=12,
).map(
    lambda found: (
        [
            ParameterEntry(number, tuple(shape), dtype, ("exp_avg", "exp_avg_sq"))
            for number, (shape, dtype) in enumerate(found)
            if torch.Size(shape).numel() < 1 << 22
        ]
        or [ParameterEntry(0, (), torch.float32, ("exp_avg", "exp_avg_sq"))]
    )
)


@given(ENTRIES, st.integers(1, 4))
def test_windows_hold_everything_once(entries: list[ParameterEntry], chunks: int) -> None:
    segment = StateSegment(entries[0].moments, entries)
    at = 0
    elements = {entry.number: 0 for entry in entries}
    for window in segment.windows(chunks * CHUNK_BYTES):
        assert window.begin == at
        assert window.begin % CHUNK_BYTES == 0
        at = window.end
        for piece in window.pieces:
            # In order, and cut at vector boundaries.
            assert piece.begin == elements[piece.entry.number]
            elements[piece.entry.number] = piece.end
            size = piece.entry.dtype.itemsize
            assert piece.begin * size % LINE_BYTES == 0
            start = segment.starts[segment.index_of(piece.entry.number)]
            assert window.begin + piece.place == start + piece.begin * size
            assert piece.place % size == 0
    assert at == segment.nbytes
    assert elements == {entry.number: entry.count for entry in entries}


@given(ENTRIES)
def test_headers_are_of_safetensors(entries: list[ParameterEntry]) -> None:
    segment = StateSegment(entries[0].moments, entries)
    for moment, header in zip(segment.moments, segment.headers, strict=True):
        assert len(header) % 4096 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        described = json.loads(header[8:])
        assert described.pop("__metadata__") == {"format": "pt", "penstock": "1"}
        at = 0
        for entry, start in zip(segment.entries, segment.starts, strict=True):
            one = described.pop(layout.label(entry.number, moment))
            assert one["shape"] == list(entry.shape)
            assert one["data_offsets"] == [at, at + entry.nbytes]
            assert start == len(header) + at
            at += entry.nbytes
        assert not described
        assert segment.nbytes == len(header) + at
