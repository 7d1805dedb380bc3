"""Records of a store's saves, starts and ends."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import penstock
from penstock.planning.records import history

STATE = {"w": np.ones(1000)}


def kinds(root):
    return [entry["kind"] for entry in history.entries(str(root))]


def test_saves_starts_and_ends_are_recorded(tmp_path):
    with penstock.CheckpointStore(tmp_path) as store:
        store.save(1, STATE)
        store.save_async(2, STATE).result()
    start, first, second, end = history.entries(str(tmp_path))
    assert [one["kind"] for one in (start, first, second, end)] == ["start", "save", "save", "end"]
    assert (first["step"], first["ranks"]) == (1, 1)
    assert min(first["stall_seconds"], second["stall_seconds"]) > 0
    assert first["seconds"] >= first["stall_seconds"]
    assert set(first["phases"]) == {"flatten", "plan", "write", "sync", "commit"}
    assert "error" not in end
    files = (tmp_path / "step-0000000001").iterdir()
    assert first["bytes"] == sum(one.stat().st_size for one in files)
    with penstock.CheckpointStore(tmp_path) as store:
        assert store.load()["w"].shape == (1000,)
        store.save(3, STATE)
    start = [one for one in history.entries(str(tmp_path)) if one["kind"] == "start"][1]
    assert start["step"] == 2
    assert start["load_seconds"] > 0
    assert history.summarize(str(tmp_path)).failures == 0


def test_a_store_closed_as_planned_after_a_printed_error_has_not_failed(tmp_path, monkeypatch):
    """A notebook keeps the error of an earlier cell."""
    monkeypatch.setattr(sys, "last_exc", ValueError("earlier"), raising=False)
    monkeypatch.setattr(sys, "last_value", ValueError("earlier"), raising=False)
    with penstock.CheckpointStore(tmp_path) as store:
        store.save(1, STATE)
    end = list(history.entries(str(tmp_path)))[-1]
    assert (end["kind"], end.get("error")) == ("end", None)


def test_a_program_that_only_loads_is_no_run(tmp_path):
    with penstock.CheckpointStore(tmp_path) as store:
        store.save(1, STATE)
    before = kinds(tmp_path)
    with penstock.CheckpointStore(tmp_path) as store:
        store.load()
        store.steps()
    assert kinds(tmp_path) == before


def test_an_exception_that_ends_a_run_is_a_failure(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    # The first save is still running when the exception comes.
    store.save_async(1, STATE)
    store.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with penstock.CheckpointStore(tmp_path) as store:
        store.save(2, STATE)
    ends = [one.get("error") for one in history.entries(str(tmp_path)) if one["kind"] == "end"]
    assert ends == ["ZeroDivisionError", None]
    assert history.summarize(str(tmp_path)).failures == 1


@pytest.mark.parametrize(
    ("last", "ends", "failures"),
    [
        ("pass", 1, 0),
        ("raise SystemExit(3)", 1, 0),
        ("raise ValueError", 1, 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 0, 1),
        ("import os\nif os.fork() == 0:\n    raise SystemExit\nos.wait()", 1, 0),
        (
            "import os\nif os.fork() == 0:\n    store.close()\n    os._exit(0)\nos.wait()\n"
            "os.kill(os.getpid(), 9)",
            0,
            1,
        ),
    ],
)
def test_how_a_process_ends(tmp_path, last, ends, failures):
    program = (
        "import numpy, penstock, sys\n"
        f"store = penstock.CheckpointStore({str(tmp_path)!r})\n"
        f"store.save(len(store.steps()), {{'w': numpy.ones(3)}})\n{last}\n"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert kinds(tmp_path).count("end") == ends
    with penstock.CheckpointStore(tmp_path) as store:
        store.save(5, STATE)
    assert history.summarize(str(tmp_path)).failures == failures


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("last", "error", "failures"),
    [
        ("pass", None, 0),
        ("raise ValueError", "ValueError", 1),
        ("raise SystemExit(3)", None, 0),
        ("store.close()", None, 0),
    ],
)
def test_how_a_process_of_multiprocessing_ends(tmp_path, method, last, error, failures):
    """It runs the exit functions of multiprocessing, and none of `atexit` if it was forked."""
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, numpy, penstock\n"
        "def run():\n"
        f"    store = penstock.CheckpointStore({str(tmp_path / 'store')!r})\n"
        f"    store.save(1, {{'w': numpy.ones(3)}})\n"
        f"    {last}\n"
        "if __name__ == '__main__':\n"
        f"    child = multiprocessing.get_context({method!r}).Process(target=run)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    subprocess.run([sys.executable, program], capture_output=True, timeout=120)
    root = tmp_path / "store"
    ends = [one.get("error") for one in history.entries(str(root)) if one["kind"] == "end"]
    assert ends == [error]
    with penstock.CheckpointStore(root) as store:
        store.save(5, STATE)
    assert history.summarize(str(root)).failures == failures


def test_a_history_that_cannot_be_written_fails_no_save(tmp_path):
    (tmp_path / history.NAME).mkdir()
    with penstock.CheckpointStore(tmp_path) as store:
        store.save(1, STATE)
    assert store.steps() == [1]


def test_the_history_is_no_step_and_no_leftover(tmp_path):
    with penstock.CheckpointStore(tmp_path, keep_last=1) as store:
        for step in range(3):
            store.save(step, STATE)
    assert store.steps() == [2]
    assert store.sweep(dry_run=True) == []
    assert (tmp_path / history.NAME).exists()


def test_steps_measured_by_due_are_recorded(tmp_path):
    with penstock.CheckpointStore(tmp_path, save_every=5) as store:
        for step in range(1, 11):
            if store.due(step):
                store.save(step, STATE)
    last = [one for one in history.entries(str(tmp_path)) if one["kind"] == "save"][-1]
    assert last["step_seconds"] > 0
    json.dumps(last, allow_nan=False)


def test_saves_after_a_close_are_another_run(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    for step in range(4):
        store.save(step, STATE)
        store.close()
    assert kinds(tmp_path) == ["start", "save", "end"] * 4
    summary = history.summarize(str(tmp_path))
    starts = [one["time"] for one in history.entries(str(tmp_path)) if one["kind"] == "start"]
    assert starts == sorted(starts)
    assert (summary.starts, summary.failures) == (4, 0)


def test_lines_of_no_sense_fail_no_save(tmp_path):
    lines = '{"kind":"start","time":1' + "0" * 400 + "}\n" + "[" * 60_000
    (tmp_path / history.NAME).write_text(lines)
    with penstock.CheckpointStore(tmp_path, save_every="auto") as store:
        assert store.save(1, STATE).step == 1
        assert [step for step in range(2, 60) if store.due(step) and store.save(step, STATE)]
