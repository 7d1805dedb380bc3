"""`penstock bench io --to gpu` on the driver for tests: what moves, which way, what is refused."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gpu import DRIVER, VARIABLE
from penstock.cli import cli
from penstock_bench.harness import cases
from penstock_bench.harness.cases import Case
from penstock_bench.suites.io import cufile_stats, movers
from penstock_bench.suites.io.cufile_stats import CufileStats

MIB = 1 << 20


@pytest.fixture
def need_driver():
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")


def bench_io(*arguments, columns=80, driver=str(DRIVER), **fake):
    variables = {f"PENSTOCK_FAKE_{name.upper()}": str(value) for name, value in fake.items()}
    variables.setdefault("PENSTOCK_CUFILE", os.environ.get("PENSTOCK_CUFILE", driver))
    return subprocess.run(
        [sys.executable, "-m", "penstock", "bench", "io", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, VARIABLE: driver, "COLUMNS": str(columns), **variables},
    )


def measured(*arguments, **options):
    done = bench_io(*arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_read_is_what_the_gpu_got_by_every_way(disk_path, need_driver):
    found = measured(
        disk_path, "--to", "gpu", "--pattern", "write,read,random_read",
        "--method", "posix,threads,uring", "--direct", "on,off", "--block", "128K",
        "--depth", 4, "--threads", 2, "--size", "4M", "--rounds", 1, "--verify",
        "--seconds", 0.1, delay_us=200,
    )  # fmt: skip
    assert len(found["measurements"]) == 18
    for one in found["measurements"]:
        case = found["cases"][one["case"]]
        assert one["error"] is None
        assert one["nbytes"] > 0
        assert one["case"].endswith("from cuda:0" if case["pattern"] == "write" else "to cuda:0")
        assert not one["notes"]
        if case["pattern"] != "write":
            assert one["checked"] == one["requests"]
        expected = {True: {"posix": "CPU_GPU"}.get(case["method"], "CPU_ASYNC_GPU")}
        assert one["path"] == expected.get(one["is_direct"], "CPU_CACHED_GPU")
    assert os.listdir(disk_path) == []


def test_a_gpu_that_gets_garbage_is_not_used(disk_path, need_driver):
    done = bench_io(
        disk_path, "--to", "gpu", "--pattern", "read", "--size", "2M", "--rounds", 1, garbles=1
    )
    assert done.returncode == 1
    assert "what is copied to it does not come back" in " ".join(done.stdout.split())


def test_memory_that_is_not_pinned_is_told_of(disk_path, need_driver):
    found = measured(
        disk_path, "--to", "gpu", "--pattern", "read", "--size", "2M", "--rounds", 1,
        pinning_permitted=0,
    )  # fmt: skip
    (one,) = found["measurements"]
    assert one["notes"][0].startswith("unpinned: cuMemHostRegister")


def test_the_way_of_each_byte_stands_below_the_table(disk_path, need_driver):
    done = bench_io(
        disk_path, "--to", "gpu", "--method", "posix,uring", "--pattern", "read", "--size", "2M",
        "--rounds", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    said = " ".join(done.stdout.split())
    for path in ("CPU_GPU", "CPU_ASYNC_GPU"):
        assert f"{path} (penstock): {cases.GPU_PATHS[path]}" in said


def test_the_second_gpu_can_be_chosen(disk_path, need_driver):
    found = measured(
        disk_path, "--to", "gpu:1", "--pattern", "read", "--size", "2M", "--rounds", 1, devices=2
    )
    (one,) = found["measurements"]
    assert one["case"].endswith("to cuda:1")


def test_who_is_not_installed_is_told_and_left_out(disk_path, need_driver):
    if movers.is_there(movers.KVIKIO):
        pytest.skip("kvikio is installed here")
    done = bench_io(
        disk_path, "--to", "gpu", "--pattern", "read", "--size", "2M", "--rounds", 1,
        "--vs", "kvikio,cufile",
    )  # fmt: skip
    assert done.returncode == 0
    said = " ".join(done.stderr.split())
    assert "without kvikio: kvikio is not installed: pip install kvikio-cu13" in said
    assert "without cufile: " in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gpu:1"], "there is no cuda:1"),
        (["--to", "tpu"], "neither gpu nor gpu:1"),
        (["--to", "gpu", "--method", "executor"], "executor moves memory of the host alone"),
        (["--to", "gpu", "--preset", "paper"], "uring_registered moves memory of the host alone"),
        (["--method", "cufile"], "cufile moves memory of a GPU alone"),
        (["--to", "gpu", "--tune", "options.json"], "leave --to out"),
    ],
)
def test_what_cannot_be_is_refused_with_words(tmp_path, need_driver, arguments, message):
    done = bench_io(tmp_path, *arguments, columns=200)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_without_a_driver_it_is_refused_with_the_reason(tmp_path):
    done = bench_io(tmp_path, "--to", "gpu", columns=200, driver="/nowhere/libcuda.so")
    assert done.returncode == 2
    assert "--to gpu: no CUDA driver /nowhere/libcuda.so" in " ".join(done.stderr.split())
    assert "penstock doctor" in done.stderr


@pytest.mark.parametrize(
    ("library", "case", "told"),
    [
        (movers.KVIKIO, Case(pattern="read"), "moves memory of GPUs alone"),
        (movers.TENSOR_IO, Case(pattern="read", device=0), "moves memory of the host alone"),
        (movers.CUFILE, Case(pattern="random_read", device=0), "one tensor, in order"),
    ],
)
def test_movers_are_not_given_what_they_have_no_way_for(tmp_path, library, case, told):
    made = movers.run(case, library, tmp_path / "work", MIB, round_index=0)
    assert told in made.error


def test_gdsio_names_its_ways_as_we_do():
    read = Case(pattern="read", device=0, method="posix", depth=1)
    assert cases.gpu_path(read, True, [None]) == "CPU_GPU"
    assert cases.gpu_path(read, False, [None]) == "CPU_CACHED_GPU"
    ring = Case(pattern="read", device=0)
    assert cases.gpu_path(ring, True, [None]) == "CPU_ASYNC_GPU"
    cufile = Case(pattern="read", device=0, method="cufile", depth=1)
    past = {"by_peers": 3, "by_module": 0, "by_host": 0}
    assert cases.gpu_path(cufile, True, [past, past]) == "GPUD"
    assert cases.gpu_path(cufile, True, [past, {**past, "by_host": 1}]) == "GPUD, compat"
    assert cases.gpu_path(cufile, True, [past, None]) == "GPUD, untold"


@pytest.mark.parametrize(("direct", "path"), [(0, "GPUD, compat"), (1, "GPUD")])
def test_cufile_says_by_its_counters_which_way_it_went(disk_path, need_driver, direct, path):
    """The driver for tests has what is used of cuFile as well."""
    found = measured(
        disk_path, "--to", "gpu", "--method", "cufile", "--pattern", "write,read", "--size", "4M",
        "--threads", 2, "--rounds", 1, "--verify", cufile_direct=direct,
    )  # fmt: skip
    assert [one["path"] for one in found["measurements"]] == [path, path]
    assert all(one["error"] is None for one in found["measurements"])
    assert found["measurements"][1]["checked"] == 4


def test_without_cufile_its_cases_fail_with_the_reason(disk_path, need_driver, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CUFILE", "/nowhere/libcufile.so.0")
    done = bench_io(
        disk_path, "--to", "gpu", "--method", "cufile", "--pattern", "read", "--size", "2M",
        "--rounds", 1,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no cuFile /nowhere/libcufile.so.0" in " ".join(done.stdout.split())


class Counters:
    """A cuFile that has counters as ``cufile.h`` of 1.17 lays them out."""

    def __init__(self):
        self.reads = [0, 0, 0]

    def cuFileGetStatsL3(self, into):  # noqa: N802
        # 1024 bytes of level 2, the number of GPUs in eight, then of each 16 bytes and 29 numbers;
        # the sixth to eighth of those are the ways of reads.
        ways = (ctypes.c_uint64 * 3)(*self.reads)
        ctypes.memmove(ctypes.addressof(into) + 1024, (ctypes.c_uint32 * 1)(1), 4)
        ctypes.memmove(ctypes.addressof(into) + 1032 + 16 + 5 * 8, ways, 24)
        return cufile_stats._Status(0, 0)


def test_the_way_that_cufile_took_is_told_by_its_counters():
    counters = Counters()
    counters.reads = [1, 2, 3]
    stats = CufileStats(counters)
    assert stats.since() == {"p2p": 0, "nvfs": 0, "posix": 0}
    counters.reads = [5, 2, 3]
    assert stats.since() == {"p2p": 4, "nvfs": 0, "posix": 0}
    assert not stats.is_compat()
    counters.reads = [5, 2, 10]
    assert stats.is_compat()
    assert stats.report() == "4 p2p, 0 nvfs, 7 posix"
    assert ctypes.sizeof(cufile_stats._Level3) == 1024 + 8 + 16 * 248


def test_help_names_the_gpu():
    said = CliRunner().invoke(cli, ["bench", "io", "--help"]).output
    assert "--to gpu" in said
