"""Ctrl-C on one of two ranks, at any moment: the other one is notified and does not wait."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import penstock
from dtensors import Layout, rank, sharded, values
from penstock.checkpoint.ranks.round import Round
from penstock.errors import RankError

if TYPE_CHECKING:
    from typing import Any

PACKAGE = str(Path(penstock.__file__).parent)
PATIENCE_SECONDS = 30
PATIENT = penstock.Options(rank_timeout_seconds=PATIENCE_SECONDS)

STRIKES = int(os.environ.get("PENSTOCK_TORTURE_STRIKES", "6"))
"""Number of moments at which each call is interrupted."""

NEVER = -1

SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", "5"))


class Striker:
    """Sends a Ctrl-C to this process when it enters a function of the package for the n-th time.

    Counts from its first contact with the others: before that no rank waits for it.

    Attributes:
        calls: Number of functions that were entered.
        where: The function that was interrupted.
    """

    def __init__(self, at: int) -> None:
        self._at = at
        self._has_come = False
        self.calls = 0
        self.where = ""

    def __enter__(self) -> Striker:
        # Tests that run in the background may have inherited an ignored SIGINT.
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, self._before)

    def _count(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        self._has_come = self._has_come or code.co_name == "concerns"
        self.calls += self._has_come
        if self.calls == self._at:
            self.where = f"{Path(code.co_filename).name}: {code.co_qualname}"
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)


class Struck(NamedTuple):
    """The outcome of a call on a rank, and its duration."""

    where: str
    calls: int
    error: BaseException | None
    seconds: float


def state(step):
    return {
        "rows": sharded(f"rows{step}", Layout([0, 1], [Shard(0)], (8, 3))),
        "copies": sharded(f"copies{step}", Layout([0, 1], [Replicate()], (8, 3))),
        "plain": values(f"plain{step}", (30, 7)),
        "own": penstock.PerRank(values(f"own{rank()}", (5,))),
    }


def save(store, step):
    store.save(step, state(step))


def save_async(store, step):
    store.save_async(step, state(step)).result()


def save_lazily(store, step):
    pending = store.save_async(step, state(step), lazy=True)
    pending.stage()
    pending.result()


def skip_while_busy(store, step):
    pending = store.save_async(step, state(step), if_busy="skip")
    if pending is not None:
        pending.result()


def load(store, step):
    store.load(fallback=True)


CALLS = {one.__name__: one for one in (save, save_async, save_lazily, skip_while_busy, load)}


def strike(root, name, first, victim, moments):
    """Makes a call once for each moment, each time as the first one of a new group.

    Loads of one group are matched by their order alone: after an interrupted load on one rank, the
    ranks' next loads may be out of step.
    """
    found = []
    for step, at in enumerate(moments, first):
        error = None
        group = dist.new_group()
        store = penstock.CheckpointStore(root, options=PATIENT, process_group=group)
        with Striker(at if rank() == victim else NEVER) as striker, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.monotonic()
            try:
                CALLS[name](store, step)
            except (penstock.PenstockError, KeyboardInterrupt) as caught:
                error = caught.with_traceback(None)
            seconds = time.monotonic() - began
        found.append(Struck(striker.where, striker.calls, error, seconds))
    return found


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", list(CALLS))
def test_the_others_hear_of_a_ctrl_c_whenever_it_comes(jobs, disk_path, name, victim):
    job, root = jobs.of(2), disk_path / "store"
    job.call(strike, root, "save", 1, victim, [NEVER])
    (whole,) = job.call(strike, root, name, 10, victim, [NEVER])[victim]
    assert whole.error is None
    dice = random.Random(SEED)
    moments = sorted(dice.sample(range(1, whole.calls + 1), min(STRIKES, whole.calls)))
    limit_seconds = 3 * PATIENCE_SECONDS + len(moments)
    found = job.call(strike, root, name, 20, victim, moments, timeout_seconds=limit_seconds)
    both = zip(found[victim], found[1 - victim], strict=True)
    assert [mine.where for mine, theirs in both if theirs.seconds > PATIENCE_SECONDS / 2] == []


def load_and_strike_before_it_is_decided(root):
    """Both ranks are in the load, and rank 0 is interrupted before it has found the step."""
    store = penstock.CheckpointStore(root, options=PATIENT)
    store.save(1, state(1))
    ordinary = Round.is_true_for_all

    def is_true_for_all(self, answer):
        ordinary(self, answer)
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 0:
            patch.setattr(Round, "is_true_for_all", is_true_for_all)
        try:
            store.load()
            error = None
        except (penstock.PenstockError, KeyboardInterrupt) as caught:
            error = caught.with_traceback(None)
    return type(error), time.monotonic() - began


def test_who_has_come_to_a_load_hears_of_a_ctrl_c_on_rank_0(jobs, disk_path):
    found = jobs.of(2).call(load_and_strike_before_it_is_decided, disk_path / "store")
    assert [kind for kind, _ in found] == [KeyboardInterrupt, RankError]
    assert found[1][1] < PATIENCE_SECONDS / 2
