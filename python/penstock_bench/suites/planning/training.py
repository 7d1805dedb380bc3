"""The training run that is killed: a network in NumPy, in a process of its own.

PyTorch would take most of each restart; the planner does not care what a restart consists of, and
without it 50 restarts fit into minutes. The process prints a line for each duration, its name and
its seconds, so that a killed one has told them: ``ready`` before the first step, ``step`` and
``beside`` for steps without and beside a save, ``stall`` and ``durable`` for saves.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import penstock

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WIDTH = 1024
_LAYERS = 4
_BATCH = 16


class Network:
    """Layers and their momenta: 32 MiB."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.state: dict[str, Any] = {"step": 0}
        for index in range(_LAYERS):
            weights = generator.standard_normal((_WIDTH, _WIDTH), np.float32) / np.float32(32)
            self.state[f"layers.{index}.weight"] = weights
            self.state[f"layers.{index}.momentum"] = np.zeros_like(weights)
        self._input = generator.standard_normal((_BATCH, _WIDTH), np.float32)

    def step(self) -> None:
        """Trains for one step: forward, backward, an update in place."""
        values: list[NDArray[np.float32]] = [self._input]
        for index in range(_LAYERS):
            values.append(np.tanh(values[-1] @ self.state[f"layers.{index}.weight"]))
        error = values[-1] - self._input
        for index in reversed(range(_LAYERS)):
            error = error * (1 - values[index + 1] ** 2)
            gradient = values[index].T @ error
            weights = self.state[f"layers.{index}.weight"]
            error = error @ weights.T
            momentum = self.state[f"layers.{index}.momentum"]
            momentum *= np.float32(0.9)
            momentum += gradient
            weights -= np.float32(1e-5) * momentum
        self.state["step"] += 1


def train(root: str, every: int, saves: int) -> None:
    """Trains from the newest step of a store, for some saves or, with 0, without end."""
    network = Network()
    store = penstock.CheckpointStore(root, keep_last=2, no_dist=True, save_every=every)
    with store:
        if store.steps():
            store.load(into=network.state)
        _tell("ready", 0.0)
        pending: penstock.PendingSave | None = None
        left = saves or -1
        while left:
            is_saving = pending is not None and not pending.done()
            began = time.perf_counter()
            network.step()
            _tell("beside" if is_saving else "step", time.perf_counter() - began)
            if store.due(network.state["step"]):
                if pending is not None:
                    _tell("durable", pending.result().seconds)
                pending = store.save_async(network.state["step"], network.state)
                _tell("stall", pending.stall_seconds)
                left -= 1
        if pending is not None:
            _tell("durable", pending.result().seconds)


def _tell(name: str, seconds: float) -> None:
    sys.stdout.write(f"{name} {seconds:.6f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
