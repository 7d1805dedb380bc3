"""DLIO's own mechanism, with the sync that its run file asks for.

DLIO stores its setting ``fsync`` under one name and reads another, and would sync before Python's
buffer is written. It is imported in DLIO's environment, by the name in a run's settings.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

if TYPE_CHECKING:
    from typing import ClassVar


class SyncedTorchSave(PyTorchCheckpointing):  # type: ignore[misc]
    """Saves by `torch.save`, and returns when the bytes of each file are durable."""

    _instance: ClassVar[SyncedTorchSave | None] = None

    @staticmethod
    def get_instance() -> SyncedTorchSave:
        """Returns the mechanism of this process."""
        if SyncedTorchSave._instance is None:
            SyncedTorchSave._instance = SyncedTorchSave()
        return SyncedTorchSave._instance

    def save_state(self, suffix: str, state: dict[str, Any], fsync: bool = False) -> None:
        """Saves a state into a file of its own, as DLIO does, and syncs it."""
        with open(self.get_name(suffix), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
