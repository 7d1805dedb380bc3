"""Saves in a loop until it is killed: `victim.py train|train_async|replace PATH ENGINE DIRECT`.

Prints `ready`, then each step once its save was acknowledged. Imports no torch, as half a hundred
of these start, and what is killed is the save.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np

import penstock


def make_state(step: int) -> dict[str, Any]:
    """The state of a step: every bit follows from its number."""
    generator = np.random.Generator(np.random.PCG64(step))
    weights = [generator.integers(0, 2**32, size, np.uint32) for size in (1_000_003, 262_144, 5)]
    return {"weights": weights, "tied": weights[0], "step": step, "loss": 1 / (step + 1)}


def train(path: str, options: penstock.Options) -> None:
    """Goes on from the newest step of a store."""
    store = penstock.CheckpointStore(path, keep_last=2, keep_every=50, options=options)
    latest = store.latest()
    begin = 0 if latest is None else store.load(latest)["step"] + 1
    tell("ready")
    for step in itertools.count(begin):
        store.save(step, make_state(step), overwrite=True)
        tell(step)


def train_async(path: str, options: penstock.Options) -> None:
    """The same in the background, in place: the state is changed as soon as it may be."""
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
    except (penstock.CheckpointNotFoundError, penstock.IncompleteCheckpointError):
        begin = 0
    tell("ready")
    for step in itertools.count(begin):
        penstock.save(path, make_state(step), overwrite=True, options=options)
        tell(step)


def tell(value: object) -> None:
    """One line to whoever is going to kill this process."""
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _, command, path, engine, direct = sys.argv
    options = penstock.Options(engine=engine, direct=direct, io_threads=2)
    commands = {"train": train, "train_async": train_async, "replace": replace}
    commands[command](path, options)
