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
    """Each process saves a state of its own, durably, and loads it again from a cold cache.

    Tensors have the sizes of a transformer's. What was loaded is compared bit for bit.
    """

    descr = "Penstock checkpoints, saved and loaded"
    tags = {"checkpoint"}
    name_of_kind = "checkpoint"

    size = variable(str, value="1G", loggable=True)
    """Of the state of each process."""

    engine = variable(str, value="auto", loggable=True)
    """auto, uring or threads."""

    @run_before("run")
    def say_what(self) -> None:
        """Sizes and paths."""
        self.executable_opts = [
            *self.executable_opts,
            f"--size={self.size}",
            f"--engine={self.engine}",
        ]

    @sanity_function
    def what_was_loaded_is_what_was_saved(self) -> bool:
        """Every tensor, and every digest of the files."""
        return self.is_sound("save", "load")

    @performance_function("GB/s")
    def save(self) -> float:
        """Until it is durable."""
        return self.per_second("save", 1e9)

    @performance_function("GB/s")
    def load(self) -> float:
        """With all digests checked."""
        return self.per_second("load", 1e9)
