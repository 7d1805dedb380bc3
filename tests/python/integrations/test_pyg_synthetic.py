"""The synthetic graph has its documented shape, and is the same each time."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.integrations.pyg.synthetic import EDGES, NODES, Igbh

SCALE = 1e-4


@pytest.fixture(scope="module", params=[True, False])
def made(request: pytest.FixtureRequest) -> Igbh:
    return Igbh(SCALE, is_permuted=request.param)


def test_types_have_their_shares_and_edges_their_law(made: Igbh) -> None:
    assert made.nodes["paper"] == round(NODES["paper"] * SCALE)
    assert made.nodes["author"] == round(NODES["author"] * SCALE)
    graph = made.graph()
    assert len(graph.edges) == 7
    for (source, name, target), count in EDGES.items():
        edges = graph.edges[source, name, target]
        degrees = np.diff(edges.first.numpy())
        assert degrees.sum() == round(count * SCALE)
        if target == "paper":
            # IGB's values at four sizes: the mean and the maximum.
            assert degrees.mean() == pytest.approx(14.84, rel=0.01)
            assert 0.7 < degrees.max() / (0.13 * len(degrees) ** 0.75) < 1.4
            # Far from uniform: a tenth of the nodes has at least a third of the edges.
            assert np.sort(degrees)[-len(degrees) // 10 :].sum() > degrees.sum() / 3
            first = degrees[: len(degrees) // 10].mean() / degrees.mean()
            assert first == pytest.approx(1, abs=0.25) if made.is_permuted else first > 2
        if source != target:
            back = graph.edges[target, f"rev_{name}", source]
            assert len(back.sources) == len(edges.sources)


def test_permuted_nodes_are_the_same_by_other_numbers() -> None:
    kind = ("paper", "cites", "paper")
    degrees, labels = [], []
    for is_permuted in (True, False):
        made = Igbh(SCALE, is_permuted=is_permuted)
        degrees.append(np.diff(made.graph().edges[kind].first.numpy()))
        labels.append(made.labels.numpy())
    assert not np.array_equal(degrees[0], degrees[1])
    for one, other in (degrees, labels):
        assert np.array_equal(np.sort(one), np.sort(other))


def test_all_follows_from_the_arguments() -> None:
    first, second, other = (Igbh(1e-6, seed=seed) for seed in (1, 1, 2))
    for kind, edges in first.graph().edges.items():
        assert np.array_equal(edges.sources, second.graph().edges[kind].sources)
    assert not np.array_equal(first.labels, other.labels)
    for kind in first.nodes:
        rows = [np.concatenate(list(one.rows(kind, 8))) for one in (first, second, other)]
        assert rows[0].shape == (first.nodes[kind], 8)
        assert np.array_equal(rows[0], rows[1])
        assert not np.array_equal(rows[0], rows[2])
    for scale in (0, 1.5):
        with pytest.raises(ValueError, match="scale"):
            Igbh(scale)
