"""The training program of the demo: `python -m penstock.demo.train`.

Copy from this file. It is an ordinary training loop that saves its whole state through a
`CheckpointStore` and, when started again, continues from the newest complete checkpoint. It does
not know about being killed, which happens from outside.

Without `--store` it saves nothing, for the reference run. It reports to standard output, one JSON
object a line (see `penstock.demo.run.TrainingLog`).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sys
import time
from typing import Any

import torch
from torch.nn import functional

import penstock
from penstock.demo.model import Shape, Transformer
from penstock.demo.text import Windows, reference_text

BATCH = 8
CALIBRATION_STEPS = 5
STEPS_MIN = 48


class DemoTraining:
    """All state of a training run, which is saved to resume it."""

    def __init__(self, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        shape = Shape()
        self.step = 0
        self.steps = steps
        self.windows = Windows(reference_text(), shape.window, BATCH, seed)
        self.model = Transformer(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=1e-3, total_steps=steps
        )

    def advance(self) -> float:
        """Trains one step and returns its loss, nats a byte."""
        inputs, targets = self.windows.next_batch()
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        """The state that determines the rest of the training."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data": self.windows.state_dict(),
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict`, to continue from there."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.windows.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])


def main() -> None:
    """Trains to the last step, resuming from the store if it holds a complete checkpoint."""
    arguments = _arguments()
    # The order of a sum depends on how it is split among threads, so their number is fixed.
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)

    steps = arguments.steps or _steps_within(arguments.seconds, arguments.seed)
    training = DemoTraining(steps, arguments.seed)
    _emit("started", steps=steps, parameters=sum(p.numel() for p in training.model.parameters()))

    store = None
    if arguments.store:
        store = penstock.CheckpointStore(arguments.store, keep_last=3, no_dist=True)
        if store.latest() is not None:
            training.load_state_dict(store.load(report=_emit_loaded))

    while training.step < steps:
        loss = training.advance()
        _emit("loss", step=training.step, loss=loss.hex())
        if store is not None and training.step % arguments.save_every == 0:
            report = store.save(training.step, training.state_dict())
            _emit("saved", step=training.step, report=dataclasses.asdict(report))

    _emit("finished", weights=_digest(training.model))


def _steps_within(seconds: float, seed: int) -> int:
    """The steps that fit into so many seconds, measured on a throwaway training; a few at least."""
    training = DemoTraining(1000, seed)
    training.advance()  # The first step pays for allocations and is not counted.
    started = time.perf_counter()
    for _ in range(CALIBRATION_STEPS):
        training.advance()
    fit = seconds * CALIBRATION_STEPS / (time.perf_counter() - started)
    return max(STEPS_MIN, int(fit))


def _digest(model: torch.nn.Module) -> str:
    """One SHA-256 over the bytes of all weights."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _emit_loaded(report: penstock.reports.LoadReport) -> None:
    _emit("resumed", step=report.step, report=dataclasses.asdict(report))


def _emit(event: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="directory of checkpoints; none: save nothing")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as fit in --seconds")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
