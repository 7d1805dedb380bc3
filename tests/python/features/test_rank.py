"""Hot sets are the nodes that samplers visit most."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.features import rank


@st.composite
def graphs(draw: Any) -> tuple[Any, Any]:
    degrees = draw(st.lists(st.integers(0, 5), min_size=1, max_size=30))
    nodes = len(degrees)
    edges = sum(degrees)
    row = draw(st.lists(st.integers(0, nodes - 1), min_size=edges, max_size=edges))
    return np.cumsum([0, *degrees]), np.array(row, np.int64)


def walked(colptr: Any, row: Any, damping: float, rounds: int) -> Any:
    """Computes the distribution of random walks by a dense matrix."""
    nodes = len(colptr) - 1
    steps = np.zeros((nodes, nodes))
    for node in range(nodes):
        neighbours = row[colptr[node] : colptr[node + 1]]
        for neighbour in neighbours:
            steps[node, neighbour] += 1 / len(neighbours)
        if len(neighbours) == 0:
            steps[node] = 1 / nodes
    likely = np.full(nodes, 1 / nodes)
    for _ in range(rounds):
        likely = damping * likely @ steps + (1 - damping) / nodes
    return likely


@given(graph=graphs(), damping=st.sampled_from([0.0, 0.5, 0.85]), rounds=st.integers(1, 25))
def test_reverse_pagerank_is_where_walks_against_the_edges_are(
    graph: Any, damping: float, rounds: int
) -> None:
    colptr, row = graph
    ids = rank(by="reverse_pagerank", colptr=colptr, row=row, damping=damping, rounds=rounds)
    likely = walked(colptr, row, damping, rounds)
    assert sorted(ids) == list(range(len(colptr) - 1))
    assert (np.diff(likely[ids]) <= 1e-12).all()


def test_edges_are_taken_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    colptr = np.cumsum([0, *rng.integers(0, 9, 300)])
    row = rng.integers(0, 300, colptr[-1])
    whole = rank(by="reverse_pagerank", colptr=colptr, row=row)
    module = importlib.import_module("penstock.features.rank")
    monkeypatch.setattr(module, "_EDGES_AT_ONCE", 5)
    assert np.array_equal(rank(by="reverse_pagerank", colptr=colptr, row=row), whole)


@given(graph=graphs(), top=st.one_of(st.none(), st.integers(0, 40)))
def test_degree_is_of_how_many_a_node_is_a_neighbour(graph: Any, top: int | None) -> None:
    colptr, row = graph
    degrees = np.bincount(row, minlength=len(colptr) - 1)
    best = sorted(range(len(degrees)), key=lambda node: (-degrees[node], node))
    ids = rank(by="degree", colptr=colptr, row=row, top=top)
    assert ids.dtype == np.int64
    assert ids.tolist() == best[:top]
    counted = rank(by="counts", counts=degrees.astype(np.uint64), top=top)
    assert np.array_equal(counted, ids)


def test_tensors_are_taken_as_they_are() -> None:
    colptr, row = torch.tensor([0, 2, 3, 4]), torch.tensor([1, 2, 2, 0], dtype=torch.int32)
    assert rank(by="degree", colptr=colptr, row=row).tolist() == [2, 0, 1]
    assert rank(by="counts", counts=torch.tensor([0.5, 2.0])).tolist() == [1, 0]


def test_neighbours_may_be_of_another_type() -> None:
    ids = rank(by="degree", colptr=[0, 2, 3], row=[6, 6, 1], nodes=7, top=2)
    assert ids.tolist() == [6, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"by": "fame"}, ValueError, "by='fame'"),
        ({"by": "degree", "colptr": [0]}, TypeError, "row: missing"),
        ({"by": "counts"}, TypeError, "counts: missing"),
        ({"by": "counts", "counts": [float("nan")]}, ValueError, "counts: not a number"),
        ({"by": "counts", "counts": [1], "top": -1}, ValueError, "top=-1"),
        ({"by": "degree", "colptr": [0, 1], "row": [0.5]}, TypeError, "row: float64"),
        ({"by": "degree", "colptr": [[0]], "row": []}, ValueError, "colptr: shape"),
        ({"by": "degree", "colptr": [0, 2, 1], "row": [0]}, ValueError, "never go down"),
        ({"by": "degree", "colptr": [0, 2], "row": [0]}, ValueError, "ends with 2"),
        ({"by": "degree", "colptr": [0, 2], "row": [0, 1]}, ValueError, r"row\[1\] is 1"),
        ({"by": "degree", "colptr": [0, 1], "row": [-1]}, ValueError, r"row\[0\] is -1"),
        (
            {"by": "reverse_pagerank", "colptr": [0, 1], "row": [0], "nodes": 2},
            ValueError,
            "nodes=2",
        ),
        (
            {"by": "reverse_pagerank", "colptr": [0, 1], "row": [0], "damping": 1.0},
            ValueError,
            "damping=1.0",
        ),
        (
            {"by": "reverse_pagerank", "colptr": [0, 1], "row": [0], "rounds": 0},
            ValueError,
            "rounds=0",
        ),
    ],
)
def test_what_is_no_graph_is_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        rank(**arguments)
