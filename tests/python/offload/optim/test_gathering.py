"""Boxes of many tensors in one memory: each byte once, within bounds."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.offload.optim.layout import ParameterEntry, StateSegment, segments_of
from penstock.offload.optim.state_dict import PIECE_BYTES, pieces

ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([(), (0, 4), (3,), (17, 3), (64, 64), (3000, 1000), (2, 3, 1 << 20)]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        st.sampled_from([("exp_avg", "exp_avg_sq"), ("momentum_buffer",)]),
    ),
    min_size=1,
    max_size=10,
).map(lambda found: [ParameterEntry(number, *one) for number, one in enumerate(found)])


@given(ENTRIES, st.randoms())
def test_pieces_hold_everything_once(entries: list[ParameterEntry], random: object) -> None:
    segments = segments_of(entries)
    wanted = [
        (segment, entry.number, file)
        for segment in segments
        for entry in segment.entries
        for file in range(len(segment.moments))
    ]
    random.shuffle(wanted)
    elements: Counter[int] = Counter()
    covered: dict[tuple[StateSegment, int], list[tuple[int, int]]] = {}
    for piece in pieces(wanted):
        assert piece.nbytes <= PIECE_BYTES
        ends = [(run.place, run.place + run.nbytes) for run in piece.runs]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        assert ends[-1][1] == piece.nbytes
        for run in piece.runs:
            covered.setdefault((run.segment, run.file), []).append(
                (run.offset, run.offset + run.nbytes)
            )
        for box in piece.boxes:
            segment, number, file = wanted[box.target]
            index = segment.index_of(number)
            entry, start = segment.entries[index], segment.starts[index]
            size = entry.dtype.itemsize
            elements[box.target] += math.prod(box.shape)
            strides = torch.empty(entry.shape, device="meta").stride()
            first = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
            offset, nbytes = start + first * size, math.prod(box.shape) * size
            # The bytes of the box are those of the range around it.
            (run,) = (run for run in piece.runs if run.place <= box.place < run.place + run.nbytes)
            assert (run.segment, run.file) == (segment, file)
            assert run.offset - run.place == offset - box.place
            assert box.place + nbytes <= run.place + run.nbytes
            assert box.place % size == 0
    for target, (segment, number, _) in enumerate(wanted):
        assert elements[target] == segment.entries[segment.index_of(number)].count
    for (segment, _), ranges in covered.items():
        ranges.sort()
        assert ranges[0][0] == segment.starts[0]
        assert ranges[-1][1] == segment.nbytes
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))


def test_neighbours_are_one_run() -> None:
    entries = [ParameterEntry(number, (16, 3), torch.float32, ("a", "b")) for number in range(4000)]
    (segment,) = segments_of(entries)
    wanted = [(segment, entry.number, file) for entry in entries for file in range(2)]
    found = list(pieces(wanted))
    assert [len(piece.runs) for piece in found] == [2]
    assert len(found[0].boxes) == 8000
