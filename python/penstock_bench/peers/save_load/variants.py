"""Writers with other settings than the usual ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from penstock_bench.peers.checkpoint.dcp import Dcp
from penstock_bench.peers.checkpoint.ours import Penstock
from penstock_bench.peers.checkpoint.torch_save import TorchSave

if TYPE_CHECKING:
    from pathlib import Path


class PenstockThreads(Penstock):
    """The engine for kernels and containers without io_uring."""

    settings: ClassVar[dict[str, Any]] = {"engine": "threads"}


class PenstockBuffered(Penstock):
    """The fallback for file systems without direct I/O."""

    settings: ClassVar[dict[str, Any]] = {"direct": "off"}


class DcpFour(Dcp):
    """Four threads."""

    threads = 4


class TorchSaveTuned(TorchSave):
    """No CRC-32 on saving; on loading, the file mapped and every tensor copied out of it."""

    def save(self, directory: Path, state: Any) -> None:
        """`torch.save` without its checksums."""
        torch.serialization.set_crc32_options(False)
        super().save(directory, state)

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, None]:
        """`torch.load` from a mapping."""
        state = torch.load(self.path(directory), weights_only=True, mmap=True)
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
