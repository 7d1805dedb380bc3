"""Saves in a loop until it is killed: `victim.py train|train_async|replace PATH ENGINE DIRECT`.

Prints `ready`, then each step once its save was acknowledged. Does not import PyTorch, as fifty of
these processes start, and the kill is to strike during a save.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np

import penstock
from penstock.errors import CheckpointNotFoundError, IncompleteCheckpointError


def make_state(step: int) -> dict[str, Any]:
    """Returns the state of a step: every bit depends on its number."""
    generator = np.random.Generator(np.random.PCG64(step))
    weights = [generator.integers(0, 2**32, size, np.uint32) for size in (1_000_003, 262_144, 5)]
    return {"weights": weights, "tied": weights[0], "step": step, "loss": 1 / (step + 1)}


def train(path: str, options: penstock.Options) -> None:
    """Continues from the newest step of a store."""
    store = penstock.CheckpointStore(path, keep_last=2, keep_every=50, options=options)
    latest = store.latest()
    begin = 0 if latest is None else store.load(latest)["step"] + 1
    tell("ready")
    for step in itertools.count(begin):
        store.save(step, make_state(step), overwrite=True)
        tell(step)


def train_async(path: str, options: penstock.Options) -> None:
    """Saves in the background, and changes the state in place as soon as that is allowed."""
    store = penstock.CheckpointStore(path, keep_last=2, keep_every=50, options=options)
    latest = store.latest()
    begin = 0 if latest is None else store.load(latest)["step"] + 1
    tell("ready")
    state = make_state(begin)
    for step in itertools.count(begin):
        following = make_state(step + 1)
        pending = store.save_async(step, state, overwrite=True, lazy=step % 2 == 0)
        pending.stage()
        for weight, other in zip(state["weights"], following["weights"], strict=True):
            weight[:] = other
        state.update(step=step + 1, loss=following["loss"])
        if step % 3 == 0:
            pending.result()
            tell(step)


def replace(path: str, options: penstock.Options) -> None:
    """Saves one checkpoint over and over."""
    try:
        begin = penstock.load(path)["step"] + 1
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        begin = 0
    tell("ready")
    for step in itertools.count(begin):
        penstock.save(path, make_state(step), overwrite=True, options=options)
        tell(step)


def tell(value: object) -> None:
    """Prints one line for the process that will kill this one."""
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _, command, path, engine, direct = sys.argv
    options = penstock.Options(engine=engine, direct=direct, io_threads=2)
    commands = {"train": train, "train_async": train_async, "replace": replace}
    commands[command](path, options)
