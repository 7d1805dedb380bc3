"""Rows that a cache keeps, compared with the simulator libCacheSim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock import _native

try:
    import libcachesim
except ImportError:
    libcachesim = None

SLOTS = 300
REQUESTS = 30_000
NEVER = np.iinfo(np.int64).max


def zipf(rng: np.random.Generator) -> Any:
    return np.minimum(rng.zipf(1.1, REQUESTS), 1 << 30)


def degrees(rng: np.random.Generator) -> Any:
    """Draws nodes of a graph by degree, with a power law of exponent 2.3."""
    weights = np.arange(1, 6_001) ** (-1 / 1.3)
    return rng.choice(6_000, REQUESTS, p=weights / weights.sum())


def scans(rng: np.random.Generator) -> Any:
    """Repeated scans over the same rows, with others in between."""
    rounds = np.arange(REQUESTS) % 900
    return np.where(rng.random(REQUESTS) < 0.2, 5000 + rng.zipf(1.3, REQUESTS) % 500, rounds)


def misses(keys: Any, policy: str, window: int = 0, batch_keys: int = 500) -> int:
    keys = np.ascontiguousarray(keys, np.uint64)
    array = keys.ctypes.data, (len(keys),), None, 8, keys
    hits = _native.RowIndex(SLOTS, policy).replay(array, batch_keys, window)
    return len(keys) - hits


def simulated(keys: Any, cache: Any) -> int:
    """Counts the misses of a simulator, which is given each key's next use."""
    nexts, later = np.empty(len(keys), np.int64), {}
    for at in range(len(keys) - 1, -1, -1):
        nexts[at] = later.get(keys[at], NEVER)
        later[keys[at]] = at
    found, request = 0, libcachesim.Request()
    request.obj_size = 1
    for at, key in enumerate(keys.tolist()):
        request.obj_id, request.clock_time = key, at
        request.next_access_vtime = int(nexts[at])
        found += cache.get(request)
    return len(keys) - found


@pytest.mark.skipif(libcachesim is None, reason="libcachesim has wheels for few platforms")
@pytest.mark.parametrize("trace", [zipf, degrees, scans])
def test_misses_are_those_of_a_simulator(trace: Any) -> None:
    keys = trace(np.random.default_rng(7))
    sieve = simulated(keys, libcachesim.Sieve(SLOTS, hashpower=16))
    assert misses(keys, "sieve") == sieve
    s3fifo = simulated(keys, libcachesim.S3FIFO(SLOTS, hashpower=16))
    # libCacheSim bases the small queue's share on the capacity, Penstock on the current content.
    assert misses(keys, "s3fifo") == pytest.approx(s3fifo, rel=0.005)
    # libCacheSim has to admit rows that are needed later than all cached ones.
    belady = simulated(keys, libcachesim.Belady(SLOTS, hashpower=16))
    known = misses(keys, "sieve", window=len(keys))
    assert belady * 0.99 <= known <= belady
    ahead = [misses(keys, "sieve", window) for window in (0, 1, 4, 16, 60)]
    assert ahead == sorted(ahead, reverse=True)
    assert ahead[-1] == known < sieve


def test_what_cannot_be_replayed_is_refused() -> None:
    keys = np.arange(3, dtype=np.uint64)
    array = keys.ctypes.data, (3,), None, 8, keys
    with pytest.raises(ValueError, match="batch_keys=0"):
        _native.RowIndex(2, "sieve").replay(array, 0, 1)
    with pytest.raises(ValueError, match="policy="):
        _native.RowIndex(2, "lru")


def test_only_what_is_pinned_is_kept_in_a_static_cache() -> None:
    keys = np.arange(8, dtype=np.uint64).repeat(3)
    array = keys.ctypes.data, (len(keys),), None, 8, keys
    index = _native.RowIndex(4, "static")
    hot = keys[:6]
    assert index.pin((hot.ctypes.data, (len(hot),), None, 8, hot)) == len(hot)
    assert index.replay(array, 4, 0) == 4
