"""torchdata's `StatefulDataLoader`: each rank's position in the data, saved and resumed."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import penstock
from penstock.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SAMPLES = 48
BATCH = 4


class Rows(Dataset):
    """Rows by number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    """Endless random numbers, different in each worker, that keep their position."""

    def __init__(self):
        self.generator = torch.Generator()
        self.count = 0

    def __iter__(self):
        worker = get_worker_info()
        if self.count == 0:
            self.generator.manual_seed(0 if worker is None else worker.id)
        while True:
            self.count += 1
            yield int(torch.randint(0, 10**9, (), generator=self.generator))

    def state_dict(self):
        return {"count": self.count, "random": self.generator.get_state()}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.generator.set_state(state["random"])


class Run:
    """A loop over a loader that also draws random numbers, as dropout does."""

    def __init__(self, kind, workers, every=1):
        torch.manual_seed(7)
        further = {}
        if kind == "distributed":
            sampler = StatefulDistributedSampler(Rows(), num_replicas=dist.get_world_size())
            # Ranks come from a fork server that cannot start their children.
            context = "fork" if workers else None
            further = {"sampler": sampler, "multiprocessing_context": context}
        elif kind != "stream":
            further = {"shuffle": True, "persistent_workers": kind == "persistent"}
        self.loader = StatefulDataLoader(
            Stream() if kind == "stream" else Rows(),
            batch_size=BATCH,
            num_workers=workers,
            snapshot_every_n_steps=every,
            **further,
        )
        self.training = penstock.Training(loader=self.loader)
        self.iterator = None

    def steps(self, count):
        """Returns the batches of some steps, each with a random number drawn beside."""
        seen = []
        while len(seen) < count:
            if self.iterator is None:
                self.iterator = iter(self.loader)
            batch = next(self.iterator, None)
            if batch is None:
                self.iterator = None
            else:
                seen.append((batch.tolist(), float(torch.rand(()))))
        return seen

    def end(self):
        """Ends its workers."""
        iterator = self.loader._iterator
        if iterator is not None and self.loader.num_workers:
            iterator._shutdown_workers()


# 12 batches an epoch: before the first one, in the middle, at the end of an epoch, in the next.
@pytest.mark.parametrize("moment", [0, 5, 12, 15])
@pytest.mark.parametrize(
    ("kind", "workers"), [("rows", 0), ("stream", 0), ("rows", 2), ("stream", 2), ("persistent", 2)]
)
def test_a_training_goes_on_with_the_batches_that_it_would_have_had(
    tmp_path, kind, workers, moment
):
    run = Run(kind, workers, every=3)
    run.steps(moment)
    penstock.save(tmp_path / "ckpt", run.training)
    wanted = run.steps(14)
    run.end()
    resumed = Run(kind, workers, every=3)
    torch.manual_seed(8)
    penstock.load(tmp_path / "ckpt", into=resumed.training)
    assert resumed.steps(14) == wanted
    resumed.end()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_state_of_a_loader_is_stored_as_it_is(tmp_path, workers):
    run = Run("stream", workers)
    run.steps(5)
    state = {"loader": run.loader.state_dict()}
    penstock.save(tmp_path / "ckpt", state)
    wanted = [batch for batch, _ in run.steps(6)]
    run.end()
    loaded = penstock.load(tmp_path / "ckpt")
    assert repr(loaded) == repr(state)
    other = Run("stream", workers)
    other.loader.load_state_dict(loaded["loader"])
    assert [batch for batch, _ in other.steps(6)] == wanted
    other.end()


@pytest.mark.parametrize(("saved", "here"), [(0, 2), (2, 0), (2, 1)])
def test_another_number_of_workers_is_refused_before_anything_is_changed(tmp_path, saved, here):
    run = Run("rows", saved)
    run.steps(3)
    penstock.save(tmp_path / "ckpt", run.training)
    run.end()
    other = Run("rows", here)
    before = torch.get_rng_state()
    with pytest.raises(StateMismatchError, match=f"loader.*num_workers={saved}"):
        penstock.load(tmp_path / "ckpt", into=other.training)
    assert torch.equal(torch.get_rng_state(), before)
    other.end()


class Odd:
    """A value that cannot be stored."""


def test_what_a_dataset_has_that_cannot_be_stored_is_named(tmp_path):
    run = Run("stream", 0)
    run.loader.dataset.state_dict = lambda: {"odd": Odd()}
    run.steps(1)
    with pytest.raises(UnsupportedStateError) as caught:
        penstock.save(tmp_path / "ckpt", run.training)
    assert caught.value.key == "loader.dataset_state.odd"


# On ranks.


def may_have_workers():
    """Lets a rank have children, which multiprocessing forbids daemonic processes."""
    multiprocessing.current_process()._config["daemon"] = False


def rank_save(path, workers, moment):
    """Saves in the middle of an epoch; returns a rank's following steps."""
    may_have_workers()
    run = Run("distributed", workers)
    torch.manual_seed(dist.get_rank())
    run.steps(moment)
    penstock.save(path, run.training)
    wanted = run.steps(8)
    run.end()
    return wanted


def rank_resume(path, workers):
    """Resumes; returns a rank's following steps."""
    may_have_workers()
    run = Run("distributed", workers)
    penstock.load(path, into=run.training)
    found = run.steps(8)
    run.end()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_goes_on_in_its_own_place(tmp_path, jobs, workers):
    job = jobs.of(2)
    path = str(tmp_path / "ckpt")
    wanted = job.call(rank_save, path, workers, 3)
    assert wanted[0] != wanted[1]
    assert job.call(rank_resume, path, workers) == wanted
    states = [penstock.load(path, rank=rank) for rank in range(2)]
    assert all(state["loader"] for state in states)
    assert not torch.equal(*(state["rng"]["torch"] for state in states))
