"""`NeighborSampler`: samples neighbours of nodes, hop by hop."""

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

from penstock.features.gathering.neighborhoods import NodeNumbers, draw_edges
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
        nodes = drawn.nodes
        if None in seeds:
            return SamplerOutput(
                node=nodes[None],
                row=torch.cat(drawn.rows[None]),
                col=torch.cat(drawn.cols[None]),
                edge=torch.cat(drawn.numbers[None]),
                num_sampled_nodes=drawn.node_counts[None],
                num_sampled_edges=drawn.edge_counts[None],
            )
        return HeteroSamplerOutput(
            node=nodes,
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
        self._numbers = {one: NodeNumbers(seeds.get(one, empty).contiguous()) for one in types}
        self._found = {one: [seeds.get(one, empty)] for one in types}
        self._begin = dict.fromkeys(types, 0)
        self.node_counts = {one: [len(parts[0])] for one, parts in self._found.items()}
        self.rows = {one: [empty] for one in self._edges}
        self.cols = {one: [empty] for one in self._edges}
        self.numbers = {one: [empty] for one in self._edges}
        self.edge_counts: dict[Any, list[int]] = {one: [] for one in self._edges}

    @property
    def nodes(self) -> dict[str | None, torch.Tensor]:
        """The nodes of each type, by their local numbers."""
        return {one: torch.cat(parts) for one, parts in self._found.items()}

    def hop(self, hop: int) -> None:
        """Samples neighbours of the nodes that the hop before has found."""
        frontier = {one: (begin, self._found[one][-1]) for one, begin in self._begin.items()}
        self._begin = {one: len(numbers) for one, numbers in self._numbers.items()}
        for kind, edges in self._edges.items():
            source, target = (None, None) if kind is None else (kind[0], kind[2])
            begin, nodes = frontier[target]
            count = self._sampler.counts[kind][hop]
            if not len(nodes) or count == 0:
                self.edge_counts[kind].append(0)
                continue
            cols, slots = _draw(
                edges,
                nodes,
                count,
                is_replaced=self._sampler.replace,
                first=begin,
                generator=self._generator,
            )
            found = edges.sources.index_select(0, slots).long()
            self.rows[kind].append(self._numbers[source].number(found))
            self.cols[kind].append(cols)
            self.numbers[kind].append(
                slots if edges.numbers is None else edges.numbers.index_select(0, slots)
            )
            self.edge_counts[kind].append(len(slots))
        for one, numbers in self._numbers.items():
            new = numbers.since(self._begin[one])
            self._found[one].append(new)
            self.node_counts[one].append(len(new))


def _draw(
    edges: Edges,
    nodes: torch.Tensor,
    count: int,
    *,
    is_replaced: bool,
    first: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples edges to some nodes.

    Returns:
        For each edge, the position of its target among the nodes plus ``first``, and its position
        in the graph.
    """
    begin = edges.first.index_select(0, nodes)
    degrees = edges.first.index_select(0, nodes + 1) - begin
    if count == -1:
        shape, drawn = [0], degrees.sum()
    elif is_replaced:
        shape, drawn = [len(nodes), count], (degrees > 0).sum() * count
    else:
        shape, drawn = [count, int((degrees > count).sum())], degrees.clamp(max=count).sum()
    shares = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
    return draw_edges(
        begin,
        degrees,
        None if count == -1 else count,
        is_replaced=is_replaced,
        shares=shares,
        first=first,
        drawn=int(drawn),
    )


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
