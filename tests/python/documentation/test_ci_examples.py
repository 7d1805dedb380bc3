"""The CI jobs in examples/ci: their commands run, and fail when storage has become slower."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "ci"


class Runner:
    """Runs a job as a CI runner does: a fresh directory, the cache, the commands."""

    def __init__(self, place, storage):
        self.jobs = place / "jobs"
        self.cache = place / "cache"
        self.bin = place / "bin"
        for path in (self.jobs, self.cache, self.bin):
            path.mkdir()
        command = self.bin / "penstock"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
        command.chmod(0o755)
        self.small = {"BENCH_DIRECTORY": str(storage), "BENCH_SIZE": "1M", "BENCH_ROUNDS": "5"}

    def run(self, line, directory, variables):
        path = f"{self.bin}:{os.environ['PATH']}"
        assert self.small.keys() <= variables.keys()
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", line],
            cwd=directory,
            env={**os.environ, **variables, **self.small, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    def directory(self):
        made = self.jobs / str(len(os.listdir(self.jobs)))
        made.mkdir()
        return made

    def copy(self, source, target, names):
        for name in names:
            if (source / name).exists():
                shutil.copy(source / name, target / name)


class GitLab(Runner):
    file = EXAMPLES / "gitlab-ci.yml"

    def job(self):
        """Runs the job; returns its exit code and artifacts."""
        ((_, job),) = yaml.safe_load(self.file.read_text()).items()
        directory = self.directory()
        kept = job["cache"]["paths"]
        self.copy(self.cache, directory, kept)
        # One shell for all lines.
        done = self.run("\n".join(job["script"]), directory, job["variables"])
        if done.returncode == 0:
            self.copy(directory, self.cache, kept)
        return done, {name: directory / name for name in job["artifacts"]["paths"]}


class GitHub(Runner):
    file = EXAMPLES / "github-workflow.yml"

    def job(self):
        """Runs the steps; returns the last one's outcome and the artifacts."""
        ((_, job),) = yaml.safe_load(self.file.read_text())["jobs"].items()
        directory = self.directory()
        cached, missed, artifacts = [], False, []
        for step in job["steps"]:
            action = step.get("uses", "").partition("@")[0]
            if action == "actions/cache":
                cached = step["with"]["path"].split()
                missed = not (self.cache / cached[0]).exists()
                self.copy(self.cache, directory, cached)
            elif action == "actions/upload-artifact":
                artifacts = step["with"]["path"].split()
            elif "run" in step and step["name"] != "Install":
                done = self.run(step["run"], directory, job["env"])
                if done.returncode:
                    assert step["name"] == "Compare", done.stderr
        if missed and done.returncode == 0:
            # An existing key is never written again.
            self.copy(directory, self.cache, cached)
        return done, {name: directory / name for name in artifacts}


def rates_times(path, factor):
    """Scales the results in a file, as if measured on faster or slower storage."""
    results = json.loads(path.read_text())
    for one in results["measurements"]:
        one["seconds"] /= factor
        one["sync_seconds"] /= factor
    path.write_text(json.dumps(results))


@pytest.mark.slow
@pytest.mark.parametrize("runner", [GitLab, GitHub])
def test_a_job_keeps_the_first_run_and_fails_when_a_later_one_is_slower(
    tmp_path, disk_path, runner
):
    place, storage = tmp_path / "runner", disk_path / "storage"
    place.mkdir()
    storage.mkdir()
    ours = runner(place, storage)
    baseline = ours.cache / "baseline.json"

    first, left = ours.job()
    assert first.returncode == 0, first.stdout + first.stderr
    assert baseline.read_bytes() == left["now.json"].read_bytes()

    # Far beyond any noise of this disk.
    rates_times(baseline, 1000)
    slower, left = ours.job()
    assert slower.returncode == 1, slower.stdout + slower.stderr
    assert slower.stdout.count("slower") == 2
    assert left["now.json"].exists()

    assert list(storage.iterdir()) == []


@pytest.mark.slow
def test_a_fifth_less_is_slower_and_neither_the_same_nor_more_is(tmp_path, disk_path):
    place, storage = tmp_path / "runner", disk_path / "storage"
    place.mkdir()
    storage.mkdir()
    ours = GitLab(place, storage)
    job = yaml.safe_load(ours.file.read_text())["storage-speed"]
    compares = job["script"][-1]
    results = json.loads(steady())
    (place / "baseline.json").write_text(json.dumps(results))
    shutil.copy(place / "baseline.json", place / "now.json")
    assert ours.run(compares, place, job["variables"]).returncode == 0
    kept = (place / "baseline.json").read_bytes()
    rates_times(place / "now.json", 1.25)
    assert ours.run(compares, place, job["variables"]).returncode == 0
    rates_times(place / "now.json", 0.8 / 1.25)
    assert ours.run(compares, place, job["variables"]).returncode == 1
    assert (place / "baseline.json").read_bytes() == kept


def steady():
    """Rates that differ by 1 % from round to round."""
    case = "write, uring, direct, 1M x 16"
    measurements = [
        {
            "case": case, "by": "penstock", "round_index": number, "nbytes": 10**9,
            "seconds": 1 + 0.01 * (number % 3), "sync_seconds": 0.01,
        }
        for number in range(15)
    ]  # fmt: skip
    results = {"format": "penstock-bench", "version": 1, "kind": "io", "machine": {}, "disk": {}}
    return json.dumps(
        {**results, "settings": {}, "cases": {case: {}}, "measurements": measurements}
    )
