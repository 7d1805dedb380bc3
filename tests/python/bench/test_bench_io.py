"""`penstock bench io`: what it measures, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

from conftest import run_command
from penstock.cli import cli
from penstock.integrations.deepspeed import environment
from penstock_bench.harness import cases, fio
from penstock_bench.harness.cases import Case
from penstock_bench.harness.running import BenchError, percentiles, run
from penstock_bench.results.results import Results, ResultsError
from penstock_bench.suites.io import movers

MIB = 1 << 20


def bench_io(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "penstock", "bench", "io", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def measured(directory, *arguments, **options):
    done = bench_io(directory, "--json", *arguments, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_preset_that_is_meant_by_none_measures_everything_it_names(disk_path):
    found = measured(disk_path, "--size", "8M", "--rounds", 2, "--seconds", 0.1)
    assert [one["error"] for one in found["measurements"]] == [None] * 12
    assert {one["case"] for one in found["measurements"]} == set(found["cases"])
    assert len(found["cases"]) == 6
    assert os.listdir(disk_path) == []


@pytest.mark.parametrize("columns", [80, 140])
def test_a_wide_terminal_has_more_columns_and_none_breaks_its_lines(disk_path, columns):
    done = bench_io(
        disk_path, "--pattern", "write,read", "--size", "4M", "--rounds", 1,
        env={**os.environ, "COLUMNS": str(columns)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("fastest write: ")
    lines = lines[1 + lines.index("") :]
    assert ("no fsync" in lines[0]) == ("file calls" in lines[0]) == (columns > 100)
    if columns > 100:
        write, read = (line.split() for line in lines[2:])
        # Made, allocated and synced; opened.
        assert (write[-1], read[-1]) == ("3", "1")
        assert len(write) == len(read) + 1


@pytest.mark.parametrize("layout", ["file_per_tensor", "file_per_process", "shared_file"])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("aggregated", [False, True])
def test_every_layout_is_read_back_as_it_was_written(disk_path, layout, direct, aggregated):
    size = 48 * MIB
    for pattern in ("write", "read"):
        case = Case(
            pattern=pattern, layout=layout, direct=direct, aggregated=aggregated,
            block_bytes=4 * MIB, depth=4, processes=2, tensors=True,
        )  # fmt: skip
        made = run(case, disk_path / "work", size, seed=1, verifies=True, round_index=0)
        assert made.is_direct == direct
        tensors = sum(cases.tensor_sizes(cases.share_bytes(case, size))) * 2
        # Padding comes on top.
        assert tensors <= made.nbytes <= 1.1 * tensors
        files = {"file_per_tensor": 2 * len(cases.tensor_sizes(size // 2)), "file_per_process": 2}
        if pattern == "write":
            assert made.metadata["create"] == files.get(layout, 1)
            assert made.metadata["sync"] == files.get(layout, 2)
        else:
            assert made.checked == made.requests
    assert list(disk_path.iterdir()) == []


def test_every_method_makes_the_same_requests(disk_path):
    counts = set()
    for method in ("posix", "uring", "uring_registered", "executor"):
        case = Case(method=method, depth=1 if method == "posix" else 8)
        made = run(case, disk_path / "work", 16 * MIB, seed=1, verifies=False, round_index=0)
        counts.add((made.nbytes, made.requests))
        assert set(made.latency_us) == {"mean", "p50", "p90", "p99", "p99.9", "p99.99", "max"}
        assert sum(made.timeline_bytes) == made.nbytes
        assert made.seconds > 0
        assert made.sync_seconds > 0
        assert not made.notes
    assert counts == {(16 * MIB, 16)}


def test_percentiles_are_those_of_all_requests_together():
    generator = np.random.default_rng(0)
    values = generator.integers(100, 10**7, 5000)
    pairs = np.stack([values, np.ones_like(values)], axis=1)
    found = percentiles(pairs)
    ordered = np.sort(values)
    assert found["p50"] == ordered[2499] / 1000
    assert found["p99"] == ordered[4949] / 1000
    assert found["max"] == ordered[-1] / 1000
    assert found["mean"] == pytest.approx(values.mean() / 1000)
    assert percentiles(np.zeros((0, 2), np.int64)) == {}


def test_a_size_there_is_no_room_for_is_refused_with_the_numbers(disk_path):
    done = bench_io(disk_path, "--size", "900T")
    assert done.returncode == 2
    assert "GB free" in done.stderr
    assert "989560.46" in done.stderr.replace("\n", " ")
    assert list(disk_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "fast"], "ds_io: the grid"),
        (["--block", "12X"], "is no size"),
        (["--block", "100", "--direct", "on"], "multiple of 4096"),
        (["--pattern", "append"], "random_read"),
        (["--depth", "0"], "4096"),
        (["--size", "0"], "'0' is no size: from 1 byte"),
        (["--size", "9e30T"], "no size: from 1 byte to 8 EiB"),
        (["--size", "nan"], "'nan' is no size"),
        (["--seconds", "nan"], "'nan' is no number"),
        (["--seconds", "inf"], "'inf' is no number"),
        (["--block", "4G", "--size", "8G"], "4294967296 bytes is too large"),
        (["--output", "a.json", "--report", "a.json"], "a.json would be written twice"),
        (["--tune", "a.json", "--output", "./a.json"], "a.json would be written twice"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--seed", str(2**63)], "is not in the range"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(disk_path, arguments, message):
    done = run_command("bench", "io", disk_path, *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert list(disk_path.iterdir()) == []


def test_a_case_takes_a_block_for_each_thread_however_small_its_size(disk_path):
    few = ["--pattern", "write", "--size", "1M"]
    done = bench_io(disk_path, *few, "--block", "1G", "--threads", "1024", "--processes", "1024")
    assert done.returncode == 2
    assert "1G x 16, 1024 threads" in (said := " ".join(done.stderr.split()))
    assert f"takes {1.05 * 2**50 / 1e9:.2f}" in said
    assert list(disk_path.iterdir()) == []


def test_requests_in_flight_that_memory_has_no_room_for_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock_bench.workloads.scaling.memory_bytes", lambda: 10**9)
    arguments = [str(tmp_path), "--pattern", "write", "--size", "2G", "--block", "512M"]
    done = CliRunner().invoke(cli, ["bench", "io", *arguments])
    assert done.exit_code == 2
    assert "1.00 GB of memory are free and the requests in flight" in " ".join(done.output.split())
    assert "take 2.15" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("case", "size", "expected"),
    [
        (Case(depth=4), 64 * MIB, 4 * MIB),
        (Case(depth=100), 64 * MIB, 64 * MIB),
        # A case with a time fills the whole queue, and posix reads files that a queue has written.
        (Case(depth=100, seconds=1.0), 64 * MIB, 100 * MIB),
        (Case(pattern="read", method="posix", depth=1), 64 * MIB, 8 * MIB),
        (Case(method="posix", depth=1), 64 * MIB, MIB),
        (Case(depth=2, threads=3, processes=2), 64 * MIB, 12 * MIB),
    ],
)
def test_memory_of_requests_in_flight_is_counted(case, size, expected):
    assert cases.buffer_bytes(case, size) == expected


def test_of_tensors_each_process_has_a_whole_one(disk_path):
    case = Case(tensors=True, processes=4, block_bytes=MIB)
    made = run(case, disk_path / "work", 8 * MIB, seed=1, verifies=False, round_index=0)
    assert cases.total_bytes(case, 8 * MIB) >= made.nbytes * 0.99 > 8 * MIB


def test_a_directory_that_is_none_is_refused(tmp_path):
    assert run_command("bench", "io", tmp_path / "nowhere").returncode == 2


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_when_it_is_ended_nothing_is_left(disk_path, ending):
    command = [sys.executable, "-m", "penstock", "bench", "io", str(disk_path)]
    command += ["--pattern", "random_read", "--seconds", "600", "--size", "16M"]
    with subprocess.Popen(command, start_new_session=True) as child:
        deadline = time.monotonic() + 240
        while not list(disk_path.glob(".penstock-bench-*/*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(child.pid, ending)
        assert child.wait(240) == 130
    assert list(disk_path.iterdir()) == []


def test_a_process_that_fails_says_why(disk_path):
    with pytest.raises(BenchError, match="block_bytes"):
        run(Case(block_bytes=1000), disk_path / "work", MIB, seed=1, verifies=False, round_index=0)
    assert list(disk_path.iterdir()) == []


def test_without_fio_the_rest_is_measured(disk_path):
    done = bench_io(
        disk_path, "--pattern", "write", "--size", "1M", "--rounds", 1, "--vs", "fio",
        env={**os.environ, "PATH": "/nowhere"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "apt-get install fio" in " ".join(done.stderr.split())
    assert "write, uring" in done.stdout


@pytest.mark.skipif(not fio.is_there(), reason=fio.MISSING)
def test_fio_does_the_same(disk_path):
    arguments = ["--pattern", "write,read,random_read", "--size", "16M", "--rounds", 1]
    found = measured(disk_path, *arguments, "--vs", "fio")
    for case in found["cases"]:
        ours, theirs = [one for one in found["measurements"] if one["case"] == case]
        assert {ours["by"], theirs["by"]} == {"penstock", "fio"}
        assert ours["error"] is None
        assert theirs["error"] is None
        assert (ours["nbytes"], ours["requests"]) == (theirs["nbytes"], theirs["requests"])
    assert list(disk_path.iterdir()) == []


@pytest.mark.slow
def test_who_moves_whole_tensors_moves_as_many_bytes(disk_path):
    """DeepSpeed's op is compiled at its first use: measured here by ours in its place."""
    arguments = ["--pattern", "write,read,random_read", "--size", "16M", "--rounds", 1]
    found = measured(
        disk_path, *arguments, "--vs", "tensor_io,deepspeed",
        env={**environment(os.environ), "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    for case, settings in found["cases"].items():
        ours, *others = [one for one in found["measurements"] if one["case"] == case]
        assert {one["by"] for one in others} == {"tensor_io", "deepspeed"}
        for one in others:
            if settings["pattern"] == "random_read":
                assert "in order" in one["error"]
            else:
                assert one["error"] is None
                assert (one["nbytes"], one["requests"]) == (ours["nbytes"], ours["requests"])
                assert one["seconds"] > 0
    assert list(disk_path.iterdir()) == []


def test_a_library_says_why_it_moves_nothing(disk_path):
    refused = [
        (Case(direct=False), "deepspeed", "page cache"),
        (Case(processes=2), "tensor_io", "one process"),
        (Case(block_bytes=4096, depth=5000), "tensor_io", "queue_depth"),
    ]
    for case, library, why in refused:
        made = movers.run(case, library, disk_path / "work", MIB, round_index=0)
        assert why in made.error
    assert list(disk_path.iterdir()) == []


def test_results_come_back_from_their_file(disk_path, tmp_path):
    path = tmp_path / "a.json"
    found = measured(disk_path, "--pattern", "write", "--size", "1M", "--output", path)
    assert Results.read(path).as_json() == found
    path.write_text('{"format": "penstock-bench", "version": 2}')
    with pytest.raises(ResultsError, match=r"a\.json holds no results"):
        Results.read(path)


def test_presets_have_cases_apart():
    for name in cases.PRESETS:
        made = cases.preset(name)
        assert len({case.label for case in made}) == len(made) > 1
    assert len(cases.preset("gdsio")) == 35
    assert len(cases.preset("ds_io")) == 32
