"""torch.save and torch.load, as they come and with what their documentation offers for speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benches.contenders.base import Contender

if TYPE_CHECKING:
    from pathlib import Path


class TorchSave(Contender):
    """The defaults."""

    def save(self, directory: Path, state: Any) -> None:
        """`torch.save`."""
        torch.save(state, directory / "state.pt")

    def load(self, directory: Path, targets: Any, variant: str | None) -> tuple[Any, None]:
        """`torch.load`."""
        return torch.load(directory / "state.pt", weights_only=True), None


class TorchSaveTuned(TorchSave):
    """No CRC-32 on saving; on loading, the file mapped and every tensor copied out of it."""

    def save(self, directory: Path, state: Any) -> None:
        """`torch.save` without its checksums."""
        torch.serialization.set_crc32_options(False)
        super().save(directory, state)

    def load(self, directory: Path, targets: Any, variant: str | None) -> tuple[Any, None]:
        """`torch.load` from a mapping."""
        state = torch.load(directory / "state.pt", weights_only=True, mmap=True)
        return _cloned(state, {}), None


def _cloned(value: Any, seen: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        # Tied tensors stay tied.
        key = value.data_ptr()
        if key not in seen:
            seen[key] = value.clone()
        return seen[key]
    if isinstance(value, dict):
        return {key: _cloned(item, seen) for key, item in value.items()}
    return value
