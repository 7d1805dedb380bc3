"""Ranks of one store with a mirror: the first one copies, all of them load."""

from __future__ import annotations

import torch
import torch.distributed as dist

import penstock

URL = "s3://bucket/run"


def store_at(root, endpoint):
    key = penstock.Credentials(access_key_id="key", secret_access_key="secret")
    remote = penstock.Remote(endpoint=endpoint, region="us-east-1", credentials=key)
    penstock.set_remote(URL, remote)
    return penstock.CheckpointStore(root, mirror=penstock.Mirror(URL))


def state_of(step):
    own = torch.full((70_000,), float(step * 10 + dist.get_rank()))
    return {"own": penstock.PerRank(own), "shared": torch.arange(1000.0) + step}


def save(root, endpoint):
    """Saves three steps; returns the steps that this rank has copied."""
    store = store_at(root, endpoint)
    store.save(1, state_of(1))
    store.save_async(2, state_of(2)).result()
    store.save(3, state_of(3))
    copied = store.wait_for_mirror(50) and store.mirror_status().mirrored
    dist.barrier()
    store.close()
    return copied


def load(root, endpoint):
    """Loads the newest step; returns its source, and whether it is right."""
    store = store_at(root, endpoint)
    reports = []
    state = store.load(report=reports.append)
    expected = state_of(3)
    is_it = torch.equal(state["own"], expected["own"].value)
    return reports[0].path, is_it and torch.equal(state["shared"], expected["shared"])


def follow_first(root, endpoint):
    """Saves; returns whether this rank has a mirroring thread."""
    store = store_at(root, endpoint)
    store.save(4, state_of(4))
    has_thread = store._mirrored.follower._thread is not None
    dist.barrier()
    store.close()
    return has_thread


def test_the_first_rank_copies_and_all_load(jobs, bucket, tmp_path):
    job = jobs.of(2)
    job.call(save, tmp_path / "store", bucket.endpoint)
    copied = {name: (bucket.files / "run" / name).read_bytes() for name in bucket.names("run")}
    root = tmp_path / "store"
    here = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    # It stays with the store.
    del here["history.jsonl"]
    assert copied == here
    assert job.call(load, root, bucket.endpoint) == [(f"{root}/step-0000000003", True)] * 2
    empty = tmp_path / "empty"
    assert job.call(load, empty, bucket.endpoint) == [(f"{URL}/step-0000000003", True)] * 2
    assert job.call(follow_first, root, bucket.endpoint) == [True, False]
