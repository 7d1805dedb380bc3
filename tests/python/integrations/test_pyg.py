"""PyG's loaders on tables: each batch has its nodes' rows, and neighbours are drawn uniformly."""

from __future__ import annotations

import gc
import io
import threading
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import (
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
)

import penstock
from features.tables import table_of
from penstock import features
from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph, NeighborSampler
from penstock.integrations.pyg.packing import PackedSample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODES, WIDTH = 800, 32


@pytest.fixture
def edge_index() -> torch.Tensor:
    return torch.randint(0, NODES, (2, 6000), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def table(tmp_path: Path) -> Iterator[tuple[features.Features, torch.Tensor]]:
    source, want = table_of(tmp_path, rows=NODES, width=WIDTH)
    with features.Features(source, cache=features.Cache(1 << 15)) as opened:
        yield opened, torch.from_numpy(want)


def check(batch: Any, want: torch.Tensor, edge_index: torch.Tensor) -> None:
    """Checks that a batch is a part of the graph."""
    assert torch.equal(batch.x, want[batch.n_id])
    assert torch.equal(batch.y, batch.n_id)
    assert len(torch.unique(batch.n_id)) == len(batch.n_id)
    assert torch.equal(batch.n_id[batch.edge_index], edge_index[:, batch.e_id])
    assert sum(batch.num_sampled_nodes) == len(batch.n_id)
    assert sum(batch.num_sampled_edges) == batch.edge_index.shape[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_the_rows_of_their_nodes(table: Any, edge_index: Any, workers: int) -> None:
    opened, want = table
    store = FeatureStore({"x": opened, "y": torch.arange(NODES)})
    loader = GatherLoader(
        store,
        Graph(edge_index, NODES),
        [4, 3],
        torch.arange(300),
        batch_size=64,
        shuffle=True,
        num_workers=workers,
    )
    for _ in range(2):
        seen = []
        for batch in loader:
            check(batch, want, edge_index)
            seen.append(batch.n_id[: batch.batch_size])
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(300))
    assert len(loader) == 5
    assert opened.stats().rows > 0


def test_a_loader_of_pyg_takes_store_graph_and_sampler(table: Any, edge_index: Any) -> None:
    opened, want = table
    graph = Graph(edge_index, NODES)
    data = FeatureStore({"x": opened, "y": torch.arange(NODES)}), graph
    loader = NodeLoader(data, NeighborSampler(graph, [-1]), torch.arange(50), batch_size=25)
    assert len(list(loader)) == 2
    for batch in loader:
        check(batch, want, edge_index)
        inside = torch.isin(edge_index[1], batch.n_id[:25])
        assert torch.equal(batch.e_id.sort().values, inside.nonzero().view(-1))


def test_a_loader_of_pyg_takes_links(table: Any, edge_index: Any) -> None:
    opened, want = table
    graph = Graph(edge_index, NODES)
    data = FeatureStore({"x": opened, "y": torch.arange(NODES)}), graph
    links = edge_index[:, :60]
    loader = LinkLoader(
        data, NeighborSampler(graph, [3, 2]), (None, links), neg_sampling="binary", batch_size=20
    )
    assert len(list(loader)) == 3
    for given, batch in zip(links.split(20, 1), loader, strict=True):
        check(batch, want, edge_index)
        assert torch.equal(batch.n_id[batch.edge_label_index[:, :20]], given)
        assert batch.edge_label_index.shape == (2, 40)
        assert batch.edge_label.tolist() == [1.0] * 20 + [0.0] * 20


def test_links_between_types_have_nodes_that_they_do_not_go_to() -> None:
    writes = torch.stack([torch.randint(0, 40, (900,)), torch.randint(0, 100, (900,))])
    kind = ("author", "writes", "paper")
    edges = {kind: writes, ("paper", "by", "author"): writes.flip(0)}
    graph = Graph(edges, {"paper": 100, "author": 40})
    # Edges of weight 0 are never drawn.
    weights = (torch.arange(100) < 10).float()
    given = NegativeSampling("triplet", 2, dst_weight=weights)
    row, col = writes[:, :30]
    index = EdgeSamplerInput(None, row, col, input_type=kind)
    sampler = NeighborSampler(graph, [2])
    before = torch.get_rng_state()
    out = sampler.sample_from_edges(index, given)
    again = sampler.sample_from_edges(index, given)
    assert torch.equal(torch.get_rng_state(), before)
    _, source, target, negative, _ = out.metadata
    assert torch.equal(out.node["author"][source], row)
    assert torch.equal(out.node["paper"][target], col)
    assert negative.shape == (30, 2)
    assert out.node["paper"][negative].unique().tolist() == list(range(10))
    assert torch.equal(again.metadata[3], negative)
    assert torch.equal(again.edge[kind], out.edge[kind])
    sampler.set_epoch(1)
    assert not torch.equal(sampler.sample_from_edges(index, given).metadata[3], negative)
    with pytest.raises(ValueError, match="dst_weight: 3 weights"):
        sampler.sample_from_edges(index, NegativeSampling("triplet", dst_weight=torch.ones(3)))
    with pytest.raises(ValueError, match="no nodes of type 'venue'"):
        sampler.sample_from_edges(
            EdgeSamplerInput(None, row, col, input_type=("author", "in", "venue"))
        )
    with pytest.raises(ValueError, match="leave it out"):
        sampler.sample_from_edges(EdgeSamplerInput(None, row, col, time=row, input_type=kind))


def test_types_of_nodes_have_features_of_their_own(table: Any) -> None:
    opened, want = table
    other = torch.randn(40, 5)
    store = FeatureStore({("paper", "x"): opened, ("author", "x"): other})
    writes = torch.stack([torch.randint(0, 40, (900,)), torch.randint(0, NODES, (900,))])
    edges = {("author", "writes", "paper"): writes, ("paper", "by", "author"): writes.flip(0)}
    graph = Graph(edges, {"paper": NODES, "author": 40})
    loader = GatherLoader(store, graph, [3, 2], ("paper", torch.arange(100)), batch_size=30)
    for batch in loader:
        assert torch.equal(batch["paper"].x, want[batch["paper"].n_id])
        assert torch.equal(batch["author"].x, other[batch["author"].n_id])
        for (source, _, target), given in edges.items():
            part = batch[source, _, target]
            local = part.edge_index
            found = torch.stack([batch[source].n_id[local[0]], batch[target].n_id[local[1]]])
            assert torch.equal(found, given[:, part.e_id])
    by_type = {kind: [1, 1] for kind in edges}
    assert NeighborSampler(graph, by_type).hops == 2
    with pytest.raises(ValueError, match="is missing"):
        NeighborSampler(graph, {("author", "writes", "paper"): [1]})


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 20])
def test_every_neighbour_is_as_likely(count: int, replace: bool) -> None:
    # So many nodes have 7 edges, as many have 2, as many none.
    each = 2000
    targets = [torch.arange(each).repeat_interleave(7), torch.arange(each, 2 * each).repeat(2)]
    target = torch.cat(targets)
    edges = torch.stack([torch.arange(len(target)) % (3 * each), target])
    sampler = NeighborSampler(Graph(edges, 3 * each), [count], replace=replace)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(3 * each)))
    degrees = torch.bincount(out.col, minlength=3 * each).view(3, each)
    for found, there in zip(degrees, (7, 2, 0), strict=True):
        drawn = min(count, there) if not replace else count * bool(there)
        assert (found == drawn).all()
    if not replace:
        assert len(torch.unique(out.edge)) == len(out.edge)
    # By an edge's place among those of its node: within six standard deviations of a count.
    of_many = torch.bincount(out.edge[out.edge < 7 * each] % 7, minlength=7).double()
    of_two = torch.bincount((out.edge[out.edge >= 7 * each] - 7 * each) // each, minlength=2)
    for found in (of_many, of_two.double()):
        assert (found - found.mean()).abs().max() <= 6 * found.mean().sqrt()


def test_what_is_drawn_depends_on_seed_epoch_and_nodes_alone(edge_index: Any) -> None:
    graph = Graph(edge_index, NODES)
    nodes = NodeSamplerInput(None, torch.arange(20))
    first = NeighborSampler(graph, [3, 3], seed=1)
    once = first.sample_from_nodes(nodes)
    torch.rand(100)
    assert torch.equal(first.sample_from_nodes(nodes).edge, once.edge)
    first.set_epoch(1)
    assert not torch.equal(first.sample_from_nodes(nodes).edge, once.edge)
    other = NeighborSampler(graph, [3, 3], seed=2).sample_from_nodes(nodes)
    assert not torch.equal(other.edge, once.edge)


def test_an_epoch_that_is_left_leaves_nothing_behind(table: Any, edge_index: Any) -> None:
    opened, _ = table
    store = FeatureStore({"x": opened})
    loader = GatherLoader(
        store, Graph(edge_index, NODES), [2], torch.arange(500), batch_size=10, ahead=3
    )
    epoch = iter(loader)
    next(epoch)
    del epoch
    gc.collect()
    assert not [one for one in threading.enumerate() if one.name == "penstock-sample"]
    assert not store._ahead


def test_what_goes_wrong_ahead_is_told(table: Any, edge_index: Any, tmp_path: Path) -> None:
    opened, _ = table
    store = FeatureStore({"x": opened})
    graph = Graph(edge_index, NODES)

    def fail(_: Any) -> Any:
        raise RuntimeError("not this one")

    with pytest.raises(RuntimeError, match="not this one"):
        list(GatherLoader(store, graph, [2], torch.arange(5), transform_sampler_output=fail))
    with pytest.raises(IndexError, match=r"input nodes\[0\] is 800"):
        list(GatherLoader(store, graph, [2], torch.tensor([NODES])))
    loader = GatherLoader(store, graph, [2], torch.arange(100), batch_size=10)
    (tmp_path / "part-0").write_bytes(b"another")
    with pytest.raises(penstock.PenstockError, match="part-0"):
        list(loader)
    assert not store._ahead


def test_a_graph_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match="a target is none of 3"):
        Graph(torch.tensor([[0], [3]]), 3)
    with pytest.raises(ValueError, match="a source is none of 3"):
        Graph(torch.tensor([[-1], [0]]), 3)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Graph(torch.tensor([0, 1, 2]), 3)
    with pytest.raises(ValueError, match="colptr"):
        Graph((torch.tensor([0, 2, 1, 3]), torch.tensor([0, 0, 0])), 3)
    graph = Graph((torch.tensor([0, 2, 2, 3]), torch.tensor([1, 2, 0])), 3)
    out = NeighborSampler(graph, [-1]).sample_from_nodes(NodeSamplerInput(None, torch.arange(3)))
    assert (out.row.tolist(), out.col.tolist()) == ([1, 2, 0], [0, 0, 2])


def test_a_network_learns_from_a_table(table: Any, edge_index: Any) -> None:
    """Bit for bit as from memory: rows, order and neighbours are the same."""
    opened, want = table
    graph = Graph(edge_index, NODES)

    def losses(held: Any) -> list[float]:
        torch.manual_seed(0)
        model = SAGEConv(WIDTH, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        store = FeatureStore({"x": held, "y": torch.arange(NODES) % 4})
        told = []
        loader = GatherLoader(store, graph, [4], torch.arange(NODES), batch_size=128, shuffle=True)
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            told.append(loss.item())
        return told

    assert losses(opened) == losses(want)
    assert np.isfinite(losses(want)).all()


def sample_of(node: Any) -> Any:
    return HeteroSamplerOutput(
        node={"paper": node, "author": torch.empty(0, dtype=torch.long)},
        row={("paper", "cites", "paper"): torch.arange(7, dtype=torch.int32)},
        col={("paper", "cites", "paper"): torch.arange(14)[::2]},
        edge=None,
        num_sampled_nodes={"paper": [2, 3], "author": [0, 0]},
        metadata=(torch.tensor(True), None),
    )


def test_a_sample_arrives_as_it_was_in_memory_of_its_own() -> None:
    node = torch.tensor([5, 3, 11])
    packed = PackedSample(sample_of(node))
    node.zero_()
    first, second = packed.unpacked(), packed.unpacked()
    first.node["paper"].fill_(1)
    assert second.node["paper"].tolist() == [5, 3, 11]
    assert second.node["author"].shape == (0,)
    assert second.node["author"].dtype == torch.long
    (row,), (col,) = second.row.values(), second.col.values()
    assert row.dtype == torch.int32
    assert (row.tolist(), col.tolist()) == ([*range(7)], [*range(0, 14, 2)])
    assert second.edge is None
    assert second.num_sampled_nodes == {"paper": [2, 3], "author": [0, 0]}
    assert second.metadata[0].item() is True
    assert second.metadata[1] is None
    assert not any(one.is_shared() for one in (row, col, second.node["paper"]))


def test_one_memory_is_sent_however_many_tensors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    reduced = torch.multiprocessing.reductions.reduce_storage

    def counting(storage: Any) -> Any:
        sent.append(storage)
        return reduced(storage)

    packed = PackedSample(sample_of(torch.arange(3)))
    monkeypatch.setitem(vars(ForkingPickler)["_extra_reducers"], torch.UntypedStorage, counting)
    ForkingPickler(io.BytesIO()).dump(packed)
    assert len(sent) == 1


def test_tensors_that_are_more_than_their_elements_arrive_too() -> None:
    sparse = torch.eye(3).to_sparse()
    wanted = {"sparse": sparse, "grown": torch.ones(2, requires_grad=True), "word": "x"}
    found = PackedSample([wanted, (torch.arange(2),)]).unpacked()
    assert torch.equal(found[0]["sparse"].to_dense(), torch.eye(3))
    assert found[0]["grown"].tolist() == [1, 1]
    assert found[0]["word"] == "x"
    assert found[1][0].tolist() == [0, 1]


NODES_OF_TYPES = {"paper": 300, "author": 80, "venue": 3}
EDGES_OF_TYPES = {
    ("paper", "cites", "paper"): 4000,
    ("author", "writes", "paper"): 900,
    ("paper", "in", "venue"): 300,
    ("venue", "has", "paper"): 300,
}


def graph_of_types(generator: torch.Generator) -> Graph:
    edges = {}
    for (source, name, target), count in EDGES_OF_TYPES.items():
        # Squares, so that some nodes have many edges and some none.
        ends = [
            (torch.rand(count, generator=generator) ** 2 * NODES_OF_TYPES[one]).long()
            for one in (source, target)
        ]
        edges[source, name, target] = torch.stack(ends)
    return Graph(edges, NODES_OF_TYPES)


def drawn(
    sampler: NeighborSampler, kind: Any, nodes: list[int], hop: int, generator: torch.Generator
) -> list[tuple[int, int]]:
    """For each drawn edge the position of its target among the nodes, and its own position."""
    count, first = sampler.counts[kind][hop], sampler.graph.edges[kind].first.tolist()
    of_nodes = [(first[node], first[node + 1] - first[node]) for node in nodes]

    def shares(*shape: int) -> list[Any]:
        return torch.rand(shape, generator=generator, dtype=torch.float64).tolist()

    found = []
    if count != -1 and sampler.replace:
        for place, (of, (begin, degree)) in enumerate(
            zip(shares(len(nodes), count), of_nodes, strict=True)
        ):
            found += [(place, begin + int(share * degree)) for share in of if degree]
        return found
    many = [place for place, (_, degree) in enumerate(of_nodes) if degree > count != -1]
    of_draws = [shares(len(many)) for _ in range(max(count, 0))]
    for place, (begin, degree) in enumerate(of_nodes):
        if place not in many:
            found += [(place, begin + one) for one in range(degree)]
            continue
        chosen: list[int] = []
        for draw, of_nodes_with_many in enumerate(of_draws):
            last = degree - count + draw
            one = min(int(of_nodes_with_many[many.index(place)] * (last + 1)), last)
            chosen.append(last if one in chosen else one)
        found += [(place, begin + one) for one in chosen]
    return found


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("hops", [[4, 3], [-1], [3, -1], [0, 2], [2, 2, 2]])
def test_neighbourhoods_are_those_of_the_plain_formulation(hops: list[int], replace: bool) -> None:
    graph = graph_of_types(torch.Generator().manual_seed(5))
    sampler = NeighborSampler(graph, hops, replace=replace, seed=7)
    # Every other one of a tensor, and one of them twice.
    seeds = torch.randperm(300, generator=torch.Generator().manual_seed(6))[:80:2]
    seeds[3] = seeds[9]
    out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds, input_type="paper"))

    generator = sampler.generator(seeds)
    nodes: dict[str, list[int]] = {kind: [] for kind in NODES_OF_TYPES}
    nodes["paper"] = seeds.tolist()
    begin = dict.fromkeys(NODES_OF_TYPES, 0)
    node_counts = {kind: [len(of)] for kind, of in nodes.items()}
    edges: dict[Any, list[tuple[int, int, int]]] = {kind: [] for kind in EDGES_OF_TYPES}
    edge_counts: dict[Any, list[int]] = {kind: [] for kind in EDGES_OF_TYPES}
    for hop in range(len(hops)):
        frontier = {kind: (at, nodes[kind][at:]) for kind, at in begin.items()}
        begin = {kind: len(of) for kind, of in nodes.items()}
        for kind in EDGES_OF_TYPES:
            known, (at, targets) = nodes[kind[0]], frontier[kind[2]]
            found = drawn(sampler, kind, targets, hop, generator)
            for place, slot in found:
                source = int(graph.edges[kind].sources[slot])
                if source not in known:
                    known.append(source)
                numbers = graph.edges[kind].numbers
                number = slot if numbers is None else int(numbers[slot])
                edges[kind].append((known.index(source), place + at, number))
            edge_counts[kind].append(len(found))
        for kind, of in nodes.items():
            node_counts[kind].append(len(of) - begin[kind])
    assert {kind: of.tolist() for kind, of in out.node.items()} == nodes
    for kind, want in edges.items():
        there = zip(*(part[kind].tolist() for part in (out.row, out.col, out.edge)), strict=True)
        assert list(there) == want
    assert out.num_sampled_nodes == node_counts
    assert out.num_sampled_edges == edge_counts


def test_a_node_without_neighbours_is_a_neighbourhood() -> None:
    graph = Graph(torch.tensor([[1], [2]]), 3)
    out = NeighborSampler(graph, [2, 2]).sample_from_nodes(
        NodeSamplerInput(None, torch.tensor([0]))
    )
    assert (out.node.tolist(), out.row.tolist(), out.col.tolist()) == ([0], [], [])
    assert (out.num_sampled_nodes, out.num_sampled_edges) == ([1, 0, 0], [0, 0])
    none = NeighborSampler(graph, [2]).sample_from_nodes(
        NodeSamplerInput(None, torch.empty(0, dtype=torch.long))
    )
    assert none.node.tolist() == []
