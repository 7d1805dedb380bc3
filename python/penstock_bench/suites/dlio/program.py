"""Runs DLIO's program under MPI, and reads its results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_bench.harness.options import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_EXAMPLES = ROOT / "examples" / "dlio"
_WORKLOAD = "llama3_8b_scaled"
_SAVE, _LOAD = "save_ckpt", "load_ckpt"
_GIB = 1 << 30
_SYNC_CALLS = "fsync,fdatasync,sync_file_range,syncfs,sync,msync"
_ERROR_CHARS_MAX = 2000


class ProgramError(Exception):
    """DLIO's program failed."""


@dataclass(frozen=True)
class Shape:
    """How far the model is scaled down.

    Attributes:
        ranks: Ranks that run, of the 8 of the whole model.
        layers: Layers, of 32.
        vocabulary: Tokens, of 128,256.
        hidden: Width.
        ffn: Width of the feed-forward network.
    """

    ranks: int
    layers: int
    vocabulary: int
    hidden: int = 4096
    ffn: int = 14336


@dataclass(frozen=True)
class Timed:
    """Checkpoints of one run.

    Attributes:
        nbytes: Bytes of each, of all ranks.
        seconds: Of each, until the slowest rank has ended.
    """

    nbytes: int
    seconds: tuple[float, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all."""
        return self.nbytes * len(self.seconds)

    @property
    def mean_of_rates(self) -> float:
        """The figure that MLPerf Storage publishes: the mean of the rates of each, GiB/s."""
        return sum(self.nbytes / one for one in self.seconds) / len(self.seconds) / _GIB


@dataclass(frozen=True)
class Program:
    """DLIO with a mechanism, in a directory.

    Attributes:
        python: The interpreter of DLIO's environment.
        mechanism: Name of the class of the mechanism; nothing for DLIO's own.
        shape: The model.
        directory: Where checkpoints and results go.
        timeout_seconds: For one run.
    """

    python: Path
    mechanism: str
    shape: Shape
    directory: Path
    timeout_seconds: float

    @property
    def checkpoints(self) -> Path:
        """The directory of all checkpoints."""
        return self.directory / "checkpoints"

    @property
    def files(self) -> list[Path]:
        """The files of all checkpoints."""
        return [one for one in self.checkpoints.rglob("*") if one.is_file()]

    def save(self, count: int) -> Timed:
        """Saves some checkpoints, in a run of its own.

        Raises:
            ProgramError: The run failed.
        """
        self._run([], count, 0)
        return self._timed(_SAVE, count)

    def load(self, count: int) -> Timed:
        """Loads those checkpoints, in a run of its own.

        Raises:
            ProgramError: The run failed.
        """
        self._run([], 0, count)
        return self._timed(_LOAD, count)

    def syncs(self) -> int:
        """Saves a checkpoint under strace, and counts the syncs of its files and directories.

        Penstock's syncs are system calls of threads then, as strace sees nothing of io_uring.

        Raises:
            ProgramError: The run failed.
        """
        log = self.directory / "calls"
        strace = ["strace", "-f", "-y", "-q", "-e", f"trace={_SYNC_CALLS}", "-o", str(log)]
        self._run(strace, 1, 0, PENSTOCK_ENGINE="threads")
        # A call that another thread interrupts has a second line, "resumed".
        pattern = rf"^\d+ +\w*sync\w*\(\d+<{re.escape(str(self.checkpoints))}"
        return len(re.findall(pattern, log.read_text(), re.MULTILINE))

    def clear(self) -> None:
        """Removes all checkpoints and results."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self, before: list[str], saves: int, loads: int, **variables: str) -> None:
        shutil.rmtree(self._results, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [
            *before,
            *(str(self.python.with_name("mpirun")), "--allow-run-as-root", "--oversubscribe"),
            *("-np", str(self.shape.ranks), str(self.python), "-m", "mpi4py"),
            *("-m", "dlio_benchmark.main", f"--config-dir={_EXAMPLES}", f"workload={_WORKLOAD}"),
            *self._settings(saves, loads),
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=self.timeout_seconds,
                env={**os.environ, **variables},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProgramError(f"it took more than {self.timeout_seconds:g} s") from None
        if done.returncode:
            said = (done.stdout + done.stderr)[-_ERROR_CHARS_MAX:]
            raise ProgramError(f"it ended with code {done.returncode}: {said}")

    def _settings(self, saves: int, loads: int) -> list[str]:
        own = {
            "model.num_layers": self.shape.layers,
            "model.transformer.vocab_size": self.shape.vocabulary,
            "model.transformer.hidden_size": self.shape.hidden,
            "model.transformer.ffn_hidden_size": self.shape.ffn,
            "checkpoint.checkpoint_folder": self.checkpoints,
            "checkpoint.checkpoint_mechanism_classname": self.mechanism or "null",
            # Without effect in DLIO, as the count of syncs shows.
            "checkpoint.fsync": True,
            "checkpoint.num_checkpoints_write": saves,
            "checkpoint.num_checkpoints_read": loads,
            "output.folder": self._results,
        }
        return [
            *(f"++workload.{name}={value}" for name, value in own.items()),
            f"hydra.run.dir={self._results}",
        ]

    @property
    def _results(self) -> Path:
        return self.directory / "results"

    def _timed(self, kind: str, count: int) -> Timed:
        epoch = json.loads((self._results / "0_per_epoch_stats.json").read_text())["1"]
        summary = json.loads((self._results / "summary.json").read_text())
        return Timed(
            # DLIO calls it GB.
            round(summary["metric"]["checkpoint_size_GB"] * _GIB),
            tuple(epoch[f"{kind}{number + 1}"]["duration"] for number in range(count)),
        )
