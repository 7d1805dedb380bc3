"""Checkpoints saved and loaded by Penstock."""

from __future__ import annotations

import reframe as rfm
from reframe.core.builtins import (
    performance_function,
    run_before,
    sanity_function,
    variable,
)

from .storage import StorageCheck


@rfm.simple_test
class CheckpointCheck(StorageCheck):
    """Each process saves a state of its own durably, and loads it again from a cold cache.

    Tensor sizes are those of a transformer. Loaded tensors are compared bit for bit.
    """

    descr = "Penstock checkpoints, saved and loaded"
    tags = {"checkpoint"}
    name_of_kind = "checkpoint"

    size = variable(str, value="1G", loggable=True)
    """Size of each process's state."""

    engine = variable(str, value="auto", loggable=True)
    """auto, uring or threads."""

    @run_before("run")
    def say_what(self) -> None:
        """Passes sizes and paths to the program."""
        self.executable_opts = [
            *self.executable_opts,
            f"--size={self.size}",
            f"--engine={self.engine}",
        ]

    @sanity_function
    def what_was_loaded_is_what_was_saved(self) -> bool:
        """Checks that every tensor and every digest of the files matched."""
        return self.is_sound("save", "load")

    @performance_function("GB/s")
    def save(self) -> float:
        """Rate of the save until it is durable."""
        return self.per_second("save", 1e9)

    @performance_function("GB/s")
    def load(self) -> float:
        """Rate of the load, with all digests checked."""
        return self.per_second("load", 1e9)
