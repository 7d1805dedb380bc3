"""PyTorch's distributed checkpoint in one process: one file per writing thread."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benches.contenders.base import Contender

if TYPE_CHECKING:
    from pathlib import Path

    from benches.states import StateSpec

# It says at every call that it runs without torch.distributed, which is what is asked of it.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


class Dcp(Contender):
    """One thread."""

    threads: ClassVar[int] = 1

    def targets(self, spec: StateSpec) -> Any:
        """DCP fills the tensors of a state."""
        return spec.nested_targets()

    def save(self, directory: Path, state: Any) -> None:
        """`dcp.save`."""
        writer = FileSystemWriter(directory, thread_count=self.threads, sync_files=True)
        save(state, storage_writer=writer, no_dist=True)

    def load(self, directory: Path, targets: Any, variant: str | None) -> tuple[Any, None]:
        """`dcp.load`; its reader has one thread, whatever the number of files."""
        load(targets, storage_reader=FileSystemReader(directory), no_dist=True)
        return targets, None


class DcpFour(Dcp):
    """Four threads."""

    threads = 4
