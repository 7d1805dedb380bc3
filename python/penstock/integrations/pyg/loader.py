"""`GatherLoader`: batches of neighbourhoods, sampled and gathered ahead of training."""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import get_worker_info
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import SamplerOutput

from penstock.integrations.pyg.epoch import Epoch, EpochPosition
from penstock.integrations.pyg.landing import Landing
from penstock.integrations.pyg.order import Order
from penstock.integrations.pyg.packing import PackedSample
from penstock.integrations.pyg.sampler import NeighborSampler
from penstock.tensors.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.integrations.pyg.feature_store import FeatureStore
    from penstock.integrations.pyg.graph import EdgeType, Graph


class GatherLoader(NodeLoader):  # type: ignore[misc]
    """Batches of nodes with their neighbourhoods and features, made while earlier ones are used.

    A thread samples the next batches, by itself or with ``num_workers`` processes, announces their
    rows to the caches, and gathers them, so that storage works while the caller trains. Features
    are gathered in this process, with one set of I/O workers and one cache, however many processes
    sample.

    Its state, two numbers, can be part of a `penstock.Training`: a restored loader continues with
    the batch after the last one that it handed out, and draws the same nodes. It does not draw from
    the random numbers that training uses.

    Args:
        features: The nodes' features.
        graph: The edges.
        num_neighbors: As for `NeighborSampler`; or a `NeighborSampler`, or another sampler of PyG.
        input_nodes: The nodes to make batches of: a tensor, or ``(type, tensor)``, or a type.
        window: Batches sampled beyond those gathered, so that caches know which rows they need;
            fewer while gathering waits for sampling.
        ahead: Batches gathered beyond the requested one.
        replace: As for `NeighborSampler`.
        seed: As for `NeighborSampler`; with ``shuffle=True`` also of the order.
        device: Where to put batches, as PyTorch names devices. Rows of tables are gathered ahead
            directly to a GPU, on the stream that is current when an epoch begins; the rest of a
            batch is moved when it is requested, on the stream that is current then.
        transform: Applied to each batch, on its device.
        transform_sampler_output: Applied to each neighbourhood before it is gathered.
        **settings: Arguments of `torch.utils.data.DataLoader`: ``batch_size``, ``shuffle``,
            ``num_workers``, … For its state to be valid, a ``sampler`` or ``batch_sampler`` has to
            give the same order for the same epoch, which it learns from ``set_epoch``.

    Attributes:
        window: As given.
        ahead: As given.
        device: The device; None for batches that stay where they are made.

    Raises:
        ValueError: An argument is out of range, or there is no such device.
    """

    def __init__(
        self,
        features: FeatureStore,
        graph: Graph,
        num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]] | Any,
        input_nodes: Any,
        *,
        window: int = 8,
        ahead: int = 2,
        replace: bool = False,
        seed: int = 0,
        device: Any = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        **settings: Any,
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least one batch has to be made before it is used")
        if window < 0:
            raise ValueError(f"window={window}: must be 0 or more batches")
        if settings.get("generator") is not None:
            raise ValueError(
                "generator: the order follows from seed= and the epoch, so that it can be resumed:"
                " leave it out, or give a sampler= of your own"
            )
        if settings.get("batch_size", 1) is None and settings.get("batch_sampler") is None:
            raise ValueError("batch_size: a number of nodes, or a batch_sampler= of your own")
        if "filter_per_worker" in settings:
            raise ValueError(
                "filter_per_worker: features are gathered in this process: leave it out"
            )
        self.device = device_of(device)
        sampler = num_neighbors
        if isinstance(sampler, NeighborSampler):
            # A copy, as loaders must not share an epoch.
            sampler = sampler.another()
        elif not hasattr(sampler, "sample_from_nodes"):
            sampler = NeighborSampler(graph, num_neighbors, replace=replace, seed=seed)
        self.window = window
        self.ahead = ahead
        self._seed = seed
        self._transform = transform
        self._transform_sampled = transform_sampler_output
        self._position = EpochPosition(0, 0)
        self._is_resumed = False
        self._last: Callable[[], Epoch | None] = lambda: None
        super().__init__(
            (features, graph),
            sampler,
            _input_of(graph, input_nodes),
            filter_per_worker=False,
            # Keeps PyTorch's iterators from drawing random numbers that training uses.
            generator=torch.Generator(),
            **self._ordered(settings),
        )
        self._order.count = len(self.input_data.node)
        # Sent to workers, without features and without gathers in progress.
        self.collate_fn = _Sampling(self.node_sampler, self.input_data)

    def _ordered(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings, with an order that knows its epoch and where to begin."""
        settings = {name: value for name, value in settings.items() if name != "generator"}
        if settings.get("batch_sampler") is not None:
            self._order = Order(settings["batch_sampler"], is_shuffled=False, seed=self._seed)
            self._batch_size = 1
            return {**settings, "batch_sampler": self._order}
        is_shuffled = bool(settings.pop("shuffle", False))
        given = settings.pop("sampler", None)
        if is_shuffled and given is not None:
            raise ValueError("shuffle: a sampler= has an order of its own: leave one of them out")
        self._order = Order(given, is_shuffled=is_shuffled, seed=self._seed)
        self._batch_size = settings.get("batch_size", 1) or 1
        return {**settings, "sampler": self._order}

    @property
    def epoch(self) -> int:
        """The current epoch; between epochs the next one."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch, which determines its order and its neighbours.

        Without this call epochs follow each other. If it is the epoch of a restored state, it
        continues there. An epoch in progress is not changed.

        Raises:
            TypeError: It is no integer.
        """
        if epoch != self._position.epoch:
            self._position, self._is_resumed = EpochPosition(operator.index(epoch), 0), False

    def state_dict(self) -> dict[str, int]:
        """The position: batches handed out and their epoch; and the settings both depend on."""
        return {
            "epoch": self._position.epoch,
            "batches": self._position.batches,
            "batch_size": self._batch_size,
            "nodes": len(self._order),
            "seed": self._seed,
            "sampler_seed": getattr(self.node_sampler, "seed", 0),
            "is_shuffled": int(self._order.is_shuffled),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores a position, at which the next epoch begins.

        Raises:
            ValueError: The state has another order, by other nodes, batches or seed; or it is no
                state of a loader.
        """
        here = self.state_dict()
        missing = [name for name in here if name not in state]
        if missing or min(state["epoch"], state["batches"]) < 0:
            wrong = ", ".join(missing) or "epoch and batches of 0 or more"
            raise ValueError(f"the state is none of a GatherLoader: it lacks {wrong}")
        place = ("epoch", "batches")
        other = [name for name in here if name not in place and state[name] != here[name]]
        if other:
            found = ", ".join(f"{name} {state[name]}, not {here[name]}" for name in other)
            raise ValueError(
                f"the state is of another order of nodes: {found}: make the loader as it was"
            )
        self._position, self._is_resumed = EpochPosition(state["epoch"], state["batches"]), True

    def _announce_epoch(self) -> None:
        self._order.set_epoch(self._position.epoch)
        if hasattr(self.node_sampler, "set_epoch"):
            self.node_sampler.set_epoch(self._position.epoch)

    def __call__(self, index: Any) -> Any:
        """The batch of some of the input nodes, given their positions among them."""
        return self.made(self.collate_fn(index), self._landing())

    def _landing(self) -> Landing | None:
        """The device of batches requested here; None if they stay where they are."""
        if self.device is None or self.device.type == "cpu":
            return None
        return Landing(self.device)

    def __iter__(self) -> Iterator[Any]:
        landing = self._landing()
        last = self._last()
        if last is not None and self.persistent_workers:
            # Its workers serve one epoch at a time.
            last.end()
        batches = self._position.batches if self._is_resumed else 0
        self._position, self._is_resumed = EpochPosition(self._position.epoch, batches), False
        self._announce_epoch()
        self._order.skipped = batches * self._batch_size
        # Samplers work on the host, even if tensors are on a device by default.
        with torch.device("cpu"):
            made = Epoch(self, super().__iter__(), self._position, landing)
        self._last = weakref.ref(made)
        return made

    def _get_iterator(self) -> Iterator[Any]:
        # `NodeLoader`'s own iterator would gather only when a batch is requested.
        sampling: Iterator[Any] = super(NodeLoader, self)._get_iterator()
        return sampling

    # Called by an epoch for each batch.

    @property
    def store(self) -> FeatureStore:
        """The features to gather from."""
        store: FeatureStore = self.data[0]
        return store

    def prepared(self, sampled: Any) -> Any:
        """Prepares a sampled neighbourhood for its batch."""
        if isinstance(sampled, PackedSample):
            sampled = sampled.unpacked()
        transform = self._transform_sampled
        return sampled if transform is None else transform(sampled)

    def nodes_of(self, sampled: Any) -> Mapping[str | None, torch.Tensor]:
        """The nodes of a neighbourhood, by type."""
        return {None: sampled.node} if isinstance(sampled, SamplerOutput) else sampled.node

    def made(self, sampled: Any, landing: Landing | None) -> Any:
        """Makes the batch, once its features are gathered, on the device of ``landing``."""
        batch = self.filter_fn(sampled)
        if landing is not None:
            batch = landing.moved(batch)
        return batch if self._transform is None else self._transform(batch)

    def stop(self, sampling: Any) -> None:
        """Ends worker processes that no other epoch needs."""
        # Otherwise they live as long as anybody keeps the traceback of an error.
        if self.num_workers and not self.persistent_workers:
            sampling._shutdown_workers()


def _input_of(graph: Graph, given: Any) -> Any:
    """Input nodes as PyG takes them; by default all nodes of a graph with one node type."""
    is_typed = isinstance(given, str) or (
        isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str)
    )
    if is_typed:
        kind, nodes = (given, None) if isinstance(given, str) else given
        if kind not in graph.nodes:
            raise ValueError(f"input_nodes: there are no nodes of type {kind!r}")
        count = graph.nodes[kind]
    elif None in graph.nodes:
        kind, nodes, count = None, given, graph.nodes[None]
    else:
        raise TypeError("input_nodes: (type, nodes) or a type, as the graph has several")
    if nodes is None:
        nodes = torch.arange(count, device="cpu")
    elif not isinstance(nodes, (torch.Tensor, slice)):
        nodes = torch.as_tensor(nodes, device="cpu")
    return nodes if kind is None else (kind, nodes)


class _Sampling:
    """Samples neighbourhoods of some input nodes: all that worker processes need."""

    def __init__(self, sampler: Any, nodes: Any) -> None:
        self._sampler = sampler
        self._nodes = nodes

    def __call__(self, index: Any) -> Any:
        sampled = self._sampler.sample_from_nodes(self._nodes[index])
        return sampled if get_worker_info() is None else PackedSample(sampled)
