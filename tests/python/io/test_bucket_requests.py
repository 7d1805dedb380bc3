"""The number of requests, and so of round trips, that calls make to a real bucket server.

The counts are exact, so that one more request fails a test.
`crates/store/tests/buckets/requests.rs` checks the native module alone, with the reason for each
request.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager

import numpy as np

import penstock

LOGGED_SECONDS_MAX = 10
"""The server may write a line of the log after its answer."""


@contextmanager
def made(bucket, **expected):
    """Checks how often the block requests each operation."""
    before = len(bucket.requests())
    yield
    deadline = time.monotonic() + LOGGED_SECONDS_MAX
    while (found := Counter(bucket.requests()[before:])) != expected:
        assert time.monotonic() < deadline, f"{dict(found)} instead of {expected}"
        time.sleep(0.01)


def state(seed=0):
    return {"w": np.full(1000, seed), "step": seed}


def test_a_state_at_a_path(bucket):
    url = f"{bucket.url}/run/step-1"
    # One listing more than for a step of a store: whether a store is there.
    with made(bucket, ListObjectsV2=4, PutObject=3):
        penstock.save(url, state())
    with made(bucket, HeadObject=1, GetObject=3):
        assert penstock.load(url)["step"] == 0
    with made(bucket, HeadObject=1, GetObject=2):
        penstock.inspect(url)
    with made(bucket, HeadObject=1, GetObject=4):
        assert penstock.verify(url).ok
    with made(bucket, ListObjectsV2=4, PutObject=4, GetObject=2, DeleteObject=3):
        penstock.save(url, state(1), overwrite=True)


def test_steps_of_a_store(bucket):
    store = penstock.CheckpointStore(f"{bucket.url}/store")
    with made(bucket, ListObjectsV2=3, PutObject=3):
        store.save(1, state(1))
    # Lists the steps, finds the newest one, and records that it was verified: is it still there,
    # the existing marks, and the new mark.
    with made(bucket, ListObjectsV2=1, HeadObject=1, GetObject=5, PutObject=1):
        assert store.load()["step"] == 1
    with made(bucket, ListObjectsV2=3, PutObject=3):
        store.save(2, state(2))
    # Also reads the other marks again, and finds marks of deleted steps.
    with made(bucket, ListObjectsV2=2, HeadObject=1, GetObject=6, PutObject=1):
        assert store.load()["step"] == 2
    with made(bucket, ListObjectsV2=1, HeadObject=1, GetObject=5):
        assert store.load(fallback=True)["step"] == 2
    with made(bucket, HeadObject=1, GetObject=6):
        assert store.load(2)["step"] == 2
    with made(bucket, ListObjectsV2=1, GetObject=2):
        assert store.steps() == [1, 2]
    with made(bucket, ListObjectsV2=1, HeadObject=1, GetObject=3):
        assert store.latest() == 2
    with made(bucket, HeadObject=1, GetObject=7):
        assert store.verify(2).ok
    with made(bucket, ListObjectsV2=3, PutObject=4, GetObject=2, DeleteObject=3):
        store.save(2, state(3), overwrite=True)
    # Existing objects are checked before anything is copied.
    with made(bucket, HeadObject=1, ListObjectsV2=3, PutObject=3):
        store.save_async(3, state(3)).result()
