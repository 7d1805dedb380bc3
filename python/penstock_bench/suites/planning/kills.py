"""Processes that train, and the kills that are planted in them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import penstock
from penstock.planning import save_cost

if TYPE_CHECKING:
    from pathlib import Path

# One thread trains and one is left for the saves. A killed save is warned of at the next start.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


class Inputs:
    """Durations that processes told, in seconds, by the names of `training`."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def read(self, process: subprocess.Popen[str], began: float) -> None:
        """Takes the lines of a process until its end; the last may be torn by its kill."""
        assert process.stdout is not None
        for line in process.stdout:
            name, _, number = line.partition(" ")
            if not number.endswith("\n"):
                continue
            if name == "ready":
                self.seconds["restart"].append(time.perf_counter() - began)
            else:
                self.seconds[name].append(float(number))

    def _mean(self, name: str) -> float:
        return fmean(self.seconds[name]) if self.seconds[name] else 0.0

    @property
    def step(self) -> float:
        """Mean seconds of a step while no save runs."""
        return self._mean("step")

    @property
    def stall(self) -> float:
        """Mean seconds for which a save stops training."""
        return self._mean("stall")

    @property
    def durable(self) -> float:
        """Mean seconds of a save."""
        return max(self.stall, self._mean("durable"))

    @property
    def slowdown(self) -> float:
        """Share of its speed that training loses beside a save."""
        beside = self._mean("beside")
        return max(0.0, 1 - self.step / beside) if beside else 0.0

    @property
    def restart(self) -> float:
        """Mean seconds of a restart."""
        return self._mean("restart")

    @property
    def cost(self) -> float:
        """Training time that a save takes."""
        return save_cost(self.stall, self.durable, self.slowdown)

    def period(self, every: int) -> float:
        """Seconds from the start of one save to the start of the next."""
        return every * self.step + self.cost


def run_calmly(root: Path, every: int, saves: int, inputs: Inputs) -> None:
    """Runs a process to its end, which nobody kills.

    Raises:
        RuntimeError: The process failed.
    """
    began = time.perf_counter()
    with _start(root, every, saves) as process:
        inputs.read(process, began)
    if process.returncode:
        raise RuntimeError(f"the training process ended with {process.returncode}")


@dataclass
class KilledRun:
    """A training run whose processes are killed one after another.

    Attributes:
        root: Its store.
        every: Steps between two saves.
        inputs: Durations that its processes told.
        seconds: Time from each start to its kill, added up.
        kills: Number of kills.
    """

    root: Path
    every: int
    inputs: Inputs = field(default_factory=Inputs)
    seconds: float = 0.0
    kills: int = 0

    def kill_after(self, gap_seconds: float) -> None:
        """Starts a process, which loads the newest step and trains, and kills it.

        Raises:
            RuntimeError: The process ended by itself.
        """
        began = time.perf_counter()
        with _start(self.root, self.every, 0) as process:
            # Lines are read at once, so that the pipe never fills.
            reader = threading.Thread(target=self.inputs.read, args=(process, began))
            reader.start()
            try:
                process.wait(max(0.0, began + gap_seconds - time.perf_counter()))
                raise RuntimeError(f"the training process ended with {process.returncode}")
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.seconds += time.perf_counter() - began
                self.kills += 1
            finally:
                process.kill()
                reader.join()

    def kept_steps(self) -> int:
        """Steps of the newest checkpoint that is whole."""
        return penstock.CheckpointStore(self.root, no_dist=True).latest() or 0


def _start(root: Path, every: int, saves: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock_bench.suites.planning.training"]
    return subprocess.Popen(
        [*command, str(root), str(every), str(saves)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    )
