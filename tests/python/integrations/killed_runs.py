"""A program of examples/ that is killed repeatedly; each run that ends is compared."""

from __future__ import annotations

import random
import time

from conftest import tell
from documentation.test_example_programs import Program, said

EVERY = 4
KEPT = 3
"""Checkpoints that the programs keep; a kill before a deletion leaves one more."""


def survives(name, directory, kills, seed, *, complete, popen, ranks=None, steps=60):
    """Kills a program at random moments and restarts it, until it was killed so often.

    Args:
        name: The program.
        directory: Directory of the runs.
        kills: Number of kills.
        seed: Seed of the random moments.
        complete: Returns the steps of the complete checkpoints below a run's directory.
        popen: Starts the program.
        ranks: Number of ranks, if there are several.
        steps: Steps of a run, after which another one begins.
    """
    tell("seed", seed)
    chooser = random.Random(seed)

    def begun(run):
        return Program(name, directory / run, steps, ranks, EVERY, popen=popen)

    wanted = said(begun("straight").wait(), "digest")
    done, runs, passed, before = 0, 0, 0, []
    while done < kills:
        program = begun(f"run-{runs}")
        try:
            if chooser.random() < 0.2:
                time.sleep(chooser.uniform(0, 3))
            else:
                after = chooser.randrange(1, steps // 3)
                first = before[-1] if before else 0
                if first + after < steps:
                    program.wait_for(f"step {first + after}:")
                time.sleep(chooser.uniform(0, 0.05))
            was_running = program.is_running()
        finally:
            program.kill()
        lines = program.lines
        if before:
            # Not the beginning, and no step older than the newest complete one.
            resumed = [line for line in lines if line.startswith(("resumed", "a new run"))]
            assert resumed in ([], [f"resumed from step {before[-1]}"]), (resumed, before)
        if any(line.startswith("digest") for line in lines):
            assert said(lines, "digest") == wanted
            passed, runs, before = passed + 1, runs + 1, []
            continue
        assert was_running, program.trouble
        done += 1
        found = complete(directory / f"run-{runs}")
        assert len(found) >= min(len(before), KEPT), (
            f"fewer complete checkpoints: {before}, then {found}"
        )
        assert not before or found[-1] >= before[-1]
        before = found
    last = said(begun(f"run-{runs}").wait(), "digest")
    assert last == wanted
    tell(f"killed {done} times, {passed + 1} runs came to their end with the same bits")
