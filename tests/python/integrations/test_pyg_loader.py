"""Epochs sampled and gathered ahead: announced to the caches, resumed, and left cleanly."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler
from torch_geometric.loader import NodeLoader

import forks
import penstock
from conftest import REPOSITORY
from features.tables import table_of
from penstock import features
from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph, NeighborSampler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch_geometric.sampler import NodeSamplerInput

NODES, WIDTH = 800, 32
AUTHORS = 300
BATCHES = 20


@pytest.fixture(scope="module")
def graph() -> Graph:
    generator = torch.Generator().manual_seed(3)
    return Graph(torch.randint(0, NODES, (2, 6000), generator=generator), NODES)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[tuple[features.Features, torch.Tensor]]:
    source, want = table_of(tmp_path, rows=NODES, width=WIDTH)
    with features.Features(source, cache=features.Cache(200 * (4 * WIDTH + 64))) as opened:
        yield opened, torch.from_numpy(want)


def loader_of(held: Any, graph: Graph, **settings: Any) -> GatherLoader:
    settings = {"batch_size": 16, "shuffle": True, "seed": 5, **settings}
    return GatherLoader(FeatureStore({"x": held}), graph, [3, 2], torch.arange(320), **settings)


def seen(batch: Any) -> tuple[Any, ...]:
    return tuple(one.tolist() for one in (batch.n_id, batch.e_id, batch.edge_index, batch.x))


def exhaust(loader: GatherLoader, batches: list[Any]) -> None:
    """Collects batches until the loader raises."""
    for batch in loader:
        batches.append(batch)  # noqa: PERF402


def is_clean(loader: GatherLoader) -> bool:
    """Whether an epoch has left no thread, no gather in flight, and no prefetch."""
    gc.collect()
    threads = [one for one in threading.enumerate() if one.name == "penstock-sample"]
    return not threads and not loader.store._ahead


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_cache_knows_as_many_batches_as_the_window_has(
    table: Any, graph: Graph, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    opened, want = table
    told = []
    hint = FeatureStore.hint
    monkeypatch.setattr(
        FeatureStore, "hint", lambda self, nodes: (hint(self, nodes), told.append(nodes))
    )
    read = {}
    for window in (0, BATCHES):
        loader = loader_of(opened, graph, window=window, ahead=1, num_workers=workers)
        told.clear()
        before = opened.stats().read_rows
        epoch = iter(loader)
        for count in range(BATCHES):
            # One batch is gathered, one more is requested, and then the window's are announced.
            least = min(count + 2 + window, BATCHES)
            wait_until(lambda least=least: len(told) >= least)
            assert len(told) <= count + 2 + window
            batch = next(epoch)
            assert torch.equal(batch.x, want[batch.n_id])
        assert next(epoch, None) is None
        assert is_clean(loader)
        read[window] = opened.stats().read_rows - before
    assert read[BATCHES] < 0.9 * read[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_types_have_caches_by_the_size_of_their_rows(tmp_path: Path, workers: int) -> None:
    """Papers and authors share a cache, institutes have another, topics none: all are announced."""
    sizes = {"paper": (NODES, 32), "author": (AUTHORS, 32), "institute": (20, 8), "topic": (30, 4)}
    small, large = features.Cache(60 * 192), features.Cache(10 * 96)
    caches = {"paper": small, "author": small, "institute": large, "topic": None}
    held: dict[Any, Any] = {("paper", "y"): torch.arange(NODES)}
    want = {}
    with contextlib.ExitStack() as stack:
        for name, (rows, width) in sizes.items():
            (tmp_path / name).mkdir()
            source, values = table_of(tmp_path / name, rows=rows, width=width)
            opened = stack.enter_context(features.Features(source, cache=caches[name]))
            held[name, "x"], want[name] = opened, torch.from_numpy(values)
        (tmp_path / "years").mkdir()
        source, years = table_of(tmp_path / "years", rows=AUTHORS, width=1, dtype="int64")
        held["author", "year"] = stack.enter_context(features.Features(source))
        generator = torch.Generator().manual_seed(1)
        kinds = [
            ("paper", "cites", "paper"),
            ("author", "writes", "paper"),
            ("topic", "of", "paper"),
            ("institute", "has", "author"),
        ]
        counts = {name: rows for name, (rows, _) in sizes.items()}
        edges = {
            kind: torch.stack(
                [
                    torch.randint(0, counts[kind[0]], (4000,), generator=generator),
                    torch.randint(0, counts[kind[2]], (4000,), generator=generator),
                ]
            )
            for kind in kinds
        }
        loader = GatherLoader(
            FeatureStore(held),
            Graph(edges, counts),
            [3, 2],
            ("paper", torch.arange(200)),
            batch_size=20,
            window=4,
            num_workers=workers,
        )
        count = 0
        for batch in loader:
            count += 1
            for name, rows in want.items():
                assert torch.equal(batch[name].x, rows[batch[name].n_id])
            assert torch.equal(batch["paper"].y, batch["paper"].n_id)
            given = torch.from_numpy(years)[batch["author"].n_id]
            assert torch.equal(batch["author"].year, given)
        assert count == 10
        assert is_clean(loader)
        assert held["paper", "x"].stats().hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("left_after", [1, 13, BATCHES])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_restored_goes_on_with_the_next_batch(
    table: Any, graph: Graph, workers: int, left_after: int
) -> None:
    opened, _ = table
    straight = loader_of(opened, graph)
    wanted = [[seen(batch) for batch in straight] for _ in range(3)]
    assert wanted[0] != wanted[1]
    first = loader_of(opened, graph, num_workers=workers)
    first.set_epoch(1)
    epoch = iter(first)
    for _ in range(left_after):
        next(epoch)
    state = first.state_dict()
    del epoch
    assert is_clean(first)
    resumed = loader_of(opened, graph, num_workers=workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    found = []
    for number in range(resumed.epoch, 3):
        resumed.set_epoch(number)
        found += [seen(batch) for batch in resumed]
    assert found == wanted[1][left_after:] + wanted[2]
    with pytest.raises(ValueError, match="batch_size 16, not 8"):
        loader_of(opened, graph, batch_size=8).load_state_dict(state)
    # A loader without a new restore begins a new epoch.
    next(iter(resumed))
    assert seen(next(iter(resumed))) == seen(next(iter(resumed)))


def test_random_numbers_of_training_are_left_alone(table: Any, graph: Graph) -> None:
    opened, _ = table
    before = torch.get_rng_state()
    for workers in (0, 1):
        assert len(list(loader_of(opened, graph, num_workers=workers))) == BATCHES
    assert torch.equal(torch.get_rng_state(), before)


def test_an_order_of_ones_own_is_told_of_its_epoch_and_resumed(table: Any, graph: Graph) -> None:
    opened, _ = table

    class Reversed(SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.epoch, 320))

    def starts(loader: GatherLoader) -> list[int]:
        return [int(batch.n_id[0]) for batch in loader]

    for settings in (
        {"sampler": Reversed(range(320)), "shuffle": False},
        {
            "batch_sampler": BatchSampler(Reversed(range(320)), 16, drop_last=False),
            "shuffle": False,
            "batch_size": 1,
        },
    ):
        loader = loader_of(opened, graph, **settings)
        assert len(loader) == BATCHES
        whole = starts(loader)
        assert whole[:2] == [0, 16]
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batches": 3})
        assert starts(loader) == whole[3:]
    loader = loader_of(opened, graph, sampler=Reversed(range(320)), shuffle=False)
    loader.set_epoch(7)
    assert starts(loader)[0] == 7
    with pytest.raises(ValueError, match="order of its own"):
        loader_of(opened, graph, sampler=Reversed(range(320)))
    with pytest.raises(ValueError, match="generator"):
        loader_of(opened, graph, generator=torch.Generator())
    for name in ("window", "ahead"):
        with pytest.raises(ValueError, match=name):
            loader_of(opened, graph, **{name: -1})


@pytest.mark.slow
def test_workers_that_stay_draw_for_the_epoch_that_they_are_in(table: Any, graph: Graph) -> None:
    opened, _ = table
    straight = loader_of(opened, graph, shuffle=False)
    wanted = [[seen(batch) for batch in straight] for _ in range(3)]
    loader = loader_of(
        opened, graph, shuffle=False, num_workers=2, persistent_workers=True, prefetch_factor=1
    )
    kept = iter(loader)
    next(kept)
    # They are dropped for the next epoch, which repeats the first one, as that did not end.
    assert [[seen(batch) for batch in loader] for _ in range(3)] == wanted
    assert next(kept, None) is None
    assert is_clean(loader)
    del loader
    gc.collect()


def test_workers_that_are_spawned_get_what_samples_and_no_table(
    table: Any, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, _ = table
    loader = loader_of(opened, graph)
    index = list(range(20))
    wanted = loader.collate_fn(index)
    # Independent of the table's own pickling.
    monkeypatch.delattr(features.Features, "__reduce__")
    found = pickle.loads(ForkingPickler.dumps(loader.collate_fn))(index)
    assert torch.equal(found.node, wanted.node)
    assert torch.equal(found.edge, wanted.edge)


def test_a_store_that_is_passed_to_another_process_has_tables_of_its_own(
    table: Any, graph: Graph
) -> None:
    """As in the workers of PyG's loaders, each of which gathers."""
    opened, want = table
    store = FeatureStore({"x": opened, "y": torch.arange(NODES)})
    nodes = torch.arange(7)
    store.begin({None: nodes})
    sampler = NeighborSampler(graph, [2])
    loader = NodeLoader(
        (store, graph), sampler, torch.arange(20), batch_size=10, filter_per_worker=True
    )
    collate = pickle.loads(ForkingPickler.dumps(loader.collate_fn))
    arrived = collate.__self__.data[0]
    assert not arrived._ahead
    batch = collate(list(range(10)))
    assert torch.equal(batch.x, want[batch.n_id])
    assert torch.equal(batch.y, batch.n_id)
    arrived._held[None, "x"].close()
    store.forget({None: nodes})


def test_workers_that_are_forked_and_gather_say_what_to_do(table: Any, graph: Graph) -> None:
    opened, _ = table
    loader = NodeLoader(
        (FeatureStore({"x": opened}), graph),
        NeighborSampler(graph, [2]),
        torch.arange(20),
        num_workers=1,
        filter_per_worker=True,
        multiprocessing_context="fork",
    )
    epoch = iter(loader)
    with pytest.raises(penstock.PenstockError, match="of which this one is a fork: open it here"):
        next(epoch)
    # The worker lives as long as the traceback.
    epoch._shutdown_workers()


class Failing(NeighborSampler):
    """A sampler that fails at its sixth batch."""

    def sample_from_nodes(self, index: NodeSamplerInput, **settings: Any) -> Any:
        if 80 in index.node.tolist():
            raise OSError("no edges")
        return super().sample_from_nodes(index, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_what_goes_wrong_comes_in_its_turn_and_leaves_nothing(
    table: Any, graph: Graph, workers: int
) -> None:
    opened, _ = table
    loader = GatherLoader(
        FeatureStore({"x": opened}),
        graph,
        Failing(graph, [2]),
        torch.arange(320),
        batch_size=16,
        num_workers=workers,
    )
    for _ in range(2):
        with pytest.raises(OSError, match="no edges"):
            exhaust(loader, batches := [])
        assert len(batches) == 5
        assert is_clean(loader)
    # A row out of range fails in the gather, after good batches.
    loader = GatherLoader(
        FeatureStore({"x": opened}),
        graph,
        [1],
        torch.arange(64),
        batch_size=16,
        transform_sampler_output=_with_far_node,
    )
    with pytest.raises(IndexError, match="the table has rows 0 to 799"):
        exhaust(loader, batches := [])
    assert len(batches) == 2
    assert is_clean(loader)


def _with_far_node(sampled: Any) -> Any:
    if 32 in sampled.node.tolist()[:16]:
        sampled.node = torch.cat([sampled.node, torch.tensor([NODES])])
    return sampled


@pytest.mark.parametrize("where", ["transform", "step", "wait"])
def test_an_interrupt_leaves_nothing(table: Any, graph: Graph, where: str) -> None:
    """Ctrl-C during the making of a batch, its use, or the wait for it."""
    opened, _ = table
    made: list[Any] = []
    sent: list[bool] = []

    def transform(batch: Any) -> Any:
        made.append(batch)
        if len(made) == 3 and where == "transform":
            raise KeyboardInterrupt
        return batch

    def slow(sampled: Any) -> Any:
        if len(made) >= 2 and where == "wait" and not sent:
            # In the thread, while the main thread waits for it.
            sent.append(True)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        return sampled

    def train() -> None:
        for _ in loader:
            if len(made) == 3 and where == "step":
                raise KeyboardInterrupt

    loader = loader_of(
        opened, graph, window=0, ahead=1, transform=transform, transform_sampler_output=slow
    )
    with pytest.raises(KeyboardInterrupt):
        train()
    assert is_clean(loader)
    assert torch.equal(opened.gather(torch.arange(NODES)), table[1])


LEFT = """
    import sys
    import torch
    from penstock import features
    from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph
    table = features.open(sys.argv[1], cache=features.Cache(1 << 16))
    edges = torch.randint(0, len(table), (2, 6000))
    loader = GatherLoader(
        FeatureStore({"x": table}), Graph(edges, len(table)), [3, 2], torch.arange(400),
        batch_size=4, num_workers=int(sys.argv[2]), persistent_workers=sys.argv[2] != "0",
    )
    epoch = iter(loader)
    next(epoch)
    print("left", flush=True)
    if sys.argv[3] == "raise":
        raise KeyboardInterrupt
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "raise"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_process_ends_in_the_middle_of_an_epoch(tmp_path: Path, workers: str, how: str) -> None:
    features.write(tmp_path / "table", np.ones((NODES, WIDTH), np.float32))
    code = "\n".join(line[4:] for line in LEFT.splitlines())
    command = ["-c", code, tmp_path / "table", workers, how]
    done = forks.run(command, timeout=120, popen=forks.WholeGraphPopen)
    assert done.stdout.split() == ["left"], done.stderr
    assert (done.returncode == 0) == (how == "end")
    assert "Traceback" not in done.stderr or how == "raise"


def test_a_fork_may_drop_an_epoch_that_is_none_of_its_own(table: Any, graph: Graph) -> None:
    opened, _ = table
    loader = loader_of(opened, graph)
    epoch = iter(loader)
    first = seen(next(epoch))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del epoch
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert [first, *map(seen, epoch)] == [seen(batch) for batch in loader_of(opened, graph)]


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (REPOSITORY / "docs" / "pyg.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    exec(compile(code, "docs/pyg.md", "exec"), known)
    assert known["step"] == 15
    assert known["loader"].epoch == 3
    stats = known["held"]["paper", "x"].stats()
    assert stats.hits > 0
    assert is_clean(known["loader"])
    for table in known["held"].values():
        if isinstance(table, features.Features):
            table.close()


def test_an_epoch_under_way_is_nobody_elses_business(table: Any, graph: Graph) -> None:
    """Another loader of the same sampler, or `set_epoch` during the epoch, does not affect it."""
    opened, _ = table
    sampler = NeighborSampler(graph, [3, 2], seed=5)

    def made(sampler: NeighborSampler = sampler, **settings: Any) -> GatherLoader:
        settings = {"batch_size": 16, "window": 4, **settings}
        store = FeatureStore({"x": opened})
        return GatherLoader(store, graph, sampler, torch.arange(320), **settings)

    wanted = [seen(batch) for batch in made()]
    loader, other = made(), made()
    other.set_epoch(3)
    found, others = [], iter(other)
    for number, batch in enumerate(loader):
        found.append(seen(batch))
        if number == 2:
            loader.set_epoch(9)
        if number < 5:
            next(others)
    assert found == wanted
    assert [seen(batch) for batch in loader] != wanted
    state = made().state_dict()
    with pytest.raises(ValueError, match="sampler_seed 5, not 6"):
        made(NeighborSampler(graph, [3, 2], seed=6)).load_state_dict(state)
    with pytest.raises(ValueError, match="is_shuffled 0, not 1"):
        made(shuffle=True).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks batch_size"):
        made().load_state_dict({"epoch": 0, "batches": 1})
    with pytest.raises(ValueError, match="0 or more"):
        made().load_state_dict({**state, "batches": -1})
    with pytest.raises(TypeError):
        made().set_epoch(1.5)  # type: ignore[arg-type]


def test_a_fork_is_told_that_an_epoch_is_not_its_own(graph: Graph) -> None:
    epoch = iter(loader_of(torch.zeros(NODES, WIDTH), graph))
    next(epoch)

    def in_fork() -> str:
        try:
            for _ in epoch:
                pass
        except penstock.PenstockError as error:
            return str(error)
        return "went on"

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, in_fork().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert "is a fork: begin one here" in told.read()
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(epoch)) == BATCHES - 1


def test_an_interrupt_while_the_thread_starts_leaves_nothing(
    table: Any, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(table[0], graph)
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    monkeypatch.undo()
    assert is_clean(loader)
    assert len(list(loader)) == BATCHES


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Graph(torch.empty(2, 0), 5), None, ""),
        (lambda: Graph(torch.zeros(2, 1, dtype=torch.long), np.int64(5)), None, ""),
        (lambda: Graph(torch.zeros(2, 1), 5), TypeError, "use integers"),
        (lambda: Graph((torch.tensor([0, 1]), torch.tensor([0.9])), 1), TypeError, "use integers"),
        (lambda: Graph({"a": torch.empty(2, 0)}, {"a": 1}), ValueError, "a type is"),
        (lambda: Graph(torch.empty(2, 0), -1), ValueError, "0 or more"),
    ],
)
def test_edges_are_integers_between_types(make: Any, error: Any, message: str) -> None:
    if error is None:
        assert make().nodes == {None: 5}
        return
    with pytest.raises(error, match=message):
        make()


def test_input_nodes_are_integers_and_there(graph: Graph) -> None:
    for nodes, error, message in (
        (torch.tensor([1.0, 2.9]), TypeError, "use integers"),
        (torch.tensor([3, NODES]), IndexError, rf"input nodes\[1\] is {NODES}: there are {NODES}"),
    ):
        loader = GatherLoader(FeatureStore(), graph, [2], nodes, batch_size=2)
        with pytest.raises(error, match=message):
            list(loader)


def test_arguments_are_told_by_name(graph: Graph) -> None:
    store, nodes = FeatureStore(), torch.arange(5)
    kinds = {("a", "to", "b"): torch.zeros(2, 1, dtype=torch.long)}
    typed = Graph(kinds, {"a": 1, "b": 1})
    loader = GatherLoader(store, graph, [1], None, batch_size=NODES)
    assert len(next(iter(loader)).n_id) == NODES
    assert len(next(iter(GatherLoader(store, graph, [1], [3, 4], batch_size=2))).n_id) >= 2
    for make, error, message in (
        (lambda: GatherLoader(store, graph, [1], nodes, batch_size=None), ValueError, "batch_size"),
        (
            lambda: GatherLoader(store, graph, [1], nodes, filter_per_worker=True),
            ValueError,
            "filter_per_worker",
        ),
        (lambda: GatherLoader(store, typed, [1], nodes), TypeError, "input_nodes"),
        (lambda: GatherLoader(store, typed, [1], "c"), ValueError, "no nodes of type 'c'"),
        (lambda: NeighborSampler(graph, [2.5]), TypeError, "float"),
        (
            lambda: NeighborSampler(typed, {**{kind: [1] for kind in kinds}, "x": [1]}),
            ValueError,
            "no edges of type 'x'",
        ),
        (lambda: FeatureStore({"x": "abc"}), TypeError, "x: str"),
        (lambda: FeatureStore({("a", "b", "c"): nodes}), TypeError, "a name, or"),
    ):
        with pytest.raises(error, match=message):
            make()
