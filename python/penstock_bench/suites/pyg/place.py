"""The graph and its features, as files that all processes of the benchmark read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock import features
from penstock.integrations.pyg import Graph
from penstock.integrations.pyg.synthetic import NODES, WIDTH, Igbh

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_EDGES, _LABELS = "edges", "labels.npy"


def write(place: Path, made: Igbh, say: Callable[[str], None]) -> None:
    """Writes both, once for the run."""
    say("edges")
    graph = made.graph()
    (place / _EDGES).mkdir()
    for kind_of_edges, edges in graph.edges.items():
        name = "-".join(kind_of_edges or ())
        np.save(place / _EDGES / f"{name}.first.npy", edges.first.numpy())
        np.save(place / _EDGES / f"{name}.sources.npy", edges.sources.numpy().astype(np.int32))
    np.save(place / _LABELS, made.labels.numpy())
    for kind, count in made.nodes.items():
        say(f"features of {kind}")
        features.write(place / kind, made.rows(kind), shape=(count, WIDTH))


def graph_of(place: Path) -> Graph:
    """The edges, in memory; nothing is kept of how they were numbered."""
    edges: dict[Any, Any] = {}
    for path in sorted((place / _EDGES).glob("*.first.npy")):
        name = path.name.removesuffix(".first.npy")
        sources = np.load(path.with_name(f"{name}.sources.npy"))
        edges[tuple(name.split("-"))] = torch.from_numpy(np.load(path)), torch.from_numpy(sources)
    counts = {kind: len(features.open(place / kind)) for kind in NODES}
    return Graph(edges, counts)


def labels_of(place: Path) -> torch.Tensor:
    """Of papers."""
    return torch.from_numpy(np.load(place / _LABELS))


def opened(place: Path, cache: features.Cache | None) -> dict[str, features.Features]:
    """The features, by type."""
    return {kind: features.open(place / kind, cache=cache) for kind in NODES}


def mapped(place: Path) -> dict[str, torch.Tensor]:
    """The same rows of the same files, as `numpy.memmap` has them."""
    found = {}
    for kind in NODES:
        with features.open(place / kind) as table:
            (segment,) = table.source.segments
            rows = np.memmap(
                segment.path, np.float32, "c", offset=segment.offset, shape=(len(table), WIDTH)
            )
        found[kind] = torch.from_numpy(rows)
    return found


def file_of(place: Path, kind: str) -> tuple[str, int, int]:
    """Where the rows of a type lie: file, offset, bytes."""
    with features.open(place / kind) as table:
        (segment,) = table.source.segments
        return segment.path, segment.offset, segment.rows * table.source.row_bytes
