"""Stores with a mirror: copies, deletions of local steps, and the source of loads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import penstock
from conftest import run_child
from damaged import file_of
from penstock.checkpoint.mirroring import copy_step
from penstock.common.tracing import recorded, summary
from penstock.errors import (
    CorruptCheckpointError,
    PenstockWarning,
    StorageError,
    UnsupportedPathError,
)

URL = "s3://bucket/run"

FOR_EVER_SECONDS = 120


def state_of(step):
    generator = np.random.default_rng(step)
    return {"w": generator.standard_normal(400_000), "b": np.arange(70) + step, "step": step}


def assert_is(state, step):
    expected = state_of(step)
    assert state["step"] == step
    np.testing.assert_array_equal(state["w"], expected["w"])
    np.testing.assert_array_equal(state["b"], expected["b"])


def save(store, *steps):
    for step in steps:
        store.save(step, state_of(step))


@pytest.fixture
def stores(tmp_path):
    """Yields a function that makes stores with a mirror; stops their threads at the end."""
    made = []

    def make(root="store", **options):
        keep_last = options.pop("keep_last", None)
        mirror = penstock.Mirror(URL, **options)
        store = penstock.CheckpointStore(tmp_path / root, keep_last=keep_last, mirror=mirror)
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def files_below(root):
    """Contents of the files below a store, but for its history, which stays with it."""
    root = Path(root)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "history.jsonl"
    }


def copies(bucket):
    return {name: (bucket.files / "run" / name).read_bytes() for name in bucket.names("run")}


def flip(store, step, at):
    shard = Path(file_of(store, step, "shard"))
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)


# Copies.


def test_steps_are_copied_byte_for_byte(bucket, stores):
    store = stores()
    save(store, 1, 2)
    store.save_async(3, state_of(3)).result()
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert copies(bucket) == files_below(store.root)
    status = store.mirror_status()
    assert (status.mirrored, status.waiting, status.refused) == ((1, 2, 3), (), {})
    assert (status.url, status.failures, status.last_error) == (URL, 0, None)
    # The copy is a checkpoint like any other.
    assert_is(penstock.load(f"{URL}/step-0000000002"), 2)


def test_only_steps_that_are_due_are_copied(bucket, stores):
    store = stores(every=10)
    save(store, 5, 10, 15, 20)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert penstock.CheckpointStore(URL).steps() == [10, 20]


def test_a_save_waits_for_its_copy_if_the_mirror_says_so(bucket, stores):
    store = stores(wait="commit")
    save(store, 1)
    assert penstock.CheckpointStore(URL).steps() == [1]
    store.save_async(2, state_of(2)).result()
    assert penstock.CheckpointStore(URL).steps() == [1, 2]
    bucket.stop()
    penstock.set_remote(URL, penstock.Remote(patience_seconds=1))
    with pytest.raises(StorageError) as caught:
        save(store, 3)
    assert "step 3 is saved here" in caught.value.__notes__[0]
    # A background copy cannot raise its error: the next save reports it.
    bucket.start()
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    bucket.stop()
    with pytest.warns(PenstockWarning, match="step-0000000003"):
        store.save_async(4, state_of(4)).result()
    bucket.start()
    with pytest.warns(PenstockWarning, match="are not at s3://bucket/run yet"):
        save(store, 5)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert penstock.CheckpointStore(URL).steps() == [1, 2, 3, 4, 5]


def test_what_an_earlier_process_left_is_copied_when_asked(bucket, stores, tmp_path):
    save(penstock.CheckpointStore(tmp_path / "store"), 1, 2)
    store = stores()
    assert store.mirror_status().waiting == (1, 2)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert copies(bucket) == files_below(store.root)


def test_what_is_damaged_here_or_another_there_is_refused_and_holds_up_nothing(bucket, stores):
    first, second = stores("first"), stores("second")
    save(first, 1)
    assert first.wait_for_mirror(FOR_EVER_SECONDS)
    save(penstock.CheckpointStore(second.root), 1, 2, 3)
    flip(second, 2, 5000)
    assert second.wait_for_mirror(FOR_EVER_SECONDS)
    status = second.mirror_status()
    assert status.mirrored == (3,)
    assert list(status.refused) == [1, 2]
    assert "digest" in status.refused[2]
    assert penstock.CheckpointStore(URL).steps() == [1, 3]
    assert penstock.load(f"{URL}/step-0000000001")["step"] == 1
    # Saved anew, the step is copied.
    with pytest.warns(PenstockWarning, match="holds another checkpoint, which stays"):
        second.save(2, state_of(2), overwrite=True)
    assert second.wait_for_mirror(FOR_EVER_SECONDS)
    assert second.mirror_status().mirrored == (2, 3)


def test_what_was_refused_for_another_copy_is_copied_once_that_is_gone(bucket, stores):
    first, second = stores("first"), stores("second", keep_local=1)
    save(first, 1)
    assert first.wait_for_mirror(FOR_EVER_SECONDS)
    save(second, 1)
    assert second.wait_for_mirror(FOR_EVER_SECONDS)
    assert list(second.mirror_status().refused) == [1]
    penstock.CheckpointStore(URL).delete(1)
    with warnings.catch_warnings():
        # The next save warns of the refusal.
        warnings.simplefilter("ignore")
        save(second, 2)
    assert second.wait_for_mirror(FOR_EVER_SECONDS)
    status = second.mirror_status()
    assert (status.mirrored, status.refused) == ((1, 2), {})
    assert_is(second.load(1), 1)


def test_a_refusal_is_told_once(bucket, stores):
    first, second = stores("first"), stores("second")
    save(first, 1, 2)
    assert first.wait_for_mirror(FOR_EVER_SECONDS)
    save(penstock.CheckpointStore(second.root), 1, 2)
    assert second.wait_for_mirror(FOR_EVER_SECONDS)
    with pytest.warns(PenstockWarning, match="holds another checkpoint, which stays"):
        save(second, 3)
    assert second.wait_for_mirror(FOR_EVER_SECONDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(second, 4)
    assert second.wait_for_mirror(FOR_EVER_SECONDS)
    assert list(second.mirror_status().refused) == [1, 2]


class Denying:
    """A store that once fails to report the identity of its copies in a bucket."""

    def __init__(self, root):
        self._store = penstock._native.Store(root)

    def steps(self):
        return self._store.steps()

    def identity(self, step):
        is_there = self._store.step_path(step).startswith(URL)
        return None if is_there else self._store.identity(step)


def test_a_copy_that_cannot_be_read_this_once_is_not_called_another(bucket, stores, monkeypatch):
    store = stores()
    save(store, 1)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    monkeypatch.setattr(copy_step, "_native", SimpleNamespace(Store=Denying))
    copies = copy_step.compared(store.root, penstock.Mirror(URL))
    assert [(copy.here, copy.there) for copy in copies] == [("complete", "complete")]


def test_saves_go_on_while_the_bucket_cannot_be_reached(bucket, stores):
    penstock.set_remote(URL, penstock.Remote(patience_seconds=1))
    store = stores()
    bucket.stop()
    save(store, 1, 2)
    deadline = time.monotonic() + FOR_EVER_SECONDS
    while not store.mirror_status().failures and time.monotonic() < deadline:
        time.sleep(0.05)
    status = store.mirror_status()
    assert status.waiting == (1, 2)
    assert status.last_error
    assert not store.wait_for_mirror(0.1)
    with pytest.warns(PenstockWarning, match="are not at s3://bucket/run yet"):
        save(store, 3)
    bucket.start()
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    assert copies(bucket) == files_below(store.root)


def test_a_warning_that_is_an_error_keeps_no_step_from_the_mirror(tmp_path, bucket, capfd):
    def keep(step, metadata):
        raise RuntimeError("no answer")

    with (
        penstock.CheckpointStore(
            tmp_path / "store", keep_last=1, keep=keep, mirror=penstock.Mirror(URL, wait="commit")
        ) as store,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for step in (1, 2):
            assert store.save(step, state_of(step)).step == step
            assert copies(bucket) == files_below(store.root)
        store.save_async(3, state_of(3)).result()
        assert copies(bucket) == files_below(store.root)
    assert capfd.readouterr().err.count("keep() raised RuntimeError('no answer')") == 2


# Deletion of local steps.


def test_old_local_copies_go_when_theirs_are_complete(bucket, stores):
    store = stores(keep_local=2)
    plain = penstock.CheckpointStore(store.root)
    save(plain, 1, 2, 3, 4)
    plain.protect(1)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    # The last of them is deleted shortly after its successor is complete.
    deadline = time.monotonic() + FOR_EVER_SECONDS
    while store.steps() != [1, 3, 4] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert store.steps() == [1, 3, 4]
    assert penstock.CheckpointStore(URL).steps() == [1, 2, 3, 4]
    assert_is(store.load(2), 2)


def test_no_local_copy_goes_before_its_own_is_complete(bucket, stores):
    store = stores(keep_local=1)
    save(penstock.CheckpointStore(URL), 1)
    save(penstock.CheckpointStore(store.root), 1, 2, 3)
    flip(store, 2, 5000)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    # The bucket has another checkpoint as step 1, and no step 2.
    store.close()
    assert store.steps() == [1, 2, 3]


# The source of loads.


def test_another_machine_goes_on_from_the_mirror(bucket, stores):
    first = stores("first")
    save(first, 1, 2)
    assert first.wait_for_mirror(FOR_EVER_SECONDS)
    second = stores("second")
    assert (second.latest(), second.steps()) == (2, [])
    reports = []
    assert_is(second.load(report=reports.append), 2)
    assert reports[0].path == f"{URL}/step-0000000002"
    assert_is(second.load(1), 1)
    training = penstock.Training(values=state_of(0))
    save_training = penstock.Training(values=state_of(7))
    first.save(7, save_training)
    assert first.wait_for_mirror(FOR_EVER_SECONDS)
    assert second.resume(training) == 7
    # A newer local step comes first.
    save(second, 9)
    reports.clear()
    second.load(report=reports.append)
    assert reports[0].path == second.path(9)


def test_a_chunk_that_is_damaged_here_is_read_there(bucket, stores):
    store = stores()
    save(store, 1)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    flip(store, 1, (1 << 20) + 17)
    # The copy is damaged too, elsewhere.
    shard = next(name for name in bucket.names("run") if "shard" in name)
    data = bytearray((bucket.files / "run" / shard).read_bytes())
    data[9] ^= 1
    (bucket.files / "run" / shard).write_bytes(data)
    reports = []
    with pytest.warns(PenstockWarning, match="chunk is damaged and was read from s3://"):
        assert_is(store.load(report=reports.append), 1)
    assert [fallback.kind for fallback in reports[0].fallbacks].count("copy") == 1
    # The step is marked as damaged, so no good step is deleted for it.
    assert penstock.CheckpointStore(store.root).latest() is None
    shutil.rmtree(store.path(1))
    with pytest.raises(CorruptCheckpointError):
        store.load()


def test_the_other_way_round_too(bucket, stores):
    store = stores()
    save(store, 1)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    # The local manifest is missing, and a chunk of the copy is damaged.
    os.unlink(Path(store.path(1)) / "manifest.json")
    shard = next(name for name in bucket.names("run") if "shard" in name)
    data = bytearray((bucket.files / "run" / shard).read_bytes())
    data[9] ^= 1
    (bucket.files / "run" / shard).write_bytes(data)
    with pytest.warns(PenstockWarning, match="chunk is damaged"):
        assert_is(store.load(), 1)


def test_what_is_lost_here_is_loaded_from_there(bucket, stores):
    store = stores()
    save(store, 1)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    os.unlink(file_of(store, 1, "shard"))
    reports = []
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert_is(store.load(report=reports.append), 1)
    assert reports[0].path == f"{URL}/step-0000000001"


def test_a_mirror_that_cannot_be_asked_may_have_newer_steps(bucket, stores):
    penstock.set_remote(URL, penstock.Remote(patience_seconds=1))
    store, empty = stores(), stores("empty")
    save(store, 1)
    assert store.wait_for_mirror(FOR_EVER_SECONDS)
    store.close()
    bucket.stop()
    with pytest.raises(StorageError) as caught:
        store.load()
    assert "fallback=True" in caught.value.__notes__[0]
    with pytest.warns(PenstockWarning, match="the mirror cannot be asked"):
        assert_is(store.load(fallback=True), 1)
    assert store.latest() == 1
    # Not "no checkpoint": the caller would start a new run.
    asked = pytest.warns(PenstockWarning, match="the mirror cannot be asked")
    with asked, pytest.raises(StorageError):
        empty.resume(penstock.Training(values=state_of(0)))


# Processes.


def test_a_process_ends_while_the_bucket_is_silent(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = run_child(
            """
            import json, sys, time, numpy as np, penstock
            root, port = sys.argv[1:]
            remote = penstock.Remote(
                endpoint=f"http://127.0.0.1:{port}",
                region="us-east-1",
                credentials=penstock.Credentials(access_key_id="a", secret_access_key="b"),
                patience_seconds=3600,
            )
            penstock.set_remote("s3://bucket", remote)
            store = penstock.CheckpointStore(root, mirror=penstock.Mirror("s3://bucket/run"))
            store.save(1, {"w": np.ones(3)})
            while store.mirror_status().step is None:
                time.sleep(0.01)
            print(json.dumps(store.mirror_status().waiting))
            """,
            tmp_path / "store",
            silent.getsockname()[1],
            is_fresh=True,
            timeout_seconds=60,
        )
    assert ended == [1]


def test_a_copy_goes_on_after_a_kill(bucket, stores, tmp_path):
    penstock.save(tmp_path / "store/step-0000000001", bytes(60 << 20), step=1)
    child = textwrap.dedent(
        """
        import sys, penstock
        mirror = penstock.Mirror("s3://bucket/run", bytes_per_second=40 << 20, connections=2)
        store = penstock.CheckpointStore(sys.argv[1], mirror=mirror)
        store.wait_for_mirror(60)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", child, str(tmp_path / "store")])
    deadline = time.monotonic() + FOR_EVER_SECONDS
    # Some parts of an upload in progress are there.
    while time.monotonic() < deadline and not any(bucket.files.rglob(".sgwtmp/**/2")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "run/step-0000000001/manifest.json" not in bucket.names()
    report = penstock_mirror(tmp_path / "store")
    assert 0 < report["steps"][0]["sent_bytes"] < 50 << 20
    assert copies(bucket) == files_below(tmp_path / "store")


def penstock_mirror(root, *arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "mirror", root, URL, *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


# The command, metrics, arguments.


def test_the_command_copies_once_and_tells_what_is_where(bucket, tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    save(store, 1, 2, 3)
    listed = penstock_mirror(store.root, "--list")
    assert [step["there"] for step in listed["steps"]] == [None] * 3
    first = penstock_mirror(store.root, "--every", "3")
    assert [step["result"] for step in first["steps"]] == ["not here", "not here", "sent"]
    flip(store, 2, 5000)
    second = penstock_mirror(store.root, code=1)
    assert [step["result"] for step in second["steps"]] == ["sent", "failed", "there"]
    assert "digest" in second["steps"][1]["error"]
    store.delete(1)
    store.save(3, state_of(4), overwrite=True)
    states = [
        (step["here"], step["there"]) for step in penstock_mirror(store.root, "--list")["steps"]
    ]
    assert states == [(None, "complete"), ("complete", None), ("complete", "another")]


def test_the_command_copies_between_buckets(bucket):
    save(penstock.CheckpointStore("s3://bucket/from"), 1, 2)
    copied = penstock_mirror("s3://bucket/from")
    assert [step["result"] for step in copied["steps"]] == ["sent", "sent"]
    assert copies(bucket) == files_below(bucket.files / "from")


def test_copies_are_counted(bucket, stores):
    script = """
        import json, sys, numpy as np, penstock
        from prometheus_client import CollectorRegistry
        registry = CollectorRegistry()
        penstock.metrics.enable(registry)
        store = penstock.CheckpointStore(sys.argv[1], mirror=penstock.Mirror("s3://bucket/run"))
        store.save(1, {"w": np.ones(3000)})
        store.wait_for_mirror(60)
        names = ["mirrors_total", "mirrored_bytes_total", "last_mirror_timestamp_seconds"]
        labels = [{"result": "ok"}, {}, {}]
        print(json.dumps([
            registry.get_sample_value(f"penstock_{name}", label)
            for name, label in zip(names, labels)
        ]))
    """
    store = stores()
    copied, sent_bytes, at_seconds = run_child(script, store.root, is_fresh=True)
    assert copied == 1
    assert sent_bytes == sum(map(len, copies(bucket).values()))
    assert at_seconds > 0


def test_a_trace_shows_what_goes_on_beside(bucket, stores, tmp_path):
    store = stores()
    with penstock.trace(tmp_path / "trace.json"):
        store.save(1, {"w": np.zeros(20 << 20, np.uint8)})
        assert store.wait_for_mirror(FOR_EVER_SECONDS)
        store.close()
    trace = recorded.read(tmp_path / "trace.json")
    found = {(call.name, call.role) for call in summary.calls(trace)}
    assert found == {("save", "stall"), ("mirror", "background")}
    assert "send" in {span.name for span in trace.spans if span.row == "mirror"}


def test_wrong_arguments_are_refused(tmp_path):
    for arguments in (
        {"every": 0},
        {"keep_local": 0},
        {"bytes_per_second": 0},
        {"connections": 0},
        {"wait": "always"},
    ):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            penstock.Mirror(URL, **arguments)
    for place in (str(tmp_path), "http://host/run"):
        with pytest.raises(UnsupportedPathError):
            penstock.Mirror(place)
    assert penstock.Mirror("S3://bucket/run/").url == URL
    with pytest.raises(TypeError, match="must be a penstock"):
        penstock.CheckpointStore(tmp_path, mirror=URL)
    with pytest.raises(ValueError, match="in a bucket already"):
        penstock.CheckpointStore("s3://bucket/store", mirror=penstock.Mirror(URL))
    store = penstock.CheckpointStore(tmp_path)
    with pytest.raises(penstock.PenstockError, match="has no mirror"):
        store.mirror_status()
    with pytest.raises(penstock.PenstockError, match="has no mirror"):
        store.wait_for_mirror()
