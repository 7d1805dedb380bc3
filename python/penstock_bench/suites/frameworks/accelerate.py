"""How long training waits for ``save_state``: Accelerate's own, and Penstock's.

    python -m penstock_bench.suites.frameworks.accelerate --rounds 7

A model and AdamW of 0.8 GB on the CPU. In each round every way saves once, in turn: its own,
waiting for it all, in the background, and lazily. The stall is the call, and what the step behind
it takes longer than the median of steps without a save.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from penstock.integrations.accelerate import attach
from penstock_bench.suites.frameworks.waits import WAIT, Found, by_turns, command, stall

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 4096
LAYERS = 4
WAYS: dict[str, dict[str, Any] | None] = {
    "accelerate": None,
    "waiting": {},
    "background": {"background": True},
    "lazy": {"background": True, "lazy": True},
}


class Run:
    """One model, saved in one way."""

    def __init__(self, how: dict[str, Any] | None) -> None:
        self.accelerator: Any = Accelerator(cpu=True)
        self.is_ours = how is not None
        if how is not None:
            attach(self.accelerator, **how)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.step()

    def step(self) -> float:
        """Seconds of a step of the optimizer."""
        self.accelerator.backward(self.model(torch.ones(1, WIDTH)).sum())
        began = time.perf_counter()
        self.optimizer.step()
        seconds = time.perf_counter() - began
        self.optimizer.zero_grad()
        return seconds

    def stall(self, directory: Path) -> float:
        """Seconds that training waits for one save."""
        seconds = stall(self.step, lambda: self.accelerator.save_state(str(directory)))
        # A save must not run on during the next one.
        while self.is_ours and not (directory / "manifest.json").exists():
            time.sleep(0.01)
        shutil.rmtree(directory)
        return seconds


@command("accelerate", rounds_usual=5)
def main(place: Path, rounds: int) -> tuple[str, Found]:
    """Save with Accelerate's ``save_state``, its own and Penstock's."""
    runs = {name: Run(how) for name, how in WAYS.items()}
    return f"AdamW, {LAYERS} layers of {WIDTH} x {WIDTH}", by_turns(
        list(runs), rounds, lambda name, _: {WAIT: runs[name].stall(place / name)}
    )


if __name__ == "__main__":
    main()
