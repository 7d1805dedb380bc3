"""safetensors: one buffered stream for each rank; loads mapped and copied, or read with pread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from penstock_bench.peers.checkpoint.base import FlatWriter

if TYPE_CHECKING:
    from pathlib import Path


class Safetensors(FlatWriter):
    """`save_file` and `load_file`."""

    def path(self, directory: Path) -> Path:
        """The file of this rank."""
        return directory / f"rank-{self.rank:05}.safetensors"

    def save(self, directory: Path, state: Any) -> None:
        """`safetensors.torch.save_file`."""
        save_file(state, self.path(directory))

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, None]:
        """`safetensors.torch.load_file`; pread fills memory of its own, so nothing is copied."""
        if variant == "pread":
            return load_file(self.path(directory), backend="pread"), None
        mapped = load_file(self.path(directory))
        return {name: tensor.clone() for name, tensor in mapped.items()}, None

    def own_files(self, directory: Path) -> list[Path]:
        """One."""
        return [self.path(directory)]
