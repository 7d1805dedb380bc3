"""The native sampler gives what a plain formulation in PyTorch gives, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.sampler import NodeSamplerInput

from penstock.integrations.pyg import Graph, NeighborSampler

NODES = {"paper": 300, "author": 80, "venue": 3}
EDGES = {
    ("paper", "cites", "paper"): 4000,
    ("author", "writes", "paper"): 900,
    ("paper", "in", "venue"): 300,
    ("venue", "has", "paper"): 300,
}


def graph_of_types(generator: torch.Generator) -> Graph:
    edges = {}
    for (source, name, target), count in EDGES.items():
        # Squares, so that some nodes have many edges and some none.
        ends = [
            (torch.rand(count, generator=generator) ** 2 * NODES[one]).long()
            for one in (source, target)
        ]
        edges[source, name, target] = torch.stack(ends)
    return Graph(edges, NODES)


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
    nodes: dict[str, list[int]] = {kind: [] for kind in NODES}
    nodes["paper"] = seeds.tolist()
    begin = dict.fromkeys(NODES, 0)
    node_counts = {kind: [len(of)] for kind, of in nodes.items()}
    edges: dict[Any, list[tuple[int, int, int]]] = {kind: [] for kind in EDGES}
    edge_counts: dict[Any, list[int]] = {kind: [] for kind in EDGES}
    for hop in range(len(hops)):
        frontier = {kind: (at, nodes[kind][at:]) for kind, at in begin.items()}
        begin = {kind: len(of) for kind, of in nodes.items()}
        for kind in EDGES:
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
