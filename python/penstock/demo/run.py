"""Runs the training program in a process of its own, and collects its reports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STDERR_LINES_MAX = 15


class RunError(Exception):
    """The training program ended in a way that the demo did not ask for."""


@dataclass(slots=True)
class TrainingLog:
    """The reports of a training process, one JSON object a line: an `event` and its facts.

    `started` (steps, parameters), `resumed` (step, report), `loss` (step, loss), `saved` (step,
    report) and `finished` (weights).
    """

    steps: int = 0
    parameters: int = 0
    loaded: dict[str, Any] | None = None
    """The `LoadReport` of the checkpoint it resumed from, as a dict."""
    losses: dict[int, str] = field(default_factory=dict)
    """Step to loss as a hexadecimal float, so that equal text means equal bits."""
    saves: list[dict[str, Any]] = field(default_factory=list)
    """The `SaveReport` of every acknowledged save, as a dict."""
    exit_code: int | None = None
    """As `subprocess.Popen.returncode`: negative for a signal."""
    weights: str | None = None
    """SHA-256 over the final weights."""

    def loss(self, step: int) -> float | None:
        """The loss of a step, nats a byte; None if this run did not train it."""
        text = self.losses.get(step)
        return None if text is None else float.fromhex(text)

    def hear(self, line: str) -> None:
        """Adds one line of the process's output."""
        facts = json.loads(line)
        match facts["event"]:
            case "started":
                self.steps, self.parameters = facts["steps"], facts["parameters"]
            case "resumed":
                self.loaded = facts["report"]
            case "loss":
                self.losses[facts["step"]] = facts["loss"]
            case "saved":
                self.saves.append(facts["report"])
            case "finished":
                self.weights = facts["weights"]


class TrainingProcess:
    """A running training program; leaving the context kills it if it still runs."""

    def __init__(self, options: list[str]) -> None:
        command = [sys.executable, "-m", "penstock.demo.train", *options]
        # Its own process group: Ctrl-C reaches the demo, which then ends the training.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._stderr_lines: list[str] = []
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._stderr_reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def follow(self, on_event: Callable[[TrainingLog], object]) -> TrainingLog:
        """Reads the process's output until it ends, calling `on_event` after each line.

        Returns:
            The run, with the exit code of the process.
        """
        run = TrainingLog()
        for line in self._lines():
            run.hear(line)
            on_event(run)
        run.exit_code = self.process.wait()
        return run

    def require_success(self) -> None:
        """Raises `RunError` with the end of its error output unless it exited with 0."""
        if self.process.returncode != 0:
            self._stderr_reader.join()
            told = "".join(self._stderr_lines[-STDERR_LINES_MAX:]).rstrip()
            raise RunError(f"the training process ended with {self.process.returncode}:\n{told}")

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # A killed process may leave half a line.
            if line.endswith("\n"):
                yield line

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._stderr_lines.append(line)
            del self._stderr_lines[:-STDERR_LINES_MAX]
