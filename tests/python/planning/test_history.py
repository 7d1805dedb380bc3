"""The history of a store: torn lines, bounds, and what a plan reads from it."""

from __future__ import annotations

import json
import os

import pytest

from penstock.planning.records import history


def write(root, *rows):
    with open(os.path.join(root, history.NAME), "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_no_history_is_empty(tmp_path):
    assert list(history.entries(str(tmp_path))) == []
    assert history.summarize(str(tmp_path)).starts == 0


def test_what_is_appended_is_read(tmp_path):
    history.append(str(tmp_path), {"kind": "save", "step": 1})
    history.append(str(tmp_path), {"kind": "save", "step": 2})
    assert [entry["step"] for entry in history.entries(str(tmp_path))] == [1, 2]


def test_a_torn_line_loses_only_itself(tmp_path):
    path = tmp_path / history.NAME
    history.append(str(tmp_path), {"kind": "save", "step": 1})
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        history.append(str(tmp_path), {"kind": "save", "step": 3})
        steps = [entry["step"] for entry in history.entries(str(tmp_path))]
        # A line that lacks its line feed alone is whole.
        assert steps in ([1, 3], [1, 1, 3])
        assert steps == [1, 3] or cut == len(whole) - 1


@pytest.mark.parametrize(
    "line",
    [
        b"\0" * 100,
        b"[1]",
        b'{"kind": 3}',
        b'{"time": "x", "kind": "start"}',
        b'{"kind":"start","time":1%s}' % (b"0" * 400),
        b"[" * 60_000,
        b'{"kind":"start","time":1e999}',
        b"\xff\xfe",
        b"{}",
    ],
)
def test_lines_of_no_sense_are_passed_over(tmp_path, line):
    path = tmp_path / history.NAME
    path.write_bytes(line + b"\n")
    history.append(str(tmp_path), {"kind": "save", "seconds": 4.0})
    assert history.summarize(str(tmp_path)).durable.value == 4.0


def test_a_duration_that_no_clock_measures_is_passed_over(tmp_path):
    write(tmp_path, {"kind": "save", "stall_seconds": 0, "step_seconds": 1e-310})
    summary = history.summarize(str(tmp_path))
    assert summary.stall is not None
    assert summary.step is None


def test_a_line_without_end_is_read_in_pieces(tmp_path):
    (tmp_path / history.NAME).write_bytes(b"x" * (3 * history.LINE_BYTES_MAX))
    history.append(str(tmp_path), {"kind": "save", "seconds": 4.0})
    assert history.summarize(str(tmp_path)).durable.value == 4.0


def test_the_file_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "BYTES_MAX", 2000)
    for step in range(500):
        history.append(str(tmp_path), {"kind": "save", "step": step})
        assert (tmp_path / history.NAME).stat().st_size <= 2100
    steps = [entry["step"] for entry in history.entries(str(tmp_path))]
    assert steps == list(range(steps[0], 500))
    assert len(steps) > 10


BEGIN = 1_700_000_000
"""A time at which clocks are set."""


def test_failures_are_runs_without_a_planned_end(tmp_path):
    at = BEGIN
    first = {"seconds": 4.0, "stall_seconds": 1.0, "ranks": 12}
    second = {"seconds": 6.0, "stall_seconds": 2.0, "ranks": 16}
    write(
        tmp_path,
        {"time": at, "kind": "start", "run": "a"},
        {"time": at + 100, "kind": "save", "run": "a", **first},
        {"time": at + 200, "kind": "start", "run": "b", "load_seconds": 3.0},
        {"time": at + 300, "kind": "save", "run": "b", **second},
        {"time": at + 310, "kind": "end", "run": "b"},
        {"time": at + 900, "kind": "start", "run": "c", "load_seconds": 5.0},
        {"time": at + 950, "kind": "end", "run": "c", "error": "ValueError"},
        {"time": at + 960, "kind": "start", "run": "d"},
    )
    summary = history.summarize(str(tmp_path))
    assert (summary.starts, summary.failures, summary.ranks) == (4, 2, 16)
    assert summary.exposure_seconds == 100 + 110 + 50
    assert (summary.durable.value, summary.durable.bounds) == (5.0, (4.0, 6.0))
    assert summary.restart.value == 4.0
    assert summary.stall.source.endswith(history.NAME)


def test_two_runs_at_the_same_time_are_no_failures(tmp_path):
    write(
        tmp_path,
        {"time": BEGIN, "kind": "start", "run": "a"},
        {"time": BEGIN + 10, "kind": "start", "run": "b"},
        {"time": BEGIN + 20, "kind": "end", "run": "b"},
        {"time": BEGIN + 30, "kind": "save", "run": "a", "seconds": 1.0},
    )
    assert history.summarize(str(tmp_path)).failures == 0


def test_the_loss_of_speed_beside_a_save(tmp_path):
    write(
        tmp_path,
        {"kind": "save", "step_seconds": 1.0, "step_seconds_during": 1.25},
        {"kind": "save", "step_seconds": 1, "step_seconds_during": 0.9},
    )
    assert history.summarize(str(tmp_path)).slowdown.bounds == (0.0, pytest.approx(0.2))


def test_steps_that_nobody_measured_are_known_from_save_to_save(tmp_path):
    def save(at, step, **more):
        return {"time": BEGIN + at, "kind": "save", "run": "a", "step": step, **more}

    rows = [
        {"time": BEGIN, "kind": "start", "run": "a"},
        save(10, 100),
        save(70, 200, stall_seconds=10.0),
        save(101, 300, stall_seconds=1.0),
        # After a return to an older step, and from a run of another name.
        save(110, 250),
        {**save(500, 300), "run": "b"},
    ]
    write(tmp_path, *rows)
    step = history.summarize(str(tmp_path)).step
    assert step.bounds == (pytest.approx(0.3), pytest.approx(0.5))
    assert step.source.endswith("from save to save")
    write(tmp_path, *rows, save(120, 260, step_seconds=0.7))
    assert history.summarize(str(tmp_path)).step.value == 0.7


@pytest.mark.parametrize("times", [(BEGIN + 100, BEGIN + 50), (5, BEGIN), (BEGIN, 10 * BEGIN)])
def test_a_clock_that_jumps_gives_no_time(tmp_path, times):
    first, last = times
    write(
        tmp_path,
        {"time": first, "kind": "start", "run": "a"},
        {"time": last, "kind": "save", "run": "a", "seconds": 1.0},
    )
    assert history.summarize(str(tmp_path)).exposure_seconds == 0


def test_the_start_of_a_long_run_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "BYTES_MAX", 2000)
    history.append(str(tmp_path), {"kind": "start", "run": "a"})
    for step in range(500):
        history.append(str(tmp_path), {"kind": "save", "run": "a", "step": step, "seconds": 1.0})
    assert history.summarize(str(tmp_path)).starts == 1
