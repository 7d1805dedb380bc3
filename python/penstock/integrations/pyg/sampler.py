"""`NeighborSampler`: neighbours of nodes, hop by hop, drawn by PyTorch alone."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch_geometric.sampler import (
    BaseSampler,
    HeteroSamplerOutput,
    NegativeSampling,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample

from penstock.integrations.pyg.negatives import Negatives
from penstock.integrations.pyg.order import seeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

    from penstock.integrations.pyg.graph import Edges, EdgeType, Graph


class NeighborSampler(BaseSampler):  # type: ignore[misc]
    """Draws neighbours of nodes, each hop among those of the nodes that the last one has found.

    It has PyG's contract: seeds come first, every node once, in the order in which it was found,
    edges by local numbers. What is drawn depends on the seed, the epoch and the input nodes alone,
    so it is the same whoever draws it, when, and how many workers there are.

    Args:
        graph: Its edges.
        num_neighbors: Of each hop, how many for a node; -1 for all. A mapping by type of edges
            where there are several and they differ.
        replace: Whether a neighbour may be drawn more than once.
        seed: Of the draws.

    Raises:
        ValueError: A number is less than -1, or types of edges are missing, unknown or have other
            hops.
        TypeError: A number is no integer.
    """

    def __init__(
        self,
        graph: Graph,
        num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        *,
        replace: bool = False,
        seed: int = 0,
    ) -> None:
        self.graph = graph
        self.replace = replace
        self.seed = seed
        # In memory that workers share, of whom some live longer than an epoch.
        self._epoch: torch.Tensor = torch.zeros((), dtype=torch.long, device="cpu")
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        kinds = list(graph.edges)
        if isinstance(num_neighbors, Mapping):
            given: dict[Any, Sequence[int]] = {**num_neighbors}
            missing = [kind for kind in kinds if kind not in given]
            if missing:
                raise ValueError(f"num_neighbors: {missing[0]} is missing")
            unknown = [kind for kind in given if kind not in graph.edges]
            if unknown:
                raise ValueError(f"num_neighbors: there are no edges of type {unknown[0]!r}")
            self.counts = {kind: list(given[kind]) for kind in kinds}
        else:
            self.counts = {kind: list(num_neighbors) for kind in kinds}
        self.counts = {
            kind: [operator.index(one) for one in counts] for kind, counts in self.counts.items()
        }
        hops = {len(counts) for counts in self.counts.values()}
        if len(hops) > 1 or any(one < -1 for counts in self.counts.values() for one in counts):
            raise ValueError(
                "num_neighbors: each type of edges needs as many hops, of -1 (all) or more"
            )
        self.hops = hops.pop() if hops else 0

    def another(self) -> NeighborSampler:
        """One of the same graph and settings with an epoch of its own, the same for now."""
        made = copy.copy(self)
        made._epoch = self._epoch.clone().share_memory_()  # type: ignore[no-untyped-call]
        return made

    @property
    def epoch(self) -> int:
        """Which one neighbours are drawn for."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Has other neighbours drawn from now on than in other epochs, by workers too."""
        self._epoch.fill_(epoch)

    def sample_from_nodes(
        self, index: NodeSamplerInput, **_: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The neighbourhood of some nodes.

        Raises:
            ValueError: They have times, which are not looked at here.
        """
        _check_untimed(index)
        out = self._sample({index.input_type: _integers("input nodes", index.node)})
        out.metadata = (index.input_id, None)
        return out

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: Any = None, **_: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The neighbourhood of both ends of some links, and of others that are drawn for them.

        Args:
            index: The links.
            neg_sampling: How links are drawn that are taken for none, as PyG takes it.

        Raises:
            ValueError: They have times, which are not looked at here.
        """
        _check_untimed(index)
        negatives = NegativeSampling.cast(neg_sampling)
        if negatives is not None:
            negatives = Negatives(negatives, self.generator(index.row.long(), index.col.long()))
        counts: Any = {
            kind: _count_of(self.graph.nodes, kind) for kind in (index.input_type or (None,))[::2]
        }
        nodes = counts if index.input_type else counts[None]
        return edge_sample(index, self._sample_ends, nodes, False, None, negatives)

    def _sample_ends(self, ends: Any, _: Any) -> SamplerOutput | HeteroSamplerOutput:
        of_types = ends if isinstance(ends, dict) else {None: ends}
        return self._sample({kind: nodes.long() for kind, nodes in of_types.items()})

    def _sample(
        self, seeds: Mapping[str | None, torch.Tensor]
    ) -> SamplerOutput | HeteroSamplerOutput:
        drawn = _Drawn(self, seeds)
        for hop in range(self.hops):
            drawn.hop(hop)
        if None in seeds:
            return SamplerOutput(
                node=drawn.nodes[None],
                row=torch.cat(drawn.rows[None]),
                col=torch.cat(drawn.cols[None]),
                edge=torch.cat(drawn.numbers[None]),
                num_sampled_nodes=drawn.node_counts[None],
                num_sampled_edges=drawn.edge_counts[None],
            )
        return HeteroSamplerOutput(
            node=drawn.nodes,
            row={kind: torch.cat(parts) for kind, parts in drawn.rows.items()},
            col={kind: torch.cat(parts) for kind, parts in drawn.cols.items()},
            edge={kind: torch.cat(parts) for kind, parts in drawn.numbers.items()},
            num_sampled_nodes=drawn.node_counts,
            num_sampled_edges=drawn.edge_counts,
        )

    @property
    def edge_permutation(self) -> None:
        """None: edges have the numbers that they were given with."""
        return

    def generator(self, *nodes: torch.Tensor) -> torch.Generator:
        """What draws for some input nodes."""
        return seeded(*(some.numpy().tobytes() for some in nodes), self.seed, self.epoch)


def _integers(name: str, values: torch.Tensor) -> torch.Tensor:
    """Numbers of nodes, of any type of integers.

    Raises:
        TypeError: They are none.
    """
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name}: {values.dtype}: use integers")
    return values.long()


def _check_untimed(index: NodeSamplerInput | EdgeSamplerInput) -> None:
    if index.time is not None:
        raise ValueError("time: neighbours are drawn whatever their time: leave it out")


def _count_of(nodes: Mapping[str | None, int], kind: str | None) -> int:
    if kind not in nodes:
        raise ValueError(f"there are no nodes of type {kind!r}")
    return nodes[kind]


class _Drawn:
    """A neighbourhood, as far as it is drawn."""

    def __init__(self, sampler: NeighborSampler, seeds: Mapping[str | None, torch.Tensor]) -> None:
        self._sampler = sampler
        self._edges = sampler.graph.edges
        types = sampler.graph.nodes
        empty = torch.empty(0, dtype=torch.long, device="cpu")
        for kind, nodes in seeds.items():
            count = _count_of(types, kind)
            if len(nodes) and not 0 <= int(nodes.min()) <= int(nodes.max()) < count:
                wrong = int(((nodes < 0) | (nodes >= count)).nonzero()[0])
                raise IndexError(
                    f"input nodes[{wrong}] is {int(nodes[wrong])}: there are {count} nodes"
                    + (f" of type {kind!r}" if kind is not None else "")
                )
        self._generator = sampler.generator(*seeds.values())
        self.nodes = {**dict.fromkeys(types, empty), **seeds}
        self._begin = dict.fromkeys(types, 0)
        self.node_counts = {one: [len(nodes)] for one, nodes in self.nodes.items()}
        self.rows = {one: [empty] for one in self._edges}
        self.cols = {one: [empty] for one in self._edges}
        self.numbers = {one: [empty] for one in self._edges}
        self.edge_counts: dict[Any, list[int]] = {one: [] for one in self._edges}

    def hop(self, hop: int) -> None:
        """Neighbours of the nodes that the hop before has found."""
        frontier = {one: (begin, self.nodes[one][begin:]) for one, begin in self._begin.items()}
        self._begin = {one: len(nodes) for one, nodes in self.nodes.items()}
        for kind, edges in self._edges.items():
            source, target = (None, None) if kind is None else (kind[0], kind[2])
            begin, nodes = frontier[target]
            places, slots = _draw(
                edges,
                nodes,
                self._sampler.counts[kind][hop],
                is_replaced=self._sampler.replace,
                generator=self._generator,
            )
            self.cols[kind].append(places + begin)
            self.rows[kind].append(self._numbered(source, edges.sources[slots].long()))
            self.numbers[kind].append(slots if edges.numbers is None else edges.numbers[slots])
            self.edge_counts[kind].append(len(slots))
        for one, nodes in self.nodes.items():
            self.node_counts[one].append(len(nodes) - self._begin[one])

    def _numbered(self, kind: str | None, found: torch.Tensor) -> torch.Tensor:
        """Local numbers of nodes, of which new ones come behind those that there are."""
        known = self.nodes[kind]
        both = torch.cat([known, found])
        distinct, which = torch.unique(both, return_inverse=True)
        # Of each, where it comes first.
        first = torch.full((len(distinct),), len(both), dtype=torch.long, device="cpu")
        first.scatter_reduce_(0, which, torch.arange(len(both), device="cpu"), "amin")
        is_new = first >= len(known)
        new = first[is_new].sort().values
        numbers = first
        order = torch.argsort(first[is_new])
        places = torch.empty(len(new), dtype=torch.long, device="cpu")
        places[order] = torch.arange(len(new), device="cpu") + len(known)
        numbers[is_new] = places
        self.nodes[kind] = torch.cat([known, both[new]])
        return numbers[which[len(known) :]]


def _draw(
    edges: Edges,
    nodes: torch.Tensor,
    count: int,
    *,
    is_replaced: bool,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Edges that go to some nodes.

    Returns:
        Of each edge, the place of its node among them, and where it is.
    """
    begin = edges.first[nodes]
    degrees = edges.first[nodes + 1] - begin
    if count == -1:
        return _all_of(begin, degrees)
    if is_replaced:
        chosen = torch.rand(
            len(nodes), count, generator=generator, dtype=torch.float64, device="cpu"
        )
        offsets = (chosen * degrees[:, None]).long()
        places = torch.arange(len(nodes), device="cpu").repeat_interleave(count)
        slots = (begin[:, None] + offsets).view(-1)
        is_there = (degrees > 0).repeat_interleave(count)
        return places[is_there], slots[is_there]
    is_many = degrees > count
    few_places, few_slots = _all_of(begin, degrees.masked_fill(is_many, 0))
    many = is_many.nonzero().view(-1)
    offsets = _distinct(degrees[many], count, generator)
    places = torch.cat([few_places, many.repeat_interleave(count)])
    slots = torch.cat([few_slots, (begin[many][:, None] + offsets).view(-1)])
    places, order = torch.sort(places, stable=True)
    return places, slots[order]


def _all_of(begin: torch.Tensor, degrees: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(len(begin), device="cpu").repeat_interleave(degrees)
    before = degrees.cumsum(0) - degrees
    within = torch.arange(len(places), device="cpu") - before[places]
    return places, begin[places] + within


def _distinct(degrees: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """So many different numbers below each of the degrees, each set as likely as any other.

    Floyd's algorithm (Bentley, Communications of the ACM 30(9), 1987), for all nodes at a time.
    """
    chosen = torch.empty(len(degrees), count, dtype=torch.long, device="cpu")
    for drawn in range(count):
        last = degrees - count + drawn
        shares = torch.rand(len(degrees), generator=generator, dtype=torch.float64, device="cpu")
        one = torch.minimum((shares * (last + 1)).long(), last)
        is_taken = (chosen[:, :drawn] == one[:, None]).any(1)
        chosen[:, drawn] = torch.where(is_taken, last, one)
    return chosen
