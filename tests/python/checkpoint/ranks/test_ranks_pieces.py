"""Tensors of which each rank gives some pieces, without a mesh that says who holds the others."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from dtensors import rank
from penstock.checkpoint.layout.tiling import find_mistiled
from penstock.errors import RankError, UnsupportedStateError
from penstock.plugin import Boxes, PerRank
from ranks import IMPATIENT

WHOLE = torch.arange(60, dtype=torch.float32).reshape(10, 6)


def boxes(*rows, dtype=torch.float32):
    """Some rows of the whole, in pieces."""
    whole = WHOLE.to(dtype)
    return Boxes(tuple(whole.shape), dtype, [((first, 0), whole[first:end]) for first, end in rows])


def state():
    """Pieces of one tensor on both ranks; tensors of one rank alone, whole, empty and a scalar."""
    found = {"both": boxes((0, 3), (8, 10)) if rank() == 0 else boxes((3, 8))}
    if rank() == 1:
        found["late"] = boxes((0, 10), dtype=torch.bfloat16)
        found["none"] = Boxes((0, 4), torch.int64, [((0, 0), torch.empty(0, 4).long())])
        found["scalar"] = Boxes((), torch.int32, [((), torch.tensor(7, dtype=torch.int32))])
        found["columns"] = Boxes(
            (10, 6), torch.float32, [((0, at), WHOLE[:, at : at + 2]) for at in (0, 2, 4)]
        )
    return {"tensors": found, "rank": rank()}


def save(path, lazy):
    with penstock.Saver(options=IMPATIENT) as saver:
        if lazy is None:
            saver.save(path, state())
        else:
            saver.save_async(path, state(), lazy=lazy)


@pytest.mark.parametrize("lazy", [None, False, True])
def test_pieces_of_all_ranks_come_back_as_one_tensor(jobs, disk_path, lazy):
    jobs.of(2).call(save, disk_path / "ckpt", lazy)
    tensors = penstock.load(disk_path / "ckpt")["tensors"]
    assert torch.equal(tensors["both"], WHOLE)
    assert torch.equal(tensors["late"], WHOLE.bfloat16())
    assert torch.equal(tensors["columns"], WHOLE)
    assert tensors["none"].shape == (0, 4)
    assert tensors["scalar"] == torch.tensor(7, dtype=torch.int32)
    assert penstock.verify(disk_path / "ckpt").ok


def test_pieces_of_one_process_come_back_as_a_tensor(tmp_path):
    penstock.save(tmp_path / "ckpt", {"w": boxes((4, 10), (0, 4))})
    assert torch.equal(penstock.load(tmp_path / "ckpt")["w"], WHOLE)


MISTAKES = {
    "only 48 of its 60 elements": lambda: boxes((0, 4)) if rank() else boxes((4, 8)),
    "overlap": lambda: boxes((0, 6)) if rank() else boxes((5, 10)),
    # A gap beside an overlap of the same size.
    "overlap|only": lambda: boxes((0, 6)) if rank() else boxes((5, 9)),
    "same piece": lambda: boxes((0, 10)),
    "a tensor of its own": lambda: boxes((0, 10)) if rank() else WHOLE.clone(),
    "as ('float32'": lambda: boxes((0, 5)) if rank() else boxes((5, 10), dtype=torch.float64),
}


def save_mistaken(path, mistake):
    saver = penstock.Saver(options=IMPATIENT)
    saver.save(path, {"w": boxes((0, 5)) if rank() else boxes((5, 10))})
    try:
        saver.save(path, {"w": MISTAKES[mistake]()}, overwrite=True)
    except penstock.PenstockError as error:
        return (error.with_traceback(None),)
    return None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_pieces_that_do_not_cover_a_tensor_once_are_an_error_by_name(jobs, disk_path, mistake):
    for (error,) in jobs.of(2).call(save_mistaken, disk_path / "ckpt", mistake):
        assert type(error) is RankError
        assert "w is not whole" in str(error)
    # The checkpoint before is still there.
    assert torch.equal(penstock.load(disk_path / "ckpt")["w"], WHOLE)


def refused(path, wrap):
    array = Boxes((4,), np.dtype("int64"), [((0,), np.arange(4))])
    # A rank that comes later learns of the other's error.
    with pytest.raises((UnsupportedStateError, RankError), match="w: ") as caught:
        penstock.save(path, {"w": PerRank(boxes((0, 10))) if wrap else array}, options=IMPATIENT)
    return str(caught.value)


def without_pieces(path):
    empty = Boxes((10, 6), torch.float32, [])
    with pytest.raises((UnsupportedStateError, RankError), match="leave it out") as caught:
        penstock.save(path, {"w": empty}, options=IMPATIENT)
    return str(caught.value)


def test_a_tensor_of_which_no_rank_gives_a_piece_is_refused(jobs, disk_path):
    assert all("w: " in text for text in jobs.of(2).call(without_pieces, disk_path / "ckpt"))


@pytest.mark.parametrize(("wrap", "said"), [(True, "take it out of PerRank"), (False, "no_dist")])
def test_pieces_that_are_no_common_tensor_are_refused(jobs, disk_path, wrap, said):
    assert all(said in text for text in jobs.of(2).call(refused, disk_path / "ckpt", wrap))


@given(
    cuts=st.lists(st.integers(0, 20), max_size=6),
    owners=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    changed=st.integers(0, 7),
    shift=st.integers(-20, 20),
    lengths=st.integers(-3, 3),
)
def test_the_parts_of_all_ranks_tell_exactly_whether_pieces_cover_a_tensor(
    cuts, owners, changed, shift, lengths
):
    pieces = [[first, end] for first, end in itertools.pairwise(sorted({0, 20, *cuts}))]
    chosen = pieces[changed % len(pieces)]
    chosen[0] += shift
    chosen[1] += shift + lengths
    parts = [{"tensors": []} for _ in range(4)]
    times = [0] * 20
    is_within = True
    for index, (first, end) in enumerate(pieces):
        end = max(first, end)
        is_within = is_within and first >= 0 and end <= 20
        for row in range(max(0, first), min(20, end)):
            times[row] += 1
        parts[owners[index]]["tensors"].append(
            {
                "name": f"w{index}",
                "dtype": "float32",
                "shape": [end - first, 3],
                "box": {"tensor": "w", "shape": [20, 3], "start": [first, 0]},
            }
        )
    found = find_mistiled(json.dumps(part["tensors"]) for part in parts)
    places = [(first, max(first, end)) for first, end in pieces]
    is_twice = len(set(places)) < len(places)
    assert (found is None) == (is_within and not is_twice and times == [1] * 20)


WRONG = {
    "only 48 of its 60": lambda: boxes((0, 8)),
    "only 0 of its 60": lambda: Boxes((10, 6), torch.float32, []),
    "overlap": lambda: boxes((0, 6), (4, 10)),
    "reaches beyond": lambda: Boxes((4, 6), torch.float32, [((-1, 0), WHOLE[:5])]),
    "elements of float64": lambda: Boxes(
        (10, 6), torch.float32, [((0, 0), WHOLE[:5]), ((5, 0), WHOLE[5:].double())]
    ),
    "a piece is a ndarray": lambda: Boxes((10, 6), torch.float32, [((0, 0), WHOLE.numpy())]),
}


@pytest.mark.parametrize("said", WRONG)
def test_pieces_of_one_process_that_are_no_tensor_are_refused(tmp_path, said):
    penstock.save(tmp_path / "ckpt", {"w": WHOLE})
    with pytest.raises(UnsupportedStateError, match=said):
        penstock.save(tmp_path / "ckpt", {"w": WRONG[said]()}, overwrite=True)
    assert torch.equal(penstock.load(tmp_path / "ckpt")["w"], WHOLE)
