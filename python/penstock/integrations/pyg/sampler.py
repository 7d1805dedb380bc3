"""`NeighborSampler`: samples neighbours of nodes, hop by hop, with PyTorch alone."""

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

from penstock.integrations.pyg.order import seeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

    from penstock.integrations.pyg.graph import Edges, EdgeType, Graph


class NeighborSampler(BaseSampler):  # type: ignore[misc]
    """Samples neighbours of nodes; each hop samples for the nodes that the hop before has found.

    It follows PyG's contract: seeds come first, every node occurs once, in the order in which it
    was found, and edges have local numbers. The draws depend on the seed, the epoch and the input
    nodes alone, so they are the same in any process, at any time, and with any number of workers.

    Args:
        graph: The edges.
        num_neighbors: For each hop, the number of neighbours of a node; -1 for all. A mapping by
            edge type if there are several and they differ.
        replace: Whether a neighbour may be drawn more than once.
        seed: Seed of the draws.

    Raises:
        ValueError: A number is less than -1, or edge types are missing, unknown or have different
            numbers of hops.
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
        # In shared memory, as some workers live longer than an epoch.
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
        """A copy with its own epoch, the same for now."""
        made = copy.copy(self)
        made._epoch = self._epoch.clone().share_memory_()  # type: ignore[no-untyped-call]
        return made

    @property
    def epoch(self) -> int:
        """The epoch for which neighbours are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, on which the draws depend, for workers too."""
        self._epoch.fill_(epoch)

    def sample_from_nodes(
        self, index: NodeSamplerInput, **_: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The neighbourhood of some nodes.

        Raises:
            ValueError: The input has times, which this sampler does not support.
        """
        _check_untimed(index)
        out = self._sample({index.input_type: _integers("input nodes", index.node)})
        out.metadata = (index.input_id, None)
        return out

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: Any = None, **_: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The neighbourhood of both ends of some links, and of negative links drawn for them.

        Args:
            index: The links.
            neg_sampling: How negative links are drawn, as for PyG.

        Raises:
            ValueError: The input has times, which this sampler does not support.
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
        """None: edges keep their original numbers."""
        return

    def generator(self, *nodes: torch.Tensor) -> torch.Generator:
        """The generator of the draws for some input nodes."""
        return seeded(*(some.numpy().tobytes() for some in nodes), self.seed, self.epoch)


def _integers(name: str, values: torch.Tensor) -> torch.Tensor:
    """Converts node numbers of any integer type."""
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
    """A neighbourhood while it is sampled."""

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
        """Samples neighbours of the nodes that the hop before has found."""
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
        """Local numbers of nodes; new nodes are appended."""
        known = self.nodes[kind]
        both = torch.cat([known, found])
        distinct, which = torch.unique(both, return_inverse=True)
        # The position at which each distinct node occurs first.
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
    """Samples edges to some nodes.

    Returns:
        For each edge, the position of its target among the nodes, and its position in the graph.
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
    """Draws ``count`` distinct numbers below each degree, each set with equal probability.

    Floyd's algorithm (Bentley, Communications of the ACM 30(9), 1987), for all nodes at once.
    """
    chosen = torch.empty(len(degrees), count, dtype=torch.long, device="cpu")
    for drawn in range(count):
        last = degrees - count + drawn
        shares = torch.rand(len(degrees), generator=generator, dtype=torch.float64, device="cpu")
        one = torch.minimum((shares * (last + 1)).long(), last)
        is_taken = (chosen[:, :drawn] == one[:, None]).any(1)
        chosen[:, drawn] = torch.where(is_taken, last, one)
    return chosen


class Negatives(NegativeSampling):  # type: ignore[misc]
    """PyG's `NegativeSampling`, drawing from a generator of its own.

    PyG's draws from the process's random numbers, which training uses, too, while batches are
    sampled ahead or by other processes.
    """

    def __init__(self, given: NegativeSampling, generator: torch.Generator) -> None:
        super().__init__(given.mode, given.amount, given.src_weight, given.dst_weight)
        self._generator = generator

    def sample(self, num_samples: int, endpoint: str, num_nodes: Any = None) -> torch.Tensor:
        """Draws nodes with probabilities proportional to their weights."""
        weight: Any = self.src_weight if endpoint == "src" else self.dst_weight
        if weight is None:
            return torch.randint(num_nodes, (num_samples,), generator=self._generator, device="cpu")
        if len(weight) != num_nodes:
            raise ValueError(
                f"{endpoint}_weight: {len(weight)} weights: each of the {num_nodes} nodes needs one"
            )
        return torch.multinomial(weight, num_samples, replacement=True, generator=self._generator)
