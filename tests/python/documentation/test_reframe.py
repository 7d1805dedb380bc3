"""The ReFrame checks of a site: results of their programs, and a breach fails the suite."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from conftest import REPOSITORY
from penstock_bench.harness import fio

CHECKS = REPOSITORY / "reframe" / "checks"


def start(program, work, *arguments, index=None, nodes=None):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if nodes is not None:
        environment |= {"SLURM_PROCID": str(index), "SLURM_NTASKS": str(nodes)}
    return subprocess.Popen(
        [sys.executable, str(CHECKS / "src" / program), f"--work={work}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def told(process):
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(out)


METADATA = ("--files=50", "--depth=2", "--branching=2")


def test_every_file_of_every_process_is_made_looked_at_and_removed(tmp_path):
    found = told(start("metadata.py", tmp_path, "--processes=3", *METADATA))
    counts = {name: one["count"] for name, one in found["phases"].items()}
    assert counts == {"mkdir": 21, "create": 150, "stat": 150, "remove": 150, "rmdir": 21}
    assert found["verified"] == found["to_verify"] == 6
    assert list(tmp_path.iterdir()) == []


def test_nodes_wait_for_each_other_and_look_at_files_of_the_other(tmp_path):
    first = start("metadata.py", tmp_path, "--processes=2", *METADATA, index=0, nodes=2)
    second = start("metadata.py", tmp_path, "--processes=2", *METADATA, index=1, nodes=2)
    found = [told(first), told(second)]
    assert [one["node"] for one in found] == [0, 1]
    assert all(one["phases"]["stat"]["count"] == 100 for one in found)
    # Only the marker files of each phase's barrier are left.
    left = {path.name for path in tmp_path.iterdir()}
    phases = [*found[0]["phases"], "created", "end"]
    assert left == {f".{phase}-{index}" for phase in phases for index in (0, 1)}


def test_a_process_that_fails_fails_all(tmp_path):
    (tmp_path / "tree-1").mkdir()
    process = start("metadata.py", tmp_path, "--processes=2", *METADATA)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "FileExistsError" in errors


def test_what_was_saved_is_loaded_by_each_process(disk_path):
    found = told(start("checkpoint.py", disk_path, "--processes=2", "--size=32M"))
    assert found["phases"]["save"]["count"] == found["phases"]["load"]["count"] > 2**25
    assert found["verified"] == found["to_verify"]
    assert len(list(disk_path.glob("checkpoint-*/manifest.json"))) == 2


FIO = ("--size=2M", "--block=1M", "--depth=4", "--direct=0", "--engine=psync")


@pytest.mark.skipif(not fio.is_there(), reason=fio.MISSING)
@pytest.mark.parametrize("mode", ["write", "read"])
def test_fio_moves_and_verifies_every_byte(tmp_path, mode):
    found = told(start("fio.py", tmp_path, "--processes=2", f"--mode={mode}", *FIO))
    assert found["phases"][mode]["count"] == found["verified"] == 2 * 2**21
    assert found["requests"] == 4


def has_reframe():
    # Not by an import, which could find the folder of the checks of the same name.
    try:
        return bool(metadata.version("reframe-hpc")) and shutil.which("reframe") is not None
    except metadata.PackageNotFoundError:
        return False


SITE = """
site_configuration = {"systems": [{
    "name": "site", "hostnames": [".*"], "partitions": [{
        "name": "default", "scheduler": "local", "launcher": "local", "environs": ["builtin"],
        "extras": {"references": {"metadata-1x1": {"create": (%s, -0.1, None, "1/s")}}},
    }]
}]}
"""


def reframe(prefix, *arguments):
    return subprocess.run(
        [
            "reframe", "--nocolor", f"--config-file={REPOSITORY / 'reframe' / 'settings.py'}",
            f"--checkpath={CHECKS}", f"--prefix={prefix}",
            f"--report-file={prefix / 'report.json'}", *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        # ReFrame caches its findings about the machine there.
        env={**os.environ, "HOME": str(prefix)},
    )  # fmt: skip


@pytest.mark.skipif(not has_reframe(), reason="comes with make reframe")
@pytest.mark.parametrize(("create", "code"), [("1", 0), ("1e12", 1)])
def test_a_reference_that_is_not_met_fails_the_suite(tmp_path, create, code):
    site = tmp_path / "site.py"
    site.write_text(SITE % create)
    work = tmp_path / "work"
    done = reframe(
        tmp_path, f"--config-file={site}", "--system=site", "--name=MetadataCheck",
        "-S", f"directory={work}", "-S", "MetadataCheck.files=50", "-r",
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert ("expected 1000000000000.0" in done.stdout) == (code == 1)
    assert "2 nodes take a scheduler" in done.stdout
    assert list(work.iterdir()) == []


@pytest.mark.skipif(not has_reframe(), reason="comes with make reframe")
def test_a_cluster_gets_a_task_on_each_node(tmp_path):
    done = reframe(tmp_path, "--system=cluster", "--name=FioCheck", "--dry-run")
    assert done.returncode == 0, done.stdout
    jobs = [path.read_text() for path in tmp_path.glob("stage/cluster/gpu/*/*/rfm_job.sh")]
    assert len(jobs) == 12
    for nodes in (1, 2, 4):
        assert sum(f"#SBATCH --ntasks={nodes}\n" in job for job in jobs) == 4
    assert all("#SBATCH --ntasks-per-node=1\n" in job and "\nsrun " in job for job in jobs)
