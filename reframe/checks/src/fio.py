"""Runs fio on this node: timed writes or reads, and verification of the files."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import node


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--fio", default="fio")
    parser.add_argument("--mode", choices=["write", "read"], required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--block", required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--direct", type=int, required=True)
    parser.add_argument("--engine", required=True)
    given = parser.parse_args()
    index, _ = node.place()
    given.place = given.work / f"fio-{index}"
    given.place.mkdir()
    # Every block holds its own offset.
    pattern = ["--verify=pattern", "--verify_pattern=%o", "--verify_state_save=0"]
    written = ["--rw=write", "--fallocate=native", "--end_fsync=1", *pattern, "--do_verify=0"]
    node.meet(given.work, "write")
    job = _fio(given, written)
    if given.mode == "read":
        # By default fio drops the files from the page cache before it begins.
        node.meet(given.work, "read")
        job = _fio(given, ["--rw=read"])
    node.meet(given.work, "verify")
    checked = _fio(given, ["--rw=read", *pattern])["read"]["io_bytes"]
    side = job[given.mode]
    node.tell(
        {given.mode: {"count": side["io_bytes"], "seconds": side["runtime"] / 1000}},
        verified=checked,
        to_verify=side["io_bytes"],
        unit="bytes",
        requests=side["total_ios"],
        p99_us=side["clat_ns"]["percentile"]["99.000000"] / 1000,
    )


def _fio(given: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    command = [
        given.fio,
        "--name=check",
        f"--directory={given.place}",
        f"--numjobs={given.processes}",
        f"--size={given.size}",
        f"--bs={given.block}",
        f"--iodepth={given.depth}",
        f"--direct={given.direct}",
        f"--ioengine={given.engine}",
        "--group_reporting",
        "--output-format=json",
        *more,
    ]
    sys.stderr.write(" ".join(command) + "\n")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"fio ended with {done.returncode}: {done.stdout[-500:]}")
    # fio may print notes before the JSON.
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    if job["error"]:
        sys.exit(f"fio: a job ended with error {job['error']}")
    return job


if __name__ == "__main__":
    main()
