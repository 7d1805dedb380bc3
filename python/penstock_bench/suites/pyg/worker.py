"""One epoch, or one part of it alone, in a process of its own with its memory limited.

Graph and features are files that all processes of the benchmark read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import HeteroConv, SAGEConv

from penstock import features
from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph, NeighborSampler
from penstock.integrations.pyg.synthetic import CLASSES, NODES, WIDTH, Igbh
from penstock_bench.harness import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PENSTOCK, SAMPLE, TRAIN = "penstock", "sample", "train"
MEMMAP, MEMMAP_MANY = "memmap", "memmap-many"
_EDGES, _LABELS = "edges", "labels.npy"
MANY = 8
"""Processes of `MEMMAP_MANY`."""


@dataclass(frozen=True)
class Task:
    """One process.

    The seed is that of the nodes that the epoch is of, its order and what is sampled. Rows of
    the cache stay; it knows the batches of a window, and some are gathered ahead.
    """

    kind: str
    place: str
    group: str | None
    seed: int
    batches: int
    batch_size: int
    fan_out: tuple[int, ...]
    width: int
    cache_bytes: int
    window: int
    ahead: int
    workers: int


class Network(nn.Module):
    """Rows are made short, then two layers of PyG's: what the processor can do instead of a GPU."""

    def __init__(self, graph: Graph, width: int) -> None:
        super().__init__()
        self.short = nn.ModuleDict({str(kind): nn.Linear(WIDTH, width) for kind in graph.nodes})
        self.layers = nn.ModuleList(
            HeteroConv({kind: SAGEConv((width, width), width) for kind in graph.edges})
            for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, batch: Any) -> torch.Tensor:
        """Scores of the papers that the batch is of."""
        found = {kind: self.short[kind](rows).relu() for kind, rows in batch.x_dict.items()}
        for layer in self.layers:
            found = {k: v.relu() for k, v in layer(found, batch.edge_index_dict).items()}
        scores: torch.Tensor = self.head(found["paper"][: batch["paper"].batch_size])
        return scores


class _Training:
    def __init__(self, graph: Graph, width: int) -> None:
        torch.manual_seed(0)
        self._model = Network(graph, width)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def step(self, batch: Any) -> None:
        paper = batch["paper"]
        loss = nn.functional.cross_entropy(self._model(batch), paper.y[: paper.batch_size])
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.losses.append(loss.item())


def run(task: Task) -> dict[str, Any]:
    """Seconds of the epoch, and what it did."""
    if task.group is not None:
        Path(task.group).write_text("0")
    torch.set_num_threads(1)
    place = Path(task.place)
    graph, labels = graph_of(place), labels_of(place)
    _warm(task, graph, labels)
    training = _Training(graph, task.width)
    if task.kind == SAMPLE:
        return _timed(_loader(task, graph, labels, {}))
    if task.kind == TRAIN:
        return _timed(_in_memory(task, graph, labels), training)
    if task.kind in (MEMMAP, MEMMAP_MANY):
        return _timed(_peer(task, graph, labels), training)
    assert task.kind == PENSTOCK
    cache = features.Cache(task.cache_bytes)
    tables = opened(place, cache)
    for kind in ("fos", "institute"):
        tables[kind].pin(range(len(tables[kind])))
    before = _counts(tables)
    found = _timed(_loader(task, graph, labels, tables), training)
    for name, count in _counts(tables).items():
        found[name] = count - before[name]
    return found


def _warm(task: Task, graph: Graph, labels: torch.Tensor) -> None:
    """Does everything that happens once in a process: loads code and touches memory."""
    training = _Training(graph, task.width)
    nodes = torch.arange(task.batch_size)
    store = FeatureStore({("paper", "y"): labels})
    loader = GatherLoader(
        store, graph, task.fan_out, ("paper", nodes), batch_size=task.batch_size, seed=-1
    )
    for batch in loader:
        for kind in graph.nodes:
            batch[kind].x = torch.rand(len(batch[kind].n_id), WIDTH)
        training.step(batch)


def _timed(batches: Iterable[Any], training: _Training | None = None) -> dict[str, Any]:
    rows = 0
    at: list[float] = []
    begun, spent = time.perf_counter(), measure.cpu_seconds()
    for batch in batches:
        if training is not None:
            training.step(batch)
        at.append(time.perf_counter() - begun)
        rows += sum(len(batch[kind].n_id) for kind in batch.node_types)
    seconds = time.perf_counter() - begun
    # It includes the processes that sample, which have ended by now.
    cpu_seconds = measure.cpu_seconds() - spent
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "at": at, "rows": rows}
    return found if training is None else {**found, "losses": training.losses}


def _nodes(task: Task, labels: torch.Tensor) -> tuple[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(task.seed)
    chosen = torch.randperm(len(labels), generator=generator)
    return "paper", chosen[: task.batches * task.batch_size]


def _loader(
    task: Task, graph: Graph, labels: torch.Tensor, tables: dict[str, features.Features]
) -> GatherLoader:
    held: dict[Any, Any] = {(kind, "x"): table for kind, table in tables.items()}
    return GatherLoader(
        FeatureStore({**held, ("paper", "y"): labels}),
        graph,
        task.fan_out,
        _nodes(task, labels),
        window=task.window,
        ahead=task.ahead,
        seed=task.seed,
        batch_size=task.batch_size,
        num_workers=task.workers,
        # Else they come from the server that this process was forked by, and outlive it.
        multiprocessing_context="fork" if task.workers else None,
    )


def _in_memory(task: Task, graph: Graph, labels: torch.Tensor) -> Iterable[Any]:
    """The batches of the epoch, sampled before, with rows that are there already."""
    batches = list(_loader(task, graph, labels, {}))
    rows = {
        kind: torch.rand(max(len(batch[kind].n_id) for batch in batches), WIDTH)
        for kind in graph.nodes
    }
    for batch in batches:
        for kind, values in rows.items():
            batch[kind].x = values[: len(batch[kind].n_id)]
    return batches


def _peer(task: Task, graph: Graph, labels: torch.Tensor) -> Iterable[Any]:
    """PyG's loader over mapped features: the way that PyG's documentation shows."""
    data = HeteroData()
    for kind, rows in mapped(Path(task.place)).items():
        data[kind].x = rows
    data["paper"].y = labels
    for kind_of_edges in graph.edges:
        # For the names of types alone: the sampler has the edges.
        data[kind_of_edges].edge_index = torch.empty(2, 0, dtype=torch.long)
    sampler = NeighborSampler(graph, task.fan_out, seed=task.seed)
    loader: Iterable[Any] = NodeLoader(
        data,
        sampler,
        _nodes(task, labels),
        batch_size=task.batch_size,
        num_workers=MANY if task.kind == MEMMAP_MANY else max(1, task.workers),
        multiprocessing_context="fork",
        # As PyG decides where nobody does: the processes that sample gather as well.
        filter_per_worker=True,
    )
    return loader


def _counts(tables: dict[str, features.Features]) -> dict[str, int]:
    stats = [table.stats() for table in tables.values()]
    names = ("hits", "shared", "read_rows", "requests", "read_bytes")
    return {name: sum(getattr(one, name) for one in stats) for name in names}


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
