"""`NodeNumbers` and `draw_edges`: the loops of a neighbour sampler over edges and nodes.

All tensors are contiguous, on the host, and of ``int64`` unless something else is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import _native
from penstock.features.gathering.results import target_of
from penstock.tensors.native_rows import NativeArray

if TYPE_CHECKING:
    import torch


class NodeNumbers:
    """Numbers nodes from 0 in the order in which they are found.

    Args:
        first: The first nodes, of shape ``(nodes,)``, numbered by their positions.
    """

    def __init__(self, first: torch.Tensor) -> None:
        self._native = _native.NodeNumbers(_array(first))

    def __len__(self) -> int:
        return len(self._native)

    def number(self, nodes: torch.Tensor) -> torch.Tensor:
        """The numbers of some nodes; new nodes have the next ones."""
        numbers = nodes.new_empty(nodes.shape)
        self._native.number(_array(nodes), target_of(numbers))
        return numbers

    def since(self, number: int) -> torch.Tensor:
        """The nodes from a number on."""
        import torch

        nodes = torch.empty(len(self) - number, dtype=torch.long, device="cpu")
        self._native.copy_nodes(number, target_of(nodes))
        return nodes


def draw_edges(
    begin: torch.Tensor,
    degrees: torch.Tensor,
    count: int | None,
    *,
    is_replaced: bool,
    shares: torch.Tensor,
    first: int,
    drawn: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws edges of some nodes.

    Args:
        begin: Position of each node's first edge.
        degrees: Number of each node's edges.
        count: Edges to draw of each node; None for all.
        is_replaced: Whether an edge may be drawn more than once.
        shares: Random numbers of ``float64``, from 0 to below 1, of shape ``(nodes, count)`` with
            replacement, else ``(count, nodes with more than count edges)``.
        first: Added to the positions of nodes.
        drawn: Edges that are drawn of all nodes.

    Returns:
        For each edge that is drawn, the position of its node plus ``first``, and its own.
    """
    places, slots = begin.new_empty(drawn), begin.new_empty(drawn)
    _native.draw_edges(
        _array(begin),
        _array(degrees),
        count,
        is_replaced,
        _array(shares),
        first,
        target_of(places),
        target_of(slots),
    )
    return places, slots


def _array(values: torch.Tensor) -> NativeArray:
    """A contiguous tensor in the form that the native module takes."""
    return NativeArray(values.data_ptr(), (values.numel(),), None, values.element_size(), values)
