"""Saves of Megatron-Core in the background: what they store, and what they cost the training."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core.dist_checkpointing")

from megatron.core.dist_checkpointing import ShardedTensor

from megatrons import load, on_cpu, queue, save
from penstock.errors import StorageError
from penstock.integrations.megatron import LoadStrategy, SaveStrategy
from penstock.integrations.megatron.waiting import EndMark, wait_for_end

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROWS, COLUMNS, LAYERS = 256, 2048, 4


class Trainer:
    """Layers of a rank and the moments of their optimizer, some megabytes."""

    def __init__(self):
        torch.manual_seed(dist.get_rank())
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)
        )
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.1)

    def tensors(self):
        """The state, as the tensors that the next step changes."""
        found = {f"w{index}": layer.weight.detach() for index, layer in enumerate(self.layers)}
        moments = self.optimizer.state_dict()["state"]
        for index, of_layer in moments.items():
            found |= {f"{name}{index}": of_layer[name] for name in ("exp_avg", "exp_avg_sq")}
        return found

    def step(self):
        """Changes all of the state."""
        for layer in self.layers:
            layer.weight.grad = torch.randn_like(layer.weight)
        self.optimizer.step()


def sharded(tensors):
    """The state for Megatron-Core: each rank has its rows of every tensor."""
    place = (0, dist.get_rank(), dist.get_world_size())
    return {
        name: ShardedTensor.from_rank_offsets(name, one, place) for name, one in tensors.items()
    }


def step_after_each_call(root):
    trainer, calls, strategy = Trainer(), queue(), SaveStrategy()
    for iteration in (1, 2, 3):
        trainer.step()
        held = {name: one.clone() for name, one in trainer.tensors().items()}
        path = root / f"iter_{iteration:07}"
        request = save(sharded(trainer.tensors()), path, strategy, async_sharded_save=True)
        # Before and after the queue has the request.
        trainer.step()
        calls.schedule_async_request(request)
        trainer.step()
        assert calls.maybe_finalize_async_calls(blocking=True) == [iteration - 1]
        blank = {name: torch.zeros_like(one) for name, one in held.items()}
        loaded = load(sharded(blank), path, LoadStrategy())
        for name, one in held.items():
            assert torch.equal(loaded[name], one), (iteration, name)
    calls.close()


def test_a_step_right_after_the_call_is_in_no_checkpoint(jobs, disk_path):
    jobs.of(2).call(step_after_each_call, disk_path)


def count_forks(root):
    on_cpu()
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    trainer, calls, strategy = Trainer(), queue(), SaveStrategy()
    for iteration in (1, 2):
        path = root / f"iter_{iteration:07}"
        request = save(sharded(trainer.tensors()), path, strategy, async_sharded_save=True)
        calls.schedule_async_request(request)
        calls.maybe_finalize_async_calls(blocking=False)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    return len(forks)


def test_the_trainer_is_not_forked(jobs, disk_path):
    # The pages of a forked trainer, and those of the copy, are copied when they are next written.
    assert jobs.of(2).call(count_forks, disk_path) == [0, 0]


def keep_other_work(path):
    on_cpu()
    calls = queue()
    save(sharded({"w": torch.ones(2)}), path, SaveStrategy())
    request = save(sharded({"w": torch.ones(2)}), path, SaveStrategy(), async_sharded_save=True)
    written = path.parent / f"rank-{dist.get_rank()}"
    calls.schedule_async_request(request)
    other = request._replace(
        async_fn=written.write_text, async_fn_args=("written",), finalize_fns=[]
    )
    calls.schedule_async_request(other)
    assert calls.maybe_finalize_async_calls(blocking=True) == [0, 1]
    calls.close()
    return written.read_text()


def test_requests_of_others_run_as_before(jobs, disk_path):
    assert jobs.of(2).call(keep_other_work, disk_path / "iter_0000001") == ["written"] * 2


def test_a_mark_is_asked_as_the_process_that_it_stands_for():
    mark = EndMark()
    assert mark.is_alive()
    mark.kill()
    mark.join(0.01)
    assert mark.is_alive()
    assert EndMark.of_this_process(mark.path) is mark
    mark.release()
    assert not mark.is_alive()
    mark.join()
    # The work itself, where a request is carried out in the process that made it.
    wait_for_end(mark.path)
    assert EndMark.of_this_process(mark.path) is None


def test_a_mark_without_a_lock_leaves_no_file(tmp_path, monkeypatch):
    def refusing(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refusing)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StorageError, match="No locks available"):
        EndMark()
    assert not list(tmp_path.iterdir())
