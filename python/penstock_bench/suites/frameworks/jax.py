"""How long training with JAX waits for a save: Penstock against Orbax.

    .venv/bin/python -m penstock_bench.suites.frameworks.jax --directory DIR

Takes `orbax-checkpoint` beside what tests need. One state of a model with Adam, float32, on the
CPU. In each round both save it in the background, in an order that alternates, while training goes
on: a jitted step that is given the old state's buffers. What training waits for is the call, and
what the step takes longer than one without a save, as it gets other memory and shares the
processor with the save.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import click
import jax
import jax.numpy as jnp
import optax

from penstock.integrations.jax import Checkpoints
from penstock_bench.suites.frameworks.waits import WAIT, Found, by_turns, command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


def _stepped(state: Any) -> tuple[float, Any]:
    """A step, and its seconds."""
    began = time.perf_counter()
    state = _ready(advance(state))
    return time.perf_counter() - began, state


@command("orbax")
@click.option("--gigabytes", type=click.FloatRange(min=0.001), default=0.8, show_default=True)
def main(place: Path, rounds: int, gigabytes: float) -> tuple[str, Found]:
    """Save a state of JAX in the background while training goes on, with Penstock and Orbax."""
    logging.disable(logging.WARNING)
    state = _ready(advance(state_of(int(gigabytes * GB))))
    ours = {
        "penstock": Checkpoints(os.path.join(place, "penstock"), keep_last=1),
        "penstock, copy": Checkpoints(os.path.join(place, "copied"), keep_last=1),
    }
    # It is no dependency of this repository.
    orbax: Any = importlib.import_module("orbax.checkpoint")
    options = orbax.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
    theirs = orbax.CheckpointManager(os.path.join(place, "orbax"), options=options)

    def save(name: str, step: int) -> Callable[[], object]:
        """Begins a save in the background; returns what waits for it."""
        if name == "orbax":
            theirs.save(step, args=orbax.args.StandardSave(state))
            wait: Callable[[], object] = theirs.wait_until_finished
            return wait
        ours[name].save_async(step, state, copy=name != "penstock")
        return ours[name].wait

    def measured(name: str, number: int) -> dict[str, float]:
        """Seconds of the call, and of the longer step after it; until the save is durable."""
        nonlocal state
        alone, state = _stepped(state)
        began = time.perf_counter()
        wait = save(name, number)
        call = time.perf_counter() - began
        step, state = _stepped(state)
        wait()
        whole = time.perf_counter() - began
        figures = {"call": call, "step": step, "alone": alone, "whole": whole}
        return {WAIT: call + step - alone, **figures}

    found = by_turns([*ours, "orbax"], rounds, measured)
    for saver in (*ours.values(), theirs):
        saver.close()
    return f"{gigabytes:g} GB", found


if __name__ == "__main__":
    main()
