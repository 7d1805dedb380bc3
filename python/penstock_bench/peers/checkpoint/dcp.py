"""PyTorch's distributed checkpoint: one file per rank and writing thread."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock_bench.harness.storage import files_below
from penstock_bench.peers.checkpoint.base import Writer

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.workloads.content import Source

# DCP warns at every call that it runs without torch.distributed, as it does here on purpose.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


class Dcp(Writer):
    """One thread."""

    synced = "files"
    threads: ClassVar[int] = 1

    def input(self, source: Source) -> Any:
        """The state of each rank under a name of its own: DCP saves one name once."""
        return {f"rank-{self.rank}": source.nested()} if self.ranks > 1 else source.nested()

    def targets(self, source: Source) -> Any:
        """DCP fills the tensors of a state."""
        made = source.nested_targets()
        return {f"rank-{self.rank}": made} if self.ranks > 1 else made

    def save(self, directory: Path, state: Any) -> None:
        """`dcp.save`."""
        writer = FileSystemWriter(directory, thread_count=self.threads, sync_files=True)
        save(state, storage_writer=writer, no_dist=self.ranks == 1)

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, None]:
        """`dcp.load`; its reader has one thread, whatever the number of files."""
        load(targets, storage_reader=FileSystemReader(directory), no_dist=self.ranks == 1)
        return (targets[f"rank-{self.rank}"] if self.ranks > 1 else targets), None

    def own_files(self, directory: Path) -> list[Path]:
        """The files with the number of the rank; of the first, also the metadata."""
        return [
            path
            for path in files_below(directory)
            if path.name.startswith(f"__{self.rank}_") or (not self.rank and path.name[0] == ".")
        ]
