"""`Igbh`: generates a graph of the shape of IGBH-full at any scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.integrations.pyg.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.integrations.pyg.graph import EdgeType

    _Array = np.ndarray[Any, np.dtype[Any]]

NODES = {"paper": 269_346_174, "author": 277_220_883, "fos": 712_960, "institute": 26_918}
"""Node counts of IGBH-full (Khatua et al., KDD 2023)."""
EDGES = {
    ("paper", "cites", "paper"): 3_996_442_004,
    ("paper", "topic", "fos"): 1_050_280_600,
    ("paper", "written_by", "author"): 716_761_549,
    ("author", "affiliated_to", "institute"): 48_521_486,
}
WIDTH = 1024
CLASSES = 19

_LEAST = {"paper": 64, "author": 64, "fos": 8, "institute": 4}
_TOGETHER = 0.05
"""Additional probability that an edge joins nodes of the same half, at each level (R-MAT)."""
_DRAWN = 1 << 22
_CHUNK_ROWS = 4096


class Igbh:
    """Papers, authors, fields of study and institutes, and the edges between them.

    Shares of types and mean degrees are those of IGBH-full; for each edge type the largest degree
    is 0.13 times the number of nodes to the power of 0.75, as in IGB at its four sizes. Edges are
    drawn with R-MAT (Chakrabarti et al., SDM 2004), in which the first nodes have most of them.
    Everything follows from the arguments, bit for bit.

    Args:
        scale: Size relative to IGBH-full, whose features take 2.2 TB: 0.001 for 2.2 GB.
        is_permuted: Whether nodes are numbered at random, as those of real graphs nearly are;
            otherwise nodes with many edges are adjacent, which favours readers that merge requests.
        seed: Seed of everything.

    Attributes:
        nodes: The number of nodes, by type.
        labels: Labels of papers.

    Example:
        >>> from penstock.integrations.pyg.synthetic import Igbh
        >>> made = Igbh(1e-6)
        >>> made.nodes
        {'paper': 269, 'author': 277, 'fos': 8, 'institute': 4}
        >>> len(made.graph().edges)
        7
    """

    def __init__(self, scale: float, *, is_permuted: bool = True, seed: int = 0) -> None:
        if not 0 < scale <= 1:
            raise ValueError(f"scale={scale}: must be more than 0, and 1 at most")
        self.scale = scale
        self.is_permuted = is_permuted
        self.seed = seed
        self.nodes = {name: max(_LEAST[name], round(NODES[name] * scale)) for name in NODES}
        # Papers that are close in the order of R-MAT, before the permutation, have the same label.
        order = self._order("paper")
        labels = np.empty(self.nodes["paper"], np.int64)
        labels[order] = np.arange(len(order)) * CLASSES // len(order)
        self.labels = torch.from_numpy(labels)

    def graph(self) -> Graph:
        """The edges and their reverses, named ``rev_…``; citations in one direction only."""
        edges: dict[EdgeType, torch.Tensor] = {}
        for kind, count in EDGES.items():
            source, name, target = kind
            index = torch.from_numpy(self._edges(kind, round(count * self.scale)))
            edges[kind] = index
            if source != target:
                edges[target, f"rev_{name}", source] = index.flip(0)
        return Graph(edges, self.nodes)

    def rows(self, kind: str, width: int = WIDTH) -> Iterator[_Array]:
        """Yields features of all nodes of a type in chunks, for `penstock.features.write`.

        Features of papers correlate with their labels; the rest is noise.
        """
        rng = self._rng("rows", kind)
        of_classes = self._rng("classes").standard_normal((CLASSES, width), np.float32)
        for first in range(0, self.nodes[kind], _CHUNK_ROWS):
            count = min(_CHUNK_ROWS, self.nodes[kind] - first)
            rows = rng.random((count, width), np.float32)
            rows -= 0.5
            if kind == "paper":
                rows += 0.1 * of_classes[self.labels[first : first + count].numpy()]
            yield rows

    def _edges(self, kind: EdgeType, count: int) -> _Array:
        source, _, target = kind
        rng = self._rng("edges", *kind)
        sizes = self.nodes[source], self.nodes[target]
        found = np.empty((2, count), np.int64)
        for first in range(0, count, _DRAWN):
            part = found[:, first : first + _DRAWN]
            part[:] = _drawn(rng, sizes, count, part.shape[1])
        for side, name in zip(found, (source, target), strict=True):
            side[:] = self._order(name)[side]
        return found

    def _order(self, kind: str) -> _Array:
        """The number of each node, by its position in the order of R-MAT."""
        count = self.nodes[kind]
        return self._rng("order", kind).permutation(count) if self.is_permuted else np.arange(count)

    def _rng(self, *told: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *" ".join(told).encode()])


def _drawn(
    rng: np.random.Generator, sizes: tuple[int, int], edges: int, count: int
) -> tuple[_Array, _Array]:
    """Draws some of the edges, as node positions in the order of R-MAT."""
    levels = [max(1, math.ceil(math.log2(size))) for size in sizes]
    # The share of the first node's edges is the product of its half's shares at all levels.
    upper = [min(0.95, max(0.5, _most(size, edges) ** (1 / math.log2(size)))) for size in sizes]
    places = [np.zeros(count, np.int64), np.zeros(count, np.int64)]
    for level in range(max(levels)):
        source, target = (
            share if level < of else 1.0 for share, of in zip(upper, levels, strict=True)
        )
        together = min(_TOGETHER, (1 - source) * target, source * (1 - target))
        both = source * target + together
        share = rng.random(count, np.float32)
        is_low = share >= source
        # Within the source's half: first the edges whose target is in the same half.
        is_right = np.where(is_low, share >= source + target - both, share >= both)
        for place, of, is_second in zip(places, levels, (is_low, is_right), strict=True):
            if level < of:
                place <<= 1
                place += is_second
    first, second = (
        (place * size) >> level for place, size, level in zip(places, sizes, levels, strict=True)
    )
    return first, second


def _most(nodes: int, edges: int) -> float:
    """The share of edges of the node that has most."""
    # With few nodes, as of fields or institutes, each has many edges.
    most: float = max(0.13 * nodes**0.75, 2 * edges / nodes)
    return min(1.0, most / edges)
