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
from typing import TYPE_CHECKING, Any, Protocol

import click
import jax
import jax.numpy as jnp
import optax

from penstock.integrations.jax import Checkpoints
from penstock_bench.suites.frameworks.waits import WAIT, Found, by_turns, command

if TYPE_CHECKING:
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


@command("orbax")
@click.option("--gigabytes", type=click.FloatRange(min=0.001), default=0.8, show_default=True)
def main(place: Path, rounds: int, gigabytes: float) -> tuple[str, Found]:
    """Save a state of JAX in the background while training goes on, with Penstock and Orbax."""
    logging.disable(logging.WARNING)
    state = _ready(advance(state_of(int(gigabytes * GB))))
    every: list[Saver] = [
        Ours(os.path.join(place, "penstock"), copy=False),
        Ours(os.path.join(place, "copied"), copy=True),
        Orbax(os.path.join(place, "orbax")),
    ]
    savers = {saver.name: saver for saver in every}

    def measured(name: str, number: int) -> dict[str, float]:
        """Seconds of the call, and of the longer step after it; until the save is durable."""
        nonlocal state
        alone, state = _stepped(state)
        began = time.perf_counter()
        savers[name].save(number, state)
        call = time.perf_counter() - began
        step, state = _stepped(state)
        savers[name].wait()
        whole = time.perf_counter() - began
        figures = {"call": call, "step": step, "alone": alone, "whole": whole}
        return {WAIT: call + step - alone, **figures}

    found = by_turns(list(savers), rounds, measured)
    for saver in every:
        saver.close()
    return f"{gigabytes:g} GB", found


if __name__ == "__main__":
    main()
