"""How long training with JAX waits for a save: Penstock against Orbax.

    .venv/bin/python -m penstock_bench.suites.frameworks.jax --directory DIR

Takes `orbax-checkpoint` beside what tests need. One state of a model with Adam, float32, on the
CPU. In each round both save it in the background, in an order that alternates, while training goes
on: a jitted step that is given the old state's buffers. What training waits for is the call, and
what the step takes longer than one without a save, as it gets other memory and shares the
processor with the save.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from penstock.integrations.jax import Checkpoints

GB = 10**9
# Without types.
_ready: Any = jax.block_until_ready
_LAYERS = 12


def state_of(nbytes: int) -> dict[str, Any]:
    """Parameters and moments of about so many bytes in all."""
    width = int((nbytes / 3 / 4 / _LAYERS) ** 0.5)
    keys = jax.random.split(jax.random.key(0), _LAYERS)
    params = {f"layer{n}": jax.random.normal(key, (width, width)) for n, key in enumerate(keys)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.zeros((), int)}


def _advance(state: Any) -> Any:
    return jax.tree.map(lambda x: x * 2 - x, state)


advance = jax.jit(_advance, donate_argnums=0)


class Saver(Protocol):
    """Who saves in the background, and keeps one step."""

    name: str

    def save(self, step: int, state: Any) -> None:
        """Begins a save."""

    def wait(self) -> None:
        """Waits for it."""

    def close(self) -> None:
        """Ends it."""


class Ours:
    """Penstock's plug-in.

    Args:
        root: Where to.
        copy: Whether arrays are copied at the call.
    """

    def __init__(self, root: str, *, copy: bool) -> None:
        self.name = "penstock, copy" if copy else "penstock"
        self._copy = copy
        self._checkpoints = Checkpoints(root, keep_last=1)

    def save(self, step: int, state: Any) -> None:
        """Begins a save in the background."""
        self._checkpoints.save_async(step, state, copy=self._copy)

    def wait(self) -> None:
        """Waits for it."""
        self._checkpoints.wait()

    def close(self) -> None:
        """Gives its memory back."""
        self._checkpoints.close()


class Orbax:
    """Orbax's manager, as its documentation has it."""

    name = "orbax"

    def __init__(self, root: str) -> None:
        # It is no dependency of this repository.
        self._orbax: Any = importlib.import_module("orbax.checkpoint")
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=1, enable_async_checkpointing=True
        )
        self._manager = self._orbax.CheckpointManager(root, options=options)

    def save(self, step: int, state: Any) -> None:
        """Begins a save in the background."""
        self._manager.save(step, args=self._orbax.args.StandardSave(state))

    def wait(self) -> None:
        """Waits for it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Ends its threads."""
        self._manager.close()


def _stepped(state: Any) -> tuple[float, Any]:
    """A step, and its seconds."""
    began = time.perf_counter()
    state = _ready(advance(state))
    return time.perf_counter() - began, state


def _round(saver: Saver, number: int, state: Any) -> tuple[dict[str, float], Any]:
    """Seconds of the call, of the step after it, of one without a save, until it is there."""
    alone, state = _stepped(state)
    began = time.perf_counter()
    saver.save(number, state)
    call = time.perf_counter() - began
    step, state = _stepped(state)
    saver.wait()
    whole = time.perf_counter() - began
    return {"call": call, "step": step, "alone": alone, "whole": whole}, state


def measure(nbytes: int, rounds: int, root: str) -> dict[str, list[dict[str, float]]]:
    """What each round took, by who saved."""
    found: dict[str, list[dict[str, float]]] = {}
    state = _ready(advance(state_of(nbytes)))
    savers: list[Saver] = [
        Ours(os.path.join(root, "penstock"), copy=False),
        Ours(os.path.join(root, "copied"), copy=True),
        Orbax(os.path.join(root, "orbax")),
    ]
    for number in range(rounds + 1):
        for saver in (*savers[number % 3 :], *savers[: number % 3]):
            seconds, state = _round(saver, number, state)
            if number:
                # The first round fills caches and memory that later ones find.
                found.setdefault(saver.name, []).append(seconds)
    for saver in savers:
        saver.close()
    return found


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", help="on the storage to measure; default: a temporary one")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    root = tempfile.mkdtemp(prefix="penstock-jax-", dir=arguments.directory)
    try:
        found = measure(int(arguments.gigabytes * GB), arguments.rounds, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    out = sys.stdout
    out.write(
        f"{arguments.gigabytes} GB, {arguments.rounds} rounds, milliseconds: median (range)\n"
    )
    for name, rows in found.items():
        cells = []
        for what in rows[0]:
            seconds = [row[what] * 1e3 for row in rows]
            middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
            cells.append(f"{what} {middle:.1f} ({low:.1f} to {high:.1f})")
        out.write(f"{name:16}{'; '.join(cells)}\n")
    calls, waits = {}, {}
    for name, rows in found.items():
        calls[name] = statistics.median(row["call"] for row in rows)
        waits[name] = statistics.median(row["call"] + row["step"] - row["alone"] for row in rows)
    for name in found:
        call, wait = calls[name] / calls["orbax"], waits[name] / waits["orbax"]
        out.write(f"{name:16}of Orbax's: call {call:.3f}, call and longer step {wait:.3f}\n")


if __name__ == "__main__":
    main()
