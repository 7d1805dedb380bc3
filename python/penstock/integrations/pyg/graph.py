"""`Graph`: edges sorted by target node."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch_geometric.data import EdgeAttr, GraphStore

EdgeType = tuple[str, str, str]


class Edges(NamedTuple):
    """The edges of one type, compressed by target (CSC).

    Attributes:
        first: For each target, where its edges begin in ``sources``; and the end of the last.
        sources: The source of each edge.
        numbers: The edge's number before the sort by target; None if the edges came sorted.
    """

    first: torch.Tensor
    sources: torch.Tensor
    numbers: torch.Tensor | None


class Graph(GraphStore):  # type: ignore[misc]
    """The edges of a graph in memory, of one type or of many.

    Args:
        edges: ``edge_index`` of shape [2, edges], sources first, or ``(colptr, row)``, which is
            used as it is; a mapping from ``(type, relation, type)`` to these for several types.
        nodes: The number of nodes; a mapping by type for several.

    Attributes:
        nodes: The number of nodes by type; by None if there is one type.
        edges: The edges by type; by None if there is one type.

    Raises:
        ValueError: An edge has no node, or ``colptr`` does not fit ``row``.
        TypeError: Node numbers are no integers.
    """

    def __init__(self, edges: Any, nodes: int | Mapping[str, int]) -> None:
        super().__init__()
        of_types = edges if hasattr(edges, "items") else {None: edges}
        given = nodes if isinstance(nodes, Mapping) else {None: nodes}
        counts: dict[str | None, int] = {one: operator.index(n) for one, n in given.items()}
        if any(count < 0 for count in counts.values()):
            raise ValueError(f"nodes: {nodes}: as many as there are, 0 or more")
        for kind in of_types:
            if kind is not None and (not isinstance(kind, tuple) or len(kind) != 3):
                raise ValueError(f"edges: {kind!r}: a type is (type of nodes, relation, type)")
        self.nodes = counts
        self.edges: dict[EdgeType | None, Edges] = {
            kind: _sorted(kind, given, *self._counts(kind)) for kind, given in of_types.items()
        }

    def _counts(self, kind: EdgeType | None) -> tuple[int, int]:
        source, target = (None, None) if kind is None else (kind[0], kind[2])
        for one in (source, target):
            if one not in self.nodes:
                raise ValueError(f"nodes: {one!r} of {kind} is not there")
        return self.nodes[source], self.nodes[target]

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Type and size of each kind of edges."""
        return [
            EdgeAttr(kind, layout="csc", size=self._counts(kind), is_sorted=True)
            for kind in self.edges
        ]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[torch.Tensor, torch.Tensor] | None:
        held = self.edges.get(edge_attr.edge_type)
        return None if held is None else (held.sources, held.first)

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise TypeError("a Graph has the edges that it is made of")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise TypeError("a Graph has the edges that it is made of")


def _sorted(kind: EdgeType | None, given: Any, sources: int, targets: int) -> Edges:
    if isinstance(given, tuple):
        first, row = (_integers(kind, torch.as_tensor(one, device="cpu")) for one in given)
        is_good = len(first) == targets + 1 and int(first[0]) == 0 and int(first[-1]) == len(row)
        if not is_good or bool((first[1:] < first[:-1]).any()):
            raise ValueError(
                f"edges of {kind}: colptr has to have {targets + 1} numbers that do not fall, from"
                f" 0 to {len(row)}, the number of edges"
            )
        made = Edges(first.long(), row, None)
    else:
        index = _integers(kind, torch.as_tensor(given, device="cpu"))
        if index.ndim != 2 or index.shape[0] != 2:
            raise ValueError(f"edges of {kind}: shape {tuple(index.shape)}: [2, edges] is needed")
        if index.shape[1] and not 0 <= int(index[1].min()) <= int(index[1].max()) < targets:
            raise ValueError(f"edges of {kind}: a target is none of {targets} nodes")
        target, order = torch.sort(index[1], stable=True)
        first = torch.zeros(targets + 1, dtype=torch.long, device="cpu")
        torch.cumsum(torch.bincount(target, minlength=targets), 0, out=first[1:])
        made = Edges(first, index[0][order], order)
    row = made.sources
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < sources:
        raise ValueError(f"edges of {kind}: a source is none of {sources} nodes")
    return made


def _integers(kind: EdgeType | None, values: torch.Tensor) -> torch.Tensor:
    """Converts node or edge numbers to integers; an empty tensor may have any type."""
    if values.numel() == 0:
        return values.long()
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"edges of {kind}: {values.dtype}: use integers")
    return values
