"""Stores in a bucket whose server lies or loses requests: whole steps, or a named error.

Real requests pass a proxy (`lying.py`) to a real server. `PENSTOCK_TORTURE_FAULTS` sets the number
of random lies for each kind of call; `crates/store/tests/objects_explorer` covers all lies in all
orders.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forks
import penstock
from conftest import slow, tell
from lying import Lie, lying
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUndecidedError,
    StorageError,
)

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from buckets import Bucket
    from lying import LyingServer, Request

# Warnings about older steps that could not be deleted, and about an unfinished one.
pytestmark = pytest.mark.filterwarnings("ignore::penstock.errors.PenstockWarning")

FAULTS = int(os.environ.get("PENSTOCK_TORTURE_FAULTS", 5))
SEED = os.environ.get("PENSTOCK_TORTURE_SEED", "4711")
ALWAYS = 1 << 30
ONCE = ("garbled", "flipped", "cut", "dropped", "unanswered", "404", "409", "503")
URL = "s3://bucket/store"
FOR_EVER_SECONDS = 120


def state_of(step: int, elements: int = 1000) -> dict[str, Any]:
    return {"w": np.full(elements, step), "step": step}


def assert_is(state: Any, step: int) -> None:
    assert state["step"] == step
    assert (state["w"] == step).all()


@pytest.fixture
def server(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingServer]:
    """Yields a proxy that the environment's settings lead to."""
    with lying(bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        penstock.set_remote(bucket.url, penstock.Remote(patience_seconds=2))
        yield proxy
        proxy.tell(None)


def lies(chooser: random.Random, requests: int) -> list[Lie]:
    """Draws lies, each about one of so many requests."""
    drawn = list(itertools.product(ONCE, range(requests)))
    chooser.shuffle(drawn)
    return [Lie(kind, skip, 1, about(kind)) for kind, skip in drawn[:FAULTS]]


def about(kind: str) -> Callable[[Request], bool]:
    """Returns the requests that a lie may apply to: a write with a 404 would be refused."""
    return lambda request: kind != "404" or request.method in ("GET", "HEAD")


def test_one_lie_costs_no_step_and_no_load(server: LyingServer) -> None:
    tell(f"seed {SEED}, {FAULTS} lies")
    chooser = random.Random(SEED)
    store = penstock.CheckpointStore(URL, keep_last=3)
    for step in (1, 2, 3):
        store.save(step, state_of(step))
    server.tell(None)
    store.save(4, state_of(4))
    saving = len(server.seen)
    server.tell(None)
    assert_is(store.load(), 4)
    loading = len(server.seen)
    for step, lie in enumerate(lies(chooser, saving), 5):
        tell(lie)
        server.tell(lie)
        store.save(step, state_of(step))
        server.tell(None)
        assert_is(store.load(), step)
    for lie in lies(chooser, loading):
        tell(lie)
        server.tell(lie)
        assert_is(store.load(), step)
    server.tell(None)
    assert penstock.CheckpointStore(URL).verify(step).ok


@pytest.mark.parametrize(
    "lie",
    [Lie("garbled", 0, ALWAYS), *slow(Lie("dropped", 2, ALWAYS), Lie("503", 4, ALWAYS))],
    ids=lambda lie: lie.kind,
)
def test_a_server_that_never_answers_well_is_an_error_that_names_the_step(
    server: LyingServer, lie: Lie
) -> None:
    penstock.set_remote(URL, penstock.Remote(patience_seconds=1))
    store = penstock.CheckpointStore(URL)
    store.save(1, state_of(1))
    server.tell(lie)
    with pytest.raises(StorageError, match=URL) as raised:
        store.save(2, state_of(2))
    server.tell(Lie(lie.kind, 0, ALWAYS))
    with pytest.raises(StorageError, match=URL):
        store.load()
    server.tell(None)
    found = store.load()
    may_be = (1, 2) if raised.type is CommitUndecidedError else (1,)
    assert found["step"] in may_be
    assert_is(found, found["step"])


def test_a_mirror_has_the_same_bytes_whatever_one_answer_says(
    server: LyingServer, bucket: Bucket, tmp_path: Path
) -> None:
    plain = penstock.CheckpointStore(tmp_path / "store")
    for step, kind in enumerate(ONCE, 1):
        plain.save(step, state_of(step, 3000))
        server.tell(Lie(kind, skip=step % 5))
        store = penstock.CheckpointStore(tmp_path / "store", mirror=penstock.Mirror(URL))
        try:
            assert store.wait_for_mirror(FOR_EVER_SECONDS)
            assert step in store.mirror_status().mirrored
        finally:
            store.close()
        assert server.told, kind
    server.tell(None)
    copies = {name: (bucket.files / "store" / name).read_bytes() for name in bucket.names("store")}
    assert copies == {
        str(path.relative_to(plain.root)): path.read_bytes()
        for path in Path(plain.root).rglob("*")
        if path.is_file() and path.name != "history.jsonl"
    }


SAVER = """
import sys
import numpy
import penstock
penstock.CheckpointStore(sys.argv[1]).save(2, {"w": numpy.full(1000, 2), "step": 2})
"""


def test_a_killed_uploader_costs_its_step_at_most(server: LyingServer) -> None:
    store = penstock.CheckpointStore(URL)
    store.save(1, state_of(1))
    for skip in (1, 6):
        victim: list[subprocess.Popen[str]] = []
        is_there = threading.Event()

        def kill(victim: Any = victim, is_there: Any = is_there) -> None:
            assert is_there.wait(FOR_EVER_SECONDS)
            victim[0].send_signal(signal.SIGKILL)

        server.tell(Lie("unanswered" if skip % 2 else "dropped", skip, ALWAYS, then=kill))
        victim.append(forks.Popen(["-c", SAVER, URL]))
        is_there.set()
        assert victim[0].wait(FOR_EVER_SECONDS) != 0
        server.tell(None)
        assert_is(store.load(), store.latest() or 0)
        if store.latest() == 1:
            store.save(2, state_of(2))
        assert_is(store.load(2), 2)
        store.delete(2)


def test_an_emptied_bucket_is_told_and_saved_to_again(
    server: LyingServer, bucket: Bucket, tmp_path: Path
) -> None:
    store = penstock.CheckpointStore(URL)
    store.save(1, state_of(1))
    mirrored = penstock.CheckpointStore(
        tmp_path / "store", mirror=penstock.Mirror(f"{bucket.url}/mirror")
    )
    try:
        mirrored.save(1, state_of(1))
        assert mirrored.wait_for_mirror(FOR_EVER_SECONDS)
        for name in ("store", "mirror"):
            shutil.rmtree(bucket.files / name)
        with pytest.raises(CheckpointNotFoundError, match=URL):
            store.load()
        with pytest.raises(CheckpointNotFoundError, match=URL):
            store.load(1)
        assert store.steps() == []
        assert_is(mirrored.load(), 1)
        mirrored.save(2, state_of(2))
        assert mirrored.wait_for_mirror(FOR_EVER_SECONDS)
        assert 2 in penstock.CheckpointStore(f"{bucket.url}/mirror").steps()
    finally:
        mirrored.close()
    store.save(1, state_of(1))
    assert_is(store.load(), 1)
    shutil.rmtree(bucket.files)
    with pytest.raises(StorageError, match="no such bucket"):
        store.load()
    with pytest.raises(StorageError, match="no such bucket"):
        store.save(2, state_of(2))
    bucket.files.mkdir()


def is_listing(request: Request) -> bool:
    return request.is_listing


def test_a_stale_listing_breaks_no_promise(server: LyingServer) -> None:
    store = penstock.CheckpointStore(URL)
    store.save(1, state_of(1))
    assert store.steps() == [1]
    store.save(2, state_of(2))
    stale = Lie("stale", 0, ALWAYS, is_listing)
    server.tell(stale)
    # The newest step in an old listing is an older one, and whole.
    assert_is(store.load(), 1)
    assert_is(store.load(2), 2)
    # No step is overwritten.
    with pytest.raises(CheckpointExistsError):
        store.save(2, state_of(3))
    server.tell(None)
    assert_is(store.load(), 2)
    store.delete(1)
    server.tell(stale)
    # A deleted step that the listing still shows does not exist.
    with pytest.raises(CheckpointNotFoundError, match=URL):
        store.load(1)
    server.tell(None)
    assert_is(store.load(), 2)


def test_of_two_writers_of_one_step_one_wins_whatever_is_lost(server: LyingServer) -> None:
    chooser = random.Random(SEED)
    for step in range(1, FAULTS + 1):
        url = f"{URL}/step-{step}"
        kind = chooser.choice(["unanswered", "dropped", "garbled", "409", "503"])
        skip = chooser.randrange(14)
        tell(step, kind, skip)
        server.tell(Lie(kind, skip))
        won: list[int] = []
        lost: list[BaseException] = []

        def save(seed: int, url: str = url, won: Any = won, lost: Any = lost) -> None:
            try:
                penstock.save(url, state_of(seed))
                won.append(seed)
            except Exception as failed:
                lost.append(failed)

        writers = [threading.Thread(target=save, args=(seed,)) for seed in (1, 2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        server.tell(None)
        assert [type(error) for error in lost] == [CheckpointExistsError]
        assert_is(penstock.load(url), won[0])
