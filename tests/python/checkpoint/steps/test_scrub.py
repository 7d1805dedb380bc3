"""Scrubbing a store, and falling back to the newest step that is good."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from compare import assert_same
from damaged import damage, file_of
from penstock.errors import CorruptCheckpointError, PenstockWarning, StateMismatchError


def state_of(step):
    return {"w": torch.full((5000,), float(step)), "b": torch.arange(70.0) + step, "step": step}


@pytest.fixture
def store(tmp_path):
    """Saves steps 10 to 50."""
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (10, 20, 30, 40, 50):
        store.save(step, state_of(step))
    return store


def states(report):
    return {step.step: step.state for step in report.steps}


# Scrubbing.


def test_a_scrub_tells_every_step(store):
    damage(store, 20)
    os.unlink(file_of(store, 30, "manifest"))
    os.unlink(file_of(store, 40, "shard"))
    report = store.scrub()
    assert states(report) == {
        10: "verified", 20: "damaged", 30: "skipped", 40: "damaged", 50: "verified",
    }  # fmt: skip
    assert not report.ok
    assert report.root == store.root
    assert report.steps[1].problems[0].tensor == "b"
    assert report.steps[3].reason
    assert report.bytes_checked == sum(step.bytes_checked for step in report.steps) > 0
    again = store.scrub()
    assert states(again)[20] == "damaged"
    assert again.bytes_checked == 0


def test_what_load_or_verify_read_back_is_not_read_again(store):
    store.load()
    store.verify(20)
    report = store.scrub()
    assert {step for step, state in states(report).items() if state == "skipped"} == {20, 50}
    assert report.ok
    assert set(states(store.scrub(max_age_seconds=0)).values()) == {"verified"}
    assert set(states(store.scrub(max_age_seconds=None)).values()) == {"skipped"}


def test_old_marks_are_looked_at_again(store):
    store.scrub()
    file = Path(store.root, "verified.json")
    marks = json.loads(file.read_text())
    for mark in marks:
        mark["at_seconds"] -= mark["step"] * 1000
    file.write_text(json.dumps(marks))
    report = store.scrub(max_age_seconds=25_000)
    verified = [step for step, state in states(report).items() if state == "verified"]
    assert verified == [30, 40, 50]


def test_a_replaced_step_is_read_again(store):
    store.scrub()
    store.save(30, state_of(31), overwrite=True)
    assert states(store.scrub())[30] == "verified"


def test_progress_goes_to_the_end(store):
    calls = []
    store.scrub(progress=lambda done, total: calls.append((done, total)))
    done, total = calls[-1]
    assert done == total > 5 * 20_000


def test_a_limited_scrub_takes_its_time(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    store.save(1, {"w": np.zeros(3 << 20, "uint8")})
    began = time.monotonic()
    assert store.scrub(bytes_per_second=6 << 20).ok
    assert time.monotonic() - began >= 0.5


def test_ctrl_c_stops_a_scrub_and_the_next_one_goes_on(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"w": np.zeros(2 << 20, "uint8")})
    script = textwrap.dedent("""
        import sys, penstock
        store = penstock.CheckpointStore(sys.argv[1])
        print("ready", flush=True)
        try:
            store.scrub(bytes_per_second=2 << 20)
        except KeyboardInterrupt:
            print("stopped")
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        while not os.path.exists(tmp_path / "verified.json"):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.communicate()[0] == "stopped\n"
    report = store.scrub()
    assert states(report)[3] == "skipped", "the newest was done"
    assert states(report)[1] == "verified"


@pytest.mark.parametrize(
    "arguments",
    [
        {"bytes_per_second": 0},
        {"bytes_per_second": -5},
        {"bytes_per_second": 1.5},
        {"max_age_seconds": -1},
        {"max_age_seconds": float("nan")},
        {"max_age_seconds": "7d"},
    ],
)
def test_arguments_that_make_no_sense_are_refused(store, arguments):
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        store.scrub(**arguments)


def test_an_empty_store_is_good(tmp_path):
    report = penstock.CheckpointStore(tmp_path / "none").scrub()
    assert (report.ok, report.steps) == (True, ())


# Falling back.


def test_fallback_loads_the_newest_good_step_and_says_what_it_passed_over(store):
    damage(store, 50)
    os.unlink(file_of(store, 40, "shard"))
    os.unlink(file_of(store, 30, "manifest"))
    reports = []
    with pytest.warns(PenstockWarning, match="passed over") as caught:
        state = store.load(fallback=True, report=reports.append)
    assert_same(state, state_of(20))
    assert [step for step, _ in reports[0].skipped] == [50, 40, 30]
    assert all(reason for _, reason in reports[0].skipped)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 3
    assert sum("step 30 was never finished" in message for message in messages) == 1
    assert {warning.filename for warning in caught} == {__file__}
    assert "step 50" in messages[0]
    assert reports[0].step == 20


def test_fallback_of_a_good_store_is_an_ordinary_load(store):
    reports = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(store.load(fallback=True, report=reports.append), state_of(50))
    assert reports[0].skipped == ()


def test_without_fallback_damage_is_an_error_that_names_it(store):
    damage(store, 50)
    with pytest.raises(CorruptCheckpointError, match="fallback=True"):
        store.load()


def test_fallback_fills_targets_whole(store):
    damage(store, 50)
    target = {"w": torch.zeros(5000), "b": torch.zeros(70), "step": 0}
    with pytest.warns(PenstockWarning):
        assert store.load(into=target, fallback=True) is target
    assert_same(target, state_of(40))


def test_fallback_asks_every_step_for_keys_that_come_once(store):
    damage(store, 50, "b")
    with pytest.warns(PenstockWarning, match="passed over"):
        state = store.load(keys=(key for key in ["b"]), fallback=True)
    assert_same(state, {"b": state_of(40)["b"]})


def test_fallback_with_keys_looks_at_those_only(store):
    damage(store, 50, "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # One MiB of a shard is one chunk: the damaged byte is known to be outside.
        state = store.load(keys="step", fallback=True)
    assert state == {"step": 50}
    with pytest.warns(PenstockWarning):
        assert_same(store.load(keys="b", fallback=True), {"b": state_of(40)["b"]})


def test_fallback_from_a_step_goes_down_only(store):
    damage(store, 30)
    with pytest.warns(PenstockWarning):
        assert store.load(30, fallback=True)["step"] == 20


def test_fallback_without_a_good_step_says_why(store):
    for step in store.steps():
        damage(store, step)
    with (
        pytest.warns(PenstockWarning),
        # A caller may start a new run on "not found", so it must not be that error.
        pytest.raises(CorruptCheckpointError, match=r"no step of .* is good") as error,
    ):
        store.load(fallback=True)
    assert "50" in str(error.value)
    assert "salvage" in str(error.value)


def test_fallback_from_a_step_that_is_not_there_says_so(store):
    reports = []
    with pytest.warns(PenstockWarning, match="45"):
        store.load(45, fallback=True, report=reports.append)
    assert reports[0].skipped == ((45, "there is no such step"),)


def test_a_directory_that_was_renamed_is_not_that_step(store):
    os.rename(store.path(50), store.path(60))
    with pytest.raises(CorruptCheckpointError, match="belongs to step 50"):
        store.load(60)
    result = store.verify(60)
    assert not result.ok
    assert "belongs to step 50" in result.problems[0].message


def test_a_mismatch_is_no_reason_to_go_back(store):
    with pytest.raises(StateMismatchError):
        store.load(into={"other": torch.zeros(1)}, fallback=True)


def test_what_a_load_found_damaged_is_remembered(store):
    damage(store, 50)
    with pytest.raises(CorruptCheckpointError):
        store.load()
    report = penstock.CheckpointStore(store.root, keep_last=1).retain(dry_run=True)
    assert report.kept == {40: "among the newest", 50: "damaged"}
