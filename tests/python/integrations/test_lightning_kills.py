"""Lightning's Trainer, killed at random moments: each run resumes from the newest complete step.

`PENSTOCK_TORTURE_LIGHTNING_KILLS` sets the number of kills of each kind of run, and
`PENSTOCK_TORTURE_SEED` their moments.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

import forks
import penstock
from conftest import tell
from documentation.test_example_programs import Program, said

SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", "90211"))
KILLS = os.environ.get("PENSTOCK_TORTURE_LIGHTNING_KILLS")
STEPS, EVERY = 33, 4  # three epochs
_STEP_SECONDS = 0.03


def complete(directory):
    """Returns the complete steps of a run."""
    found = set()
    for path in Path(directory).glob("*.ckpt"):
        try:
            found.add(penstock.inspect(path).step)
        except penstock.PenstockError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kind", "kills_default"),
    [("plain", 3), ("ddp", 1), ("shard", 1)],
    ids=["plain", "ddp", "shard"],
)
def test_lives_go_on_from_the_newest_complete_step_and_end_the_same(
    tmp_path, monkeypatch, kind, kills_default
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    tell("seed", SEED)
    chooser = random.Random(f"{SEED} {kind}")
    kills = int(KILLS or kills_default)
    further = ["--shard"] if kind == "shard" else []
    ranks = None if kind == "plain" else 2

    def begun(directory):
        options = (STEPS, ranks, EVERY, *further)
        return Program("lightning_training.py", directory, *options, popen=forks.LightningPopen)

    straight = begun(tmp_path / "straight").wait()
    losses = [line for line in straight if line.startswith("step")]
    killed = runs = 0
    directory, before = tmp_path / "run", set()
    while killed < kills:
        program = begun(directory)
        try:
            # After so many lines and part of a step; sometimes before any output.
            events = chooser.randrange(STEPS // 2 if killed < kills - 1 else 2 * EVERY)
            is_over = not listened(program, events)
            time.sleep(chooser.uniform(0, _STEP_SECONDS if events else 1.5))
            is_over = is_over or not program.is_running()
        finally:
            if not is_over:
                program.kill()
        lines = program.wait() if is_over else program.lines
        check(lines, before, losses, said(straight, "digest"))
        if is_over:
            assert said(lines, "digest") == said(straight, "digest")
            shutil.rmtree(directory)
            before, runs = set(), runs + 1
            continue
        killed += 1
        now = complete(directory)
        assert not before or max(now, default=0) >= max(before), (before, now)
        before = now
    lines = begun(directory).wait()
    check(lines, before, losses, said(straight, "digest"))
    assert said(lines, "digest") == said(straight, "digest")
    tell(f"{kind}: killed {killed} times, {runs + 1} runs ended bit-equal")


def listened(program, count):
    """Waits until a program has printed so many lines; returns whether it still runs."""
    deadline = time.monotonic() + 300
    while len(program.lines) < count and program.is_running():
        assert time.monotonic() < deadline, program.lines
        time.sleep(0.001)
    return program.is_running()


def check(lines, complete_before, losses, digest):
    """Checks that a run resumed at the right step, with the losses of an uninterrupted one."""
    if lines and lines[0].startswith("digest"):
        # It was killed after its last save.
        assert (max(complete_before), said(lines, "digest")) == (len(losses), digest)
    if not lines or lines[0].startswith("digest"):
        return
    step = 0 if lines[0] == "a new run" else int(said(lines[:1], "resumed from step"))
    assert step == max(complete_before, default=0)
    steps = [line for line in lines if line.startswith("step")]
    assert steps == losses[step : step + len(steps)]
