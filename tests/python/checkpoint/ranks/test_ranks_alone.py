"""Ranks without a process group would overwrite each other's save, and raise instead."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
import warnings

import numpy as np
import pytest
import torch

import forks
import penstock
from penstock.errors import RankError
from ranks import Job, free_port

STATE = {"w": np.ones(3)}

LAUNCHERS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "2"},
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
}


@pytest.fixture(params=list(LAUNCHERS))
def as_rank(request, monkeypatch):
    """Sets the environment of this process as a launcher does for a rank."""
    for name, value in LAUNCHERS[request.param].items():
        monkeypatch.setenv(name, value)
    return next(iter(LAUNCHERS[request.param]))


def assert_refused(call, *arguments, says, **settings):
    with pytest.raises(RankError) as caught:
        call(*arguments, **settings)
    message = str(caught.value)
    for remedy in (says, "init_process_group", "destroy_process_group", "no_dist=True"):
        assert remedy in message


def test_a_rank_without_a_group_may_not_save_as_if_it_were_alone(tmp_path, as_rank):
    store = penstock.CheckpointStore(tmp_path / "store")
    says = f"{as_rank} says that this process is rank 1 of 2"
    assert_refused(penstock.save, tmp_path / "one", STATE, overwrite=True, says=says)
    assert_refused(store.save, 1, STATE, overwrite=True, says=says)
    assert_refused(store.save_async, 1, STATE, says=says)
    assert_refused(store.save_async, 1, STATE, if_busy="skip", says=says)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_may_save_and_load_alone_where_that_is_said(tmp_path, as_rank):
    penstock.save(tmp_path / "one", STATE, no_dist=True)
    store = penstock.CheckpointStore(tmp_path / "store", no_dist=True)
    store.save(1, STATE)
    store.save_async(2, STATE).result()
    # Reading is safe.
    store = penstock.CheckpointStore(tmp_path / "store")
    for loaded in (penstock.load(tmp_path / "one"), store.load(), store.load(1, fallback=True)):
        assert loaded["w"].tolist() == [1, 1, 1]


def test_dcp_saves_alone_only_where_that_is_said(tmp_path, as_rank):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from penstock.integrations.dcp import StorageWriter

    state = {"w": torch.ones(3)}
    with warnings.catch_warnings():
        # PyTorch warns that there are no other ranks.
        warnings.simplefilter("ignore")
        with pytest.raises(dcp.api.CheckpointException, match=f"{as_rank} says .* rank 1 of 2"):
            dcp.save(state, storage_writer=StorageWriter(tmp_path / "one"))
        dcp.save(state, storage_writer=StorageWriter(tmp_path / "one", no_dist=True))
    assert penstock.load(tmp_path / "one")["w"].tolist() == [1, 1, 1]


def test_a_job_of_one_rank_is_alone(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert penstock.save(tmp_path / "one", STATE).world_size == 1


RANK = """
    import datetime, json, sys
    import penstock, torch
    import torch.distributed as dist

    root, path = sys.argv[1:]
    store = penstock.CheckpointStore(root)
    state = {"w": torch.ones(3)}
    found = []

    def attempt(call, *arguments, **settings):
        try:
            call(*arguments, **settings)
            found.append("saved")
        except penstock.PenstockError as error:
            found.append(type(error).__name__)

    attempt(penstock.save, path, state, overwrite=True)
    attempt(store.save, 1, state)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    attempt(penstock.save, path, state, overwrite=True)
    attempt(store.save, 1, state)
    mine = dist.new_group([0, 1])
    together = penstock.CheckpointStore(root, process_group=mine)
    dist.barrier()
    dist.destroy_process_group()
    attempt(penstock.save, path, state, overwrite=True)
    attempt(store.save, 2, state)
    attempt(together.save, 2, state)
    attempt(store.load)
    attempt(penstock.save, path + sys.argv[0], state, no_dist=True)
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_ranks_save_between_the_beginning_and_the_end_of_their_job(tmp_path):
    port, ranks = free_port(), []
    for number in range(2):
        where = {"RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = [tmp_path / "store", tmp_path / f"one{number}"[:-1]]
        ranks.append(
            forks.Popen(
                ["-c", textwrap.dedent(RANK), *arguments],
                env={**os.environ, **where, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    told = [process.communicate(timeout=120)[0] for process in ranks]
    refused, saved = "RankError", "saved"
    expected = [refused, refused, saved, saved, refused, refused, refused, saved]
    for text in told:
        assert json.loads(text.splitlines()[-1])[:8] == expected
    assert penstock.CheckpointStore(tmp_path / "store").steps() == [1]
    assert penstock.inspect(tmp_path / "one").world_size == 2


def save_without_its_group(path):
    """Run by ranks that no launcher started."""
    import torch.distributed as dist

    penstock.save(path, STATE)
    dist.destroy_process_group()
    try:
        penstock.save(path, STATE, overwrite=True)
    except RankError as error:
        return str(error)
    return None


def test_ranks_that_nobody_launched_are_told_as_well(tmp_path):
    job = Job(2)
    try:
        for message in job.call(save_without_its_group, tmp_path / "one"):
            assert "this process was one of 2 ranks" in message
    finally:
        job.is_broken = True
        job.close()


def test_tools_that_a_rank_starts_are_alone(tmp_path, as_rank):
    """They work, whatever rank the inherited environment names."""
    penstock.save(tmp_path / "one", {**STATE, "name": "x"}, no_dist=True)
    if as_rank != "RANK":
        return
    for command in (
        ["penstock", "salvage", tmp_path / "one", tmp_path / "two"],
        ["penstock.demo.train", "--store", tmp_path / "demo", "--steps", "1", "--save-every", "1"],
    ):
        done = forks.run(["-m", *command])
        assert done.returncode == 0, done.stderr
