"""torch.save and torch.load: a file for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock_bench.peers.checkpoint.base import Writer

if TYPE_CHECKING:
    from pathlib import Path


class TorchSave(Writer):
    """The defaults."""

    def path(self, directory: Path) -> Path:
        """The file of this rank."""
        return directory / f"rank-{self.rank:05}.pt"

    def save(self, directory: Path, state: Any) -> None:
        """`torch.save`."""
        torch.save(state, self.path(directory))

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, None]:
        """`torch.load`."""
        return torch.load(self.path(directory), weights_only=True), None

    def own_files(self, directory: Path) -> list[Path]:
        """One."""
        return [self.path(directory)]
