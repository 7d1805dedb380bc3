"""`penstock.metrics`: its counts, and its readers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
import warnings

import numpy as np
import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import penstock
from background import SLOWLY, held
from conftest import REPOSITORY, mounted, run_child
from damaged import damage, file_of
from penstock.checkpoint.saving.save import Save
from penstock.common import events
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PenstockWarning,
    RankError,
    SaveCancelledError,
    SaveInProgressError,
    StateMismatchError,
)
from penstock.reports import Fallback, SaveReport

MIB = 1 << 20


@pytest.fixture
def registry():
    """Yields the registry of Penstock's metrics alone, which count from now on."""
    made = prometheus_client.CollectorRegistry()
    penstock.metrics.enable(made)
    yield made
    events.observe(None)


@pytest.fixture
def counted(registry):
    """Returns a function for the growth of each sample since now, without unchanged ones."""

    def values():
        families = registry.collect()
        samples = [sample for family in families for sample in family.samples]
        kept = (s for s in samples if not s.name.endswith(("_created", "_bucket")))
        return {(s.name, *s.labels.values()): s.value for s in kept}

    before = values()
    return lambda: {key: v - before[key] for key, v in values().items() if v != before[key]}


def only(found, *beside):
    """Returns the samples without times, and without the named ones."""
    return {
        key: value
        for key, value in found.items()
        if not key[0].endswith(("_seconds", "_seconds_sum", "last_saved_step", *beside))
    }


def test_a_save_and_a_load_are_counted_with_what_their_reports_say(tmp_path, registry, counted):
    began = time.time()
    report = penstock.save(tmp_path / "ckpt", {"w": np.ones(MIB)}, step=17)
    reports = []
    penstock.load(tmp_path / "ckpt", report=reports.append)
    found = counted()
    assert only(found, "fallbacks_total") == {
        ("penstock_saves_total", "ok"): 1,
        ("penstock_written_bytes_total",): report.bytes,
        ("penstock_save_seconds_count",): 1,
        ("penstock_save_stall_seconds_count",): 1,
        ("penstock_loads_total", "ok"): 1,
        ("penstock_load_seconds_count",): 1,
        ("penstock_read_bytes_total", "load"): reports[0].bytes_read,
    }
    assert found["penstock_save_seconds_sum",] == pytest.approx(report.seconds)
    assert found["penstock_save_stall_seconds_sum",] >= report.seconds
    assert found["penstock_load_seconds_sum",] == pytest.approx(reports[0].seconds)
    saved_at = registry.get_sample_value("penstock_last_save_timestamp_seconds")
    assert began <= saved_at <= time.time()
    assert registry.get_sample_value("penstock_last_saved_step") == 17


def test_sealed_bytes_are_counted_where_they_are_sealed_and_opened(tmp_path, counted):
    key, state = "5e" * 32, {"w": np.ones(3 * MIB, np.uint8)}
    report = penstock.save(tmp_path / "ckpt", state, sealing=penstock.Sealing([key]))
    reports = []
    penstock.load(tmp_path / "ckpt", identities=[key], report=reports.append)
    found = counted()
    assert report.sealed_bytes == report.tensor_bytes >= 3 * MIB
    assert found["penstock_sealed_bytes_total",] == report.sealed_bytes
    assert found["penstock_opened_bytes_total",] == reports[0].opened_bytes
    assert 3 * MIB <= reports[0].opened_bytes <= report.sealed_bytes
    assert "/s, sealed" in str(report)
    assert "verified, opened" in str(reports[0])
    reports.clear()
    clear = penstock.save(tmp_path / "clear", state)
    penstock.load(tmp_path / "clear", report=reports.append)
    assert (clear.sealed_bytes, reports[0].opened_bytes) == (0, 0)


def test_a_save_into_a_store_is_one_save(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path)
    report = store.save(1, {"w": np.ones(3)})
    store.load()
    store.verify(1)
    found = counted()
    assert found["penstock_saves_total", "ok"] == 1
    assert found["penstock_written_bytes_total",] == report.bytes
    assert found["penstock_loads_total", "ok"] == 1
    assert found["penstock_checks_total", "ok"] == 1
    assert found["penstock_read_bytes_total", "verify"] > 0


def interrupt(done, total):
    raise KeyboardInterrupt


def leave(done, total):
    sys.exit(143)


def test_saves_that_come_to_nothing_are_told_apart(tmp_path, counted):
    penstock.save(tmp_path / "there", {})
    refused = [
        lambda: penstock.save(tmp_path / "there", {}),
        lambda: penstock.save(tmp_path / "new", {"f": print}),
        lambda: penstock.CheckpointStore(tmp_path).save_async(1, {"f": print}),
    ]
    for call in refused:
        with pytest.raises(penstock.PenstockError):
            call()
    # Large enough to outlast the first progress callback, after a twentieth of a second.
    large = {"w": np.ones(128 * MIB)}
    for give_up, error in ((interrupt, KeyboardInterrupt), (leave, SystemExit)):
        with pytest.raises(error):
            penstock.save(tmp_path / "new", large, options=SLOWLY, progress=give_up)
    assert only(counted(), "_count", "bytes_total", "fallbacks_total") == {
        ("penstock_saves_total", "ok"): 1,
        ("penstock_saves_total", "failed"): 3,
        ("penstock_saves_total", "cancelled"): 2,
    }


def test_saves_in_the_background_are_pending_until_they_end(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path / "store")
    with held(store, 1) as release:
        pending = store.save_async(1, {"w": np.ones(MIB)})
        while ("penstock_pending_saves",) not in counted():
            assert not pending.done()
        assert store.save_async(2, {}, if_busy="skip") is None
        with pytest.raises(SaveInProgressError):
            store.save_async(2, {}, if_busy="error")
        assert only(counted()) == {
            ("penstock_pending_saves",): 1,
            ("penstock_save_stall_seconds_count",): 1,
            ("penstock_saves_total", "skipped"): 2,
        }
        stalled = counted()["penstock_save_stall_seconds_sum",]
        assert stalled == pytest.approx(pending.stall_seconds)
        release()
    report = pending.result()
    found = counted()
    assert only(found, "fallbacks_total") == {
        ("penstock_save_stall_seconds_count",): 1,
        ("penstock_saves_total", "skipped"): 2,
        ("penstock_saves_total", "ok"): 1,
        ("penstock_save_seconds_count",): 1,
        ("penstock_written_bytes_total",): report.bytes,
    }


def test_a_save_in_the_background_that_fails_or_is_cancelled_is_counted_so(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path / "store")
    store.save(0, {})
    with open(store.path(1), "w"):
        pass
    assert store.save_async(1, {"w": np.ones(9)}).exception() is not None
    with held(store, 2) as release:
        pending = store.save_async(2, {"w": np.ones(MIB)})
        pending.cancel()
        release()
        assert isinstance(pending.exception(), SaveCancelledError)
    found = counted()
    assert found["penstock_saves_total", "failed"] == 1
    assert found["penstock_saves_total", "cancelled"] == 1
    assert ("penstock_pending_saves",) not in found


def test_a_ctrl_c_while_the_state_is_copied_is_one_cancelled_save(tmp_path, counted, monkeypatch):
    def stage(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(penstock.PendingSave, "stage", stage)
    store = penstock.CheckpointStore(tmp_path / "store")
    with held(store, 1), pytest.raises(KeyboardInterrupt):
        store.save_async(1, {"w": np.ones(MIB)})
    with contextlib.suppress(SaveCancelledError):
        store.wait()
    assert only(counted()) == {("penstock_saves_total", "cancelled"): 1}


def test_a_ctrl_c_while_the_thread_starts_is_one_cancelled_save(tmp_path, counted, monkeypatch):
    start = threading.Thread.start

    def interrupted(self):
        start(self)
        if self.name == "penstock-save":
            raise KeyboardInterrupt

    store = penstock.CheckpointStore(tmp_path / "store")
    with held(store, 1) as release:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.save_async(1, {"w": np.ones(MIB)})
        release()
    for thread in threading.enumerate():
        if thread.name == "penstock-save":
            thread.join()
    assert only(counted()) == {("penstock_saves_total", "cancelled"): 1}


def test_metrics_that_begin_during_a_save_do_not_count_its_end_as_pending(
    tmp_path, registry, counted, monkeypatch
):
    run = Save.run

    def enable_and_run(self):
        penstock.metrics.enable(registry)
        return run(self)

    monkeypatch.setattr(Save, "run", enable_and_run)
    events.observe(None)
    penstock.CheckpointStore(tmp_path).save_async(1, {"w": np.ones(3)}).result()
    found = counted()
    assert found["penstock_saves_total", "ok"] == 1
    assert ("penstock_pending_saves",) not in found


def test_loads_that_come_to_nothing_are_told_apart(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, {"w": np.ones(5000), "b": np.ones(5000)})
    damage(store, 2)
    with pytest.raises(CheckpointNotFoundError):
        penstock.load(tmp_path / "nowhere")
    with pytest.raises(CorruptCheckpointError):
        store.load(2)
    with pytest.raises(StateMismatchError):
        store.load(1, keys="nothing")
    with warnings.catch_warnings(action="ignore"):
        store.load(fallback=True)
    found = counted()
    loads = {key[1]: value for key, value in found.items() if key[0] == "penstock_loads_total"}
    assert loads == {"missing": 1, "damaged": 2, "failed": 1, "ok": 1}
    assert found["penstock_damage_found_total", "load"] == 2
    assert found["penstock_fallbacks_total", "step"] == 1


@pytest.mark.parametrize(
    "refused", [{"into": {}, "device": "cpu"}, {"keys": []}, {"keys": 5}, {"rank": -1}]
)
def test_a_load_that_is_refused_for_its_arguments_is_not_counted(tmp_path, counted, refused):
    penstock.save(tmp_path / "ckpt", {"w": np.ones(3)})
    before = counted()
    with pytest.raises((TypeError, ValueError)):
        penstock.load(tmp_path / "ckpt", **refused)
    assert counted() == before


def loads_in(found):
    names = ("penstock_loads_total", "penstock_damage_found_total", "penstock_fallbacks_total")
    # Excludes fallbacks that depend on the machine.
    counts = {key[1]: value for key, value in found.items() if key[0] in names}
    return {name: n for name, n in counts.items() if name not in ("engine", "buffered")}


@pytest.mark.parametrize("how", [{}, {"fallback": True}, {"step": 1}])
def test_a_load_from_an_empty_store_is_one_that_is_missing(tmp_path, counted, how):
    with pytest.raises(CheckpointNotFoundError):
        penstock.CheckpointStore(tmp_path).load(**how)
    assert loads_in(counted()) == {"missing": 1}


def test_steps_that_are_seen_to_be_damaged_before_they_are_read_are_counted(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (1, 2, 3):
        store.save(step, {"w": np.ones(9)})
    with open(file_of(store, 2, "manifest"), "w") as file:
        file.write("{")
    os.unlink(file_of(store, 3, "shard"))
    with warnings.catch_warnings(action="ignore"):
        store.load()
        assert loads_in(counted()) == {"ok": 1, "damaged": 2, "load": 2}
        store.load(fallback=True)
        assert loads_in(counted()) == {"ok": 2, "damaged": 4, "load": 4, "step": 2}
        os.unlink(file_of(store, 1, "shard"))
        # The other steps are quarantined.
        with pytest.raises(CorruptCheckpointError):
            store.load(fallback=True)
    assert loads_in(counted()) == {"ok": 2, "damaged": 5, "load": 5, "step": 2}


def test_a_load_of_a_step_in_the_place_of_another_is_damaged(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path)
    store.save(1, {"w": np.ones(9)})
    os.rename(store.path(1), store.path(2))
    with pytest.raises(CorruptCheckpointError):
        store.load(2)
    found = counted()
    assert found["penstock_loads_total", "damaged"] == 1
    assert found["penstock_damage_found_total", "load"] == 1


def test_checks_are_counted_with_what_they_found(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"w": np.ones(5000), "b": np.ones(5000)})
    damage(store, 2)
    os.unlink(file_of(store, 3, "manifest"))
    result = store.verify(2)
    assert not result.ok
    scrubbed = store.scrub(max_age_seconds=0)
    found = counted()
    assert found["penstock_checks_total", "damaged"] == 2
    assert found["penstock_checks_total", "ok"] == 1
    assert found["penstock_damage_found_total", "verify"] == len(result.problems) == 1
    assert found["penstock_damage_found_total", "scrub"] == 1
    assert found["penstock_read_bytes_total", "verify"] == result.bytes_checked
    assert found["penstock_read_bytes_total", "scrub"] == scrubbed.bytes_checked


def test_a_scrub_counts_every_step_that_it_calls_damaged(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        store.save(step, {"w": np.ones(5000), "b": np.ones(5000)})
    damage(store, 1)
    os.unlink(file_of(store, 2, "shard"))
    with open(file_of(store, 3, "manifest"), "w") as file:
        file.write("{")
    for times in (1, 2):
        # The second scrub reads nothing, and must still report the damage.
        assert [step.state for step in store.scrub().steps[:3]] == ["damaged"] * 3
        found = counted()
        assert found["penstock_checks_total", "damaged"] == 3 * times
        assert found["penstock_damage_found_total", "scrub"] == 3 * times
        assert found["penstock_checks_total", "ok"] == 1


def test_a_step_in_the_place_of_another_is_counted_as_damaged(tmp_path, counted):
    store = penstock.CheckpointStore(tmp_path)
    store.save(1, {"w": np.ones(9)})
    os.rename(store.path(1), store.path(2))
    result = store.verify(2)
    store.scrub()
    found = counted()
    assert not result.ok
    assert found["penstock_checks_total", "damaged"] == 2
    assert ("penstock_checks_total", "ok") not in found
    assert found["penstock_read_bytes_total", "verify"] == result.bytes_checked
    for call in ("verify", "scrub"):
        assert found["penstock_damage_found_total", call] == 1


@pytest.mark.parametrize(
    ("error", "result"),
    [(KeyboardInterrupt, "cancelled"), (SystemExit, "cancelled"), (OSError, "failed")],
)
def test_what_a_scrub_found_before_it_was_broken_off_is_counted(tmp_path, counted, error, result):
    store = penstock.CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"w": np.ones(4 * MIB)})
    damage(store, 3, "w")

    def stop(done, total):
        if len(store.marks()) == 2:
            raise error

    with pytest.raises(error):
        store.scrub(bytes_per_second=64 * MIB, progress=stop)
    found = {key: value for key, value in counted().items() if "_saves" not in key[0]}
    assert only(found, "_count", "bytes_total", "fallbacks_total") == {
        ("penstock_checks_total", "damaged"): 1,
        ("penstock_checks_total", "ok"): 1,
        ("penstock_checks_total", result): 1,
        ("penstock_damage_found_total", "scrub"): 1,
    }


def test_what_is_fallen_back_from_is_counted_by_kind(counted):
    report = SaveReport(
        path="p", step=None, checkpoint_id="i", bytes=1, tensor_bytes=1, seconds=1.0, phases={},
        tensors=1, files=1, engine="threads", engine_setup="", direct_io=False, choices=[],
        fallbacks=[
            Fallback("io_uring is forbidden here", "engine"),
            Fallback("tmpfs keeps files in the page cache", "buffered"),
        ],
        device=None, io_threads=1, queue_depth=1, extent_bytes=1, staging_peak_bytes=1,
    )  # fmt: skip
    events.report_end("save", report, 1.0)
    found = counted()
    assert found["penstock_fallbacks_total", "engine"] == 1
    assert found["penstock_fallbacks_total", "buffered"] == 1
    events.report_end("save", SaveReport(**{**fields(report), "fallbacks": []}), 1.0)
    assert counted()["penstock_fallbacks_total", "engine"] == 1


def test_what_was_asked_for_is_no_fallback(tmp_path, counted):
    """Nor is any other remark of a report, such as unreserved space or files left behind."""
    options = penstock.Options(direct="off", engine="threads")
    report = penstock.save(tmp_path / "ckpt", {"w": np.ones(4)}, options=options)
    assert report.fallbacks == []
    told = [Fallback("files of the old checkpoint stay", "leftover")]
    told += [Fallback("the file system cannot reserve space", "unreserved")]
    events.report_end("save", dataclasses.replace(report, fallbacks=told), 1.0)
    for kind in ("engine", "buffered", "step"):
        assert counted().get(("penstock_fallbacks_total", kind), 0) == 0


def test_a_fallback_is_its_reason_and_knows_its_kind(tmp_path):
    options = penstock.Options(direct="auto")
    with mounted("tmpfs", tmp_path / "memory", 64 << 20) as memory:
        report = penstock.save(memory / "ckpt", {"w": np.ones(4)}, options=options)
    kinds = {fallback.kind for fallback in report.fallbacks}
    assert kinds <= {"engine", "buffered"}
    assert ("buffered" in kinds) is not report.direct_io
    for same in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert same == report
        assert [one.kind for one in same.fallbacks] == [one.kind for one in report.fallbacks]


def fields(report):
    return {name: getattr(report, name) for name in report.__slots__}


def test_a_scrape_over_http_has_every_metric(tmp_path, registry):
    penstock.save(tmp_path / "ckpt", {"w": np.ones(3)})
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    kinds = {name: one.type for name, one in families.items() if not name.endswith("_created")}
    assert kinds == KINDS
    assert all(one.documentation for name, one in families.items() if name in KINDS)
    buckets = {s.labels.get("le") for s in families["penstock_save_seconds"].samples}
    assert {"0.1", "1.0", "60.0", "3600.0", "+Inf"} <= buckets
    results = {s.labels["result"] for s in families["penstock_saves"].samples if s.labels}
    # A rate needs the series from the start.
    assert results == {"ok", "failed", "cancelled", "skipped"}


KINDS = {
    "penstock_written_bytes": "counter",
    "penstock_read_bytes": "counter",
    "penstock_saves": "counter",
    "penstock_loads": "counter",
    "penstock_checks": "counter",
    "penstock_damage_found": "counter",
    "penstock_fallbacks": "counter",
    "penstock_save_seconds": "histogram",
    "penstock_load_seconds": "histogram",
    "penstock_save_stall_seconds": "histogram",
    "penstock_pending_saves": "gauge",
    "penstock_last_save_timestamp_seconds": "gauge",
    "penstock_last_saved_step": "gauge",
    "penstock_save_interval_steps": "gauge",
    "penstock_save_interval_seconds": "gauge",
    "penstock_save_interval_reason": "gauge",
    "penstock_save_cost_seconds": "gauge",
    "penstock_failure_interval_seconds": "gauge",
    "penstock_mirrors": "counter",
    "penstock_mirrored_bytes": "counter",
    "penstock_zero_copy_bytes": "counter",
    "penstock_sealed_bytes": "counter",
    "penstock_opened_bytes": "counter",
    "penstock_mirror_seconds": "histogram",
    "penstock_last_mirror_timestamp_seconds": "gauge",
}


def test_the_interval_between_saves_and_its_reason(tmp_path, registry):
    def reasons():
        names = ("given", "first", "best", "durable", "bound")
        sample = "penstock_save_interval_reason"
        return [name for name in names if registry.get_sample_value(sample, {"reason": name}) == 1]

    def value(name):
        return registry.get_sample_value(f"penstock_{name}")

    with penstock.CheckpointStore(tmp_path / "fixed", save_every=5) as store:
        assert [step for step in range(1, 6) if store.due(step) and store.save(step, {})] == [5]
    assert (value("save_interval_steps"), reasons()) == (5, ["given"])
    settings = {"save_every": "auto", "failures_per_hour": 1e-9}
    with penstock.CheckpointStore(tmp_path / "auto", **settings) as store:
        for step in range(1, 21):
            if store.due(step):
                store.save(step, {})
        assert (value("save_interval_steps"), reasons()) == (20, ["first"])
        assert value("save_cost_seconds") > 0
        for step in range(21, 100):
            if store.due(step):
                store.save(step, {})
    assert (value("failure_interval_seconds"), reasons()) == (3.6e12, ["bound"])
    assert value("save_interval_steps") > 20
    assert value("save_interval_seconds") > 0


def test_enabling_twice_counts_once(tmp_path, registry, counted):
    penstock.metrics.enable(registry)
    other = prometheus_client.CollectorRegistry()
    penstock.metrics.enable(other)
    penstock.save(tmp_path / "ckpt", {})
    assert counted()["penstock_saves_total", "ok"] == 1
    in_other = other.get_sample_value("penstock_saves_total", {"result": "ok"})
    assert in_other == registry.get_sample_value("penstock_saves_total", {"result": "ok"})


def test_a_text_file_has_our_metrics_and_no_others(tmp_path, registry):
    penstock.save(tmp_path / "ckpt", {}, step=5)
    path = tmp_path / "penstock.prom"
    for _ in range(2):
        penstock.metrics.write_textfile(path)
    families = {one.name: one for one in text_string_to_metric_families(path.read_text())}
    assert set(KINDS) <= set(families)
    assert all(name.startswith("penstock_") for name in families)
    assert families["penstock_last_saved_step"].samples[0].value == 5
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "penstock.prom"]


def test_an_observer_that_fails_fails_no_save(tmp_path, registry, monkeypatch):
    def ended(*_):
        raise OSError("no room for a sample")

    monkeypatch.setattr(penstock.metrics._Metrics, "ended", ended)
    with pytest.warns(PenstockWarning, match="not counted: OSError"):
        penstock.save(tmp_path / "ckpt", {"w": np.ones(3)})
    with pytest.warns(PenstockWarning, match="not counted: OSError"):
        assert penstock.verify(tmp_path / "ckpt").ok


# Processes.

MULTIPROCESS = """
    import sys
    import numpy as np, penstock

    penstock.metrics.enable()
    root, number = sys.argv[1], int(sys.argv[2])
    report = penstock.save(f"{root}/{number}", {"w": np.ones(1000 * (number + 1))}, step=number)
    store = penstock.CheckpointStore(f"{root}/store-{number}")
    store.save_async(1, {}).result()
    try:
        penstock.save(f"{root}/{number}", {})
    except penstock.errors.CheckpointExistsError:
        pass
    penstock.metrics.write_textfile(f"{root}/{number}.prom")
    print(report.bytes)
"""


def test_the_processes_of_a_machine_are_summed_up_in_multiprocess_mode(tmp_path):
    (tmp_path / "samples").mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "samples")}
    children = []
    for number in (0, 1):
        command = [sys.executable, "-c", textwrap.dedent(MULTIPROCESS), str(tmp_path), str(number)]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        children.append(child)
    written = [int(child.communicate(timeout=100)[0]) for child in children]
    assert [child.returncode for child in children] == [0, 0]
    command = [sys.executable, "-c", textwrap.dedent(SCRAPE), str(tmp_path / "all.prom")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert found["saves"] == {"ok": 4, "failed": 2, "cancelled": 0, "skipped": 0}
    assert found["written"] > sum(written)
    assert found["count"] == 4
    assert found["step"] == 1
    assert found["pending"] == 0
    text = (tmp_path / "all.prom").read_text()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert set(families) == set(KINDS)
    saves = {s.labels["result"]: s.value for s in families["penstock_saves"].samples}
    assert saves == found["saves"]


SCRAPE = """
    import json, sys
    from prometheus_client import CollectorRegistry, multiprocess
    import penstock

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    samples = [s for family in registry.collect() for s in family.samples]
    values = {s.name: s.value for s in samples}
    penstock.metrics.enable()
    penstock.metrics.write_textfile(sys.argv[1])
    print(json.dumps({
        "saves": {s.labels["result"]: s.value for s in samples if s.name == "penstock_saves_total"},
        "written": values["penstock_written_bytes_total"],
        "count": values["penstock_save_seconds_count"],
        "step": values["penstock_last_saved_step"],
        "pending": values["penstock_pending_saves"],
    }))
"""


def test_without_the_client_library_everything_but_metrics_works(tmp_path):
    said = run_child(
        """
        import json, sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "prometheus_client":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Blocker())
        import penstock
        penstock.save(sys.argv[1], {"x": 1})
        said = []
        for call in (penstock.metrics.enable, lambda: penstock.metrics.write_textfile("a.prom")):
            try:
                call()
            except penstock.PenstockError as error:
                said.append(f"{type(error).__name__}: {error}")
        print(json.dumps([penstock.load(sys.argv[1]), said]))
        """,
        tmp_path / "ckpt",
    )
    assert said[0] == {"x": 1}
    assert said[1][0].startswith("MissingDependencyError: metrics take")
    assert "pip install 'penstock[metrics]'" in said[1][0]
    assert said[1][1].startswith("PenstockError: there are no metrics yet: call penstock.metrics")


def test_importing_the_package_does_not_import_the_client_library():
    assert run_child(
        """
        import json, sys
        import penstock
        print(json.dumps("prometheus_client" not in sys.modules))
        """
    )


# Ranks.


def of_rank(root, call):
    registry = prometheus_client.CollectorRegistry()
    penstock.metrics.enable(registry)
    names = ("penstock_saves_total", "penstock_save_seconds_count", "penstock_written_bytes_total")

    def values():
        found = {}
        for family in registry.collect():
            for s in family.samples:
                if s.name in names or s.name == "penstock_save_stall_seconds_count":
                    found[" ".join([s.name, *s.labels.values()])] = s.value
        return found

    before = values()
    try:
        written = call(root)
    finally:
        events.observe(None)
    grown = {key: value - before[key] for key, value in values().items() if value != before[key]}
    return grown, written


def save_together(root):
    return penstock.save(root / "ckpt", {"w": torch.ones(5000)}).bytes


def save_async_together(root):
    return penstock.CheckpointStore(root).save_async(1, {"w": torch.ones(5000)}).result().bytes


def fail_together(root):
    is_good = bool(torch.distributed.get_rank())
    state = {"w": torch.ones(5000)} if is_good else {"f": print}
    with pytest.raises(RankError if is_good else TypeError):
        penstock.save(root / "ckpt", state)
    return 0


@pytest.mark.parametrize("call", [save_together, save_async_together, fail_together])
def test_each_rank_counts_its_part_of_a_save_once(jobs, disk_path, call):
    for grown, written in jobs.of(2).call(of_rank, disk_path, call):
        if not written:
            assert grown == {"penstock_saves_total failed": 1}
            continue
        assert grown == {
            "penstock_saves_total ok": 1,
            "penstock_save_seconds_count": 1,
            "penstock_save_stall_seconds_count": 1,
            "penstock_written_bytes_total": written,
        }


# Documentation.

DOCS = REPOSITORY / "docs"


def test_the_documentation_names_what_there_is_and_nothing_else():
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("", "_sum", "_bucket")}
    there = {name + end for name, kind in KINDS.items() for end in suffixes[kind]}
    alerts = (DOCS / "metrics" / "alerts.yml").read_text()
    page = (DOCS / "metrics.md").read_text()
    assert set(re.findall(r"penstock_\w+", alerts + page)) <= there
    listed = set(re.findall(r"^\| `(penstock_\w+)`", page, re.MULTILINE))
    assert listed == {name + suffixes[kind][0] for name, kind in KINDS.items()}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_takes_the_metrics_and_the_alerts(tmp_path, registry):
    alerts = DOCS / "metrics" / "alerts_test.yml"
    subprocess.run(["promtool", "test", "rules", alerts], check=True)
    path = tmp_path / "penstock.prom"
    penstock.metrics.write_textfile(path)
    # promtool's linter rejects the client's own `_created` samples.
    lines = (line for line in path.read_text().splitlines() if "_created" not in line)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input="\n".join([*lines, ""]), text=True, check=False
    )
    assert checked.returncode == 0
