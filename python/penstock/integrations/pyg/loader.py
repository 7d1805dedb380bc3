"""`GatherLoader`: batches of neighbourhoods, sampled and gathered ahead of whoever trains."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any

from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import SamplerOutput

from penstock.integrations.pyg.sampler import NeighborSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.integrations.pyg.feature_store import FeatureStore
    from penstock.integrations.pyg.graph import EdgeType, Graph


class GatherLoader(NodeLoader):  # type: ignore[misc]
    """Batches of nodes with their neighbourhoods and features, made while the last one is used.

    A thread has the next batches sampled, by itself or by ``num_workers`` processes, and their
    features gathered, so that storage has something to do while the caller trains. Features are
    gathered in this process, by one set of workers and one cache, however many processes sample.

    Args:
        features: What nodes have.
        graph: Their edges.
        num_neighbors: As `NeighborSampler` takes it, or such a sampler, or another one of PyG.
        input_nodes: What batches are of: a tensor, or ``(type, tensor)``, or a type.
        ahead: How many batches are sampled, and are being gathered, before they are asked for.
        replace: As `NeighborSampler` takes it.
        seed: As `NeighborSampler` takes it.
        transform: Of each batch.
        transform_sampler_output: Of each neighbourhood, before it is gathered.
        **settings: Of `torch.utils.data.DataLoader`: ``batch_size``, ``shuffle``, ``num_workers``.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        features: FeatureStore,
        graph: Graph,
        num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]] | Any,
        input_nodes: Any,
        *,
        ahead: int = 4,
        replace: bool = False,
        seed: int = 0,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        **settings: Any,
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least one batch has to be made before it is used")
        sampler = num_neighbors
        if not hasattr(sampler, "sample_from_nodes"):
            sampler = NeighborSampler(graph, num_neighbors, replace=replace, seed=seed)
        self.ahead = ahead
        self._transform_sampled = transform_sampler_output
        super().__init__(
            (features, graph),
            sampler,
            input_nodes,
            transform=transform,
            filter_per_worker=False,
            **settings,
        )

    def set_epoch(self, epoch: int) -> None:
        """Has other neighbours drawn from now on than in other epochs."""
        self.node_sampler.set_epoch(epoch)

    def _get_iterator(self) -> Iterator[Any]:
        # The iterator of `NodeLoader` would gather when a batch is asked for.
        return _Ahead(self, super(NodeLoader, self)._get_iterator())

    def begin(self, sampled: Any) -> Any:
        """Begins to gather what a neighbourhood needs; returns what a batch is to be made of."""
        if self._transform_sampled is not None:
            sampled = self._transform_sampled(sampled)
        self.data[0].begin(_nodes_of(sampled))
        return sampled

    def forget(self, sampled: Any) -> None:
        """Nobody will ask for that one."""
        self.data[0].forget(_nodes_of(sampled))


def _nodes_of(sampled: Any) -> dict[str | None, Any]:
    return {None: sampled.node} if isinstance(sampled, SamplerOutput) else sampled.node


class _Ahead:
    """An epoch: what a thread samples ahead, made batches of when it is asked for."""

    def __init__(self, loader: GatherLoader, sampling: Any) -> None:
        self._loader = loader
        self._sampled = _Sampled(loader, sampling)
        self._is_over = False

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        sampled, error = self._sampled.get()
        if error is not None:
            self._end()
            raise error
        return self._loader.filter_fn(sampled)

    def __len__(self) -> int:
        return len(self._loader)

    def __del__(self) -> None:
        if hasattr(self, "_is_over"):
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._sampled.end()


class _Sampled:
    """What the thread has sampled, which knows nothing of whoever asks for it."""

    def __init__(self, loader: GatherLoader, sampling: Any) -> None:
        self._loader = loader
        self._sampling = sampling
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(loader.ahead)
        self._is_over = threading.Event()
        # Here, as it draws the order of an epoch from the random numbers that training draws from.
        first = self._next()
        self._thread = threading.Thread(
            target=self._run, args=(first,), name="penstock-sample", daemon=True
        )
        self._thread.start()

    def get(self) -> tuple[Any, BaseException | None]:
        """The next neighbourhood, or why there is none."""
        return self._queue.get()

    def end(self) -> None:
        """Has the thread end, and forgets what nobody will ask for."""
        self._is_over.set()
        while True:
            # It may wait for room.
            with contextlib.suppress(queue.Empty):
                self._forget(self._queue.get(timeout=0.01))
                continue
            if not self._thread.is_alive():
                break
        while not self._queue.empty():
            self._forget(self._queue.get())

    def _forget(self, one: tuple[Any, BaseException | None]) -> None:
        if one[1] is None:
            self._loader.forget(one[0])

    def _next(self) -> tuple[Any, BaseException | None]:
        try:
            return self._loader.begin(next(self._sampling)), None
        except BaseException as error:
            return None, error

    def _run(self, one: tuple[Any, BaseException | None]) -> None:
        while True:
            self._queue.put(one)
            if one[1] is not None or self._is_over.is_set():
                return
            one = self._next()
