"""`GatherLoader`: batches of neighbourhoods, sampled and gathered ahead of whoever trains."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import SamplerOutput

from penstock.integrations.pyg.epoch import Epoch, Place
from penstock.integrations.pyg.landing import Landing
from penstock.integrations.pyg.order import Order
from penstock.integrations.pyg.sampler import NeighborSampler
from penstock.tensors.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.integrations.pyg.feature_store import FeatureStore
    from penstock.integrations.pyg.graph import EdgeType, Graph


class GatherLoader(NodeLoader):  # type: ignore[misc]
    """Batches of nodes with their neighbourhoods and features, made while the last one is used.

    A thread has the next batches sampled, by itself or by ``num_workers`` processes, tells the
    caches of their rows, and has them gathered, so that storage has something to do while the
    caller trains. Features are gathered in this process, by one set of workers and one cache,
    however many processes sample.

    It has a state, two numbers, for `penstock.Training`: whoever restores it goes on with the batch
    behind the last one that it gave, and draws what it would have drawn. Random numbers that
    training draws from it leaves alone.

    Args:
        features: What nodes have.
        graph: Their edges.
        num_neighbors: As `NeighborSampler` takes it, or such a sampler, or another one of PyG.
        input_nodes: What batches are of: a tensor, or ``(type, tensor)``, or a type.
        window: How many batches are sampled beyond those that are gathered, so that caches know
            which rows they need; fewer while others wait for the sampling.
        ahead: How many batches are gathered beside the one that is asked for.
        replace: As `NeighborSampler` takes it.
        seed: As `NeighborSampler` takes it; of the order too, with ``shuffle=True``.
        device: Where batches are to be, as PyTorch names it. Rows of tables are gathered straight
            to a GPU ahead, on the stream that is current where an epoch is begun; what else a batch
            has is moved when it is made, on the stream that is current then.
        transform: Of each batch, on its device.
        transform_sampler_output: Of each neighbourhood, before it is gathered.
        **settings: Of `torch.utils.data.DataLoader`: ``batch_size``, ``shuffle``, ``num_workers``.
            A ``sampler`` or ``batch_sampler`` has to give the same order for the same epoch, which
            it is told of by ``set_epoch``, if the state is to be of use.

    Attributes:
        window: The same.
        ahead: The same.
        device: The same; None for batches that stay where they are made.

    Raises:
        ValueError: A value is out of range, or there is no such device.
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
            # The epoch of one loader is none of another one's business.
            sampler = sampler.another()
        elif not hasattr(sampler, "sample_from_nodes"):
            sampler = NeighborSampler(graph, num_neighbors, replace=replace, seed=seed)
        self.window = window
        self.ahead = ahead
        self._seed = seed
        self._transform = transform
        self._transform_sampled = transform_sampler_output
        self._place = Place(0, 0)
        self._is_resumed = False
        self._last: Callable[[], Epoch | None] = lambda: None
        super().__init__(
            (features, graph),
            sampler,
            _input_of(graph, input_nodes),
            filter_per_worker=False,
            # What the iterators of PyTorch draw is not drawn from what training draws from.
            generator=torch.Generator(),
            **self._ordered(settings),
        )
        self._order.count = len(self.input_data.node)
        # Workers get this, and so neither features nor what is under way.
        self.collate_fn = _Sampling(self.node_sampler, self.input_data)

    def _ordered(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings with an order that knows its epoch, and where to begin."""
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
        """Which one it is in; between epochs, the next one."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Has this epoch begin next, with an order and neighbours of its own.

        Without it one follows the other. Where it is the one that a state was restored in, it goes
        on there. One that is under way goes on as it began.

        Raises:
            TypeError: It is no integer.
        """
        if epoch != self._place.epoch:
            self._place, self._is_resumed = Place(operator.index(epoch), 0), False

    def state_dict(self) -> dict[str, int]:
        """How far it has come: batches that were given, of which epoch, and what both depend on."""
        return {
            "epoch": self._place.epoch,
            "batches": self._place.batches,
            "batch_size": self._batch_size,
            "nodes": len(self._order),
            "seed": self._seed,
            "sampler_seed": getattr(self.node_sampler, "seed", 0),
            "is_shuffled": int(self._order.is_shuffled),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Has the next epoch begin where that one was.

        Raises:
            ValueError: It is of another order: of other nodes, batches or seed; or no state of a
                loader.
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
        self._place, self._is_resumed = Place(state["epoch"], state["batches"]), True

    def _tell_epoch(self) -> None:
        self._order.set_epoch(self._place.epoch)
        if hasattr(self.node_sampler, "set_epoch"):
            self.node_sampler.set_epoch(self._place.epoch)

    def __call__(self, index: Any) -> Any:
        """The batch of some of the input nodes, by their places among them."""
        return self.made(self.collate_fn(index), self._landing())

    def _landing(self) -> Landing | None:
        """Where batches go that are begun here; None where they stay."""
        if self.device is None or self.device.type == "cpu":
            return None
        return Landing(self.device)

    def __iter__(self) -> Iterator[Any]:
        landing = self._landing()
        last = self._last()
        if last is not None and self.persistent_workers:
            # They work for one epoch at a time.
            last.end()
        batches = self._place.batches if self._is_resumed else 0
        self._place, self._is_resumed = Place(self._place.epoch, batches), False
        self._tell_epoch()
        self._order.skipped = batches * self._batch_size
        # What samples is of the host, whatever device tensors are on by default.
        with torch.device("cpu"):
            made = Epoch(self, super().__iter__(), self._place, landing)
        self._last = weakref.ref(made)
        return made

    def _get_iterator(self) -> Iterator[Any]:
        # That of `NodeLoader` would gather when a batch is asked for.
        sampling: Iterator[Any] = super(NodeLoader, self)._get_iterator()
        return sampling

    # What an epoch does for each batch.

    @property
    def store(self) -> FeatureStore:
        """What is gathered from."""
        store: FeatureStore = self.data[0]
        return store

    def prepared(self, sampled: Any) -> Any:
        """What was sampled, as a batch is made of it."""
        if self.num_workers:
            sampled = _own(sampled)
        transform = self._transform_sampled
        return sampled if transform is None else transform(sampled)

    def nodes_of(self, sampled: Any) -> Mapping[str | None, torch.Tensor]:
        """The nodes that it has, by type."""
        return {None: sampled.node} if isinstance(sampled, SamplerOutput) else sampled.node

    def made(self, sampled: Any, landing: Landing | None) -> Any:
        """The batch, once its features are there, on the device that it goes to."""
        batch = self.filter_fn(sampled)
        if landing is not None:
            batch = landing.moved(batch)
        return batch if self._transform is None else self._transform(batch)

    def stop(self, sampling: Any) -> None:
        """Has worker processes end that no other epoch needs."""
        # By themselves they stay as long as somebody has the traceback of what went wrong.
        if self.num_workers and not self.persistent_workers:
            sampling._shutdown_workers()


def _input_of(graph: Graph, given: Any) -> Any:
    """Input nodes as PyG takes them: of a graph with one type of nodes all where none are said.

    Raises:
        TypeError: They are neither a tensor, nor a type, nor both.
    """
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
    """Samples neighbourhoods of some of the input nodes: all that a worker has."""

    def __init__(self, sampler: Any, nodes: Any) -> None:
        self._sampler = sampler
        self._nodes = nodes

    def __call__(self, index: Any) -> Any:
        return self._sampler.sample_from_nodes(self._nodes[index])


def _own(value: Any) -> Any:
    """The same in memory of this process alone.

    What comes from a worker holds a descriptor for each tensor, and a window has many.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _own(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_own(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = {one.name: _own(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return dataclasses.replace(value, **known)
    return value
