"""safetensors: one buffered stream; loads mapped and copied, or read with pread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from benches.contenders.base import FlatContender

if TYPE_CHECKING:
    from pathlib import Path


class Safetensors(FlatContender):
    """`save_file` and `load_file`."""

    def save(self, directory: Path, state: Any) -> None:
        """`safetensors.torch.save_file`."""
        save_file(state, directory / "state.safetensors")

    def load(self, directory: Path, targets: Any, variant: str | None) -> tuple[Any, None]:
        """`safetensors.torch.load_file`; pread fills memory of its own, so nothing is copied."""
        path = directory / "state.safetensors"
        if variant == "pread":
            return load_file(path, backend="pread"), None
        return {name: tensor.clone() for name, tensor in load_file(path).items()}, None
