"""`make gpu`: it runs on the driver for tests, says what it did not run, and refuses without."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import forks
from gpu import DRIVER, VARIABLE
from penstock_bench.suites.gpu.__main__ import GROUPS
from penstock_bench.suites.gpu.results import ROWS, SMOKE, Results, markdown

ROOT = Path(__file__).parents[3]

OF_CUDA = {
    "stall_dcp", "lazy_steps", "load_fastsafetensors", "load_safetensors", "load_instanttensor",
    "load_kvikio", "load_cufile", "conformance",
}  # fmt: skip
"""Rows that take PyTorch's CUDA, libraries that do, or a driver that is none for tests."""


def make_gpu(*arguments, driver, **fake):
    variables = {f"PENSTOCK_FAKE_{name.upper()}": str(value) for name, value in fake.items()}
    return forks.run(
        ["-m", "penstock_bench.suites.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, VARIABLE: str(driver), **variables},
    )


@pytest.mark.slow
def test_all_of_it_runs_and_every_row_has_a_value_or_a_reason(disk_path):
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    output = disk_path / "output"
    done = make_gpu(
        "--directory", disk_path / "work", "--output", output, "--rounds", 1, driver=DRIVER
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    found = json.loads((output / "gpu.json").read_text())
    assert found["gpu"]["is_stand_in"]
    rows = {one["row"]: one for one in found["rows"]}
    assert list(rows) == list(ROWS)
    not_run = {name for name, row in rows.items() if row["found"] is None}
    may_not = {"load_fio", "gather_disk"}
    assert not_run - may_not == OF_CUDA
    for name in not_run:
        assert rows[name]["not_run"]
    # Promises without a rate hold on any driver.
    for name in ("pinned_again", "graphs", "torn", "leaks"):
        assert rows[name]["is_met"], rows[name]
    table = (output / "gpu.md").read_text()
    assert SMOKE in table
    assert table in done.stdout
    for row in ROWS.values():
        assert f"| {row.title} | {row.bar} |" in table
    assert list((disk_path / "work").iterdir()) == []


@pytest.mark.slow
def test_a_run_continues_where_the_last_one_stopped(disk_path):
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    kept = disk_path / "kept"

    def run(groups, *more):
        options = ("--rounds", 1, "--directory", disk_path, "--resume", kept, *more)
        done = make_gpu("--only", groups, "--output", disk_path / groups, *options, driver=DRIVER)
        return done, json.loads(next(kept.glob("*.json")).read_text())

    first, found = run("link,graphs")
    assert first.returncode == 0, first.stderr
    assert {name: one["is_whole"] for name, one in found["groups"].items()} == {
        "link": True, "graphs": True,
    }  # fmt: skip
    before = found["figures"], found["groups"]["graphs"]
    # A group that was cut off is measured anew, a finished one is not.
    found["groups"]["link"]["is_whole"] = False
    next(kept.glob("*.json")).write_text(json.dumps(found))
    second, found = run("leaks,link,graphs")
    assert second.returncode == 0, second.stderr
    assert list(found["groups"]) == ["graphs", "leaks", "link"], "new ones first"
    assert found["values"].keys() == {"graphs", "leaks"}
    assert found["groups"]["graphs"] == before[1]
    assert found["figures"].keys() == before[0].keys()
    assert all(len(values) == 1 for values in found["figures"].values())
    found["settings"]["size_bytes"] += 1
    next(kept.glob("*.json")).write_text(json.dumps(found))
    refused, _ = run("link")
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    assert "name another directory" in refused.stderr


def test_without_a_gpu_it_is_refused_with_words(tmp_path):
    done = make_gpu("--directory", tmp_path, driver="/nowhere/libcuda.so")
    assert done.returncode == 2
    assert "there is no GPU to measure on: no CUDA driver /nowhere/libcuda.so" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_group_that_nobody_has_is_refused(tmp_path):
    done = make_gpu("--only", "links", driver="/nowhere/libcuda.so")
    assert done.returncode == 2
    assert "links: choose from link, pinning" in done.stderr


def test_every_row_is_answered_by_one_group():
    answered = [row for _, _, rows in GROUPS.values() for row in rows]
    assert sorted(answered) == sorted(ROWS)


def results():
    return Results(
        machine={"processor": "one", "cores_usable": 2, "kernel": "6.8"},
        gpu={"name": "H100", "cuda": "13.2", "torch": "2.15.0", "is_stand_in": False},
        places={},
        settings={"size_bytes": 10**10, "rounds": 3, "seconds": 700.0},
    )


def test_a_row_is_judged_by_its_median_and_a_missing_one_has_its_first_reason():
    made = results()
    for value in (0.9, 0.96, 0.97):
        made.add("staging", value)
    made.add("stall", 1.2)
    made.skip("load_kvikio", "kvikio is not installed")
    made.skip("load_kvikio", "the time was over")
    made.skip("staging", "the time was over")
    found = {row["row"]: row for row in made.as_json()}
    assert found["staging"]["is_met"] is True
    assert found["staging"]["not_run"] is None
    assert found["stall"]["is_met"] is False
    assert found["load_kvikio"]["not_run"] == "kvikio is not installed"
    assert found["gather_4k"]["not_run"] == "the run ended before"
    table = markdown(made)
    assert "| staging out of the GPU, of its link | >= 0.95 | 0.96 [0.9, 0.97] | met |" in table
    assert "| 1.2 | **missed** |" in table
    assert "not run: kvikio is not installed" in table
    with pytest.raises(KeyError):
        made.add("staging out", 1.0)
