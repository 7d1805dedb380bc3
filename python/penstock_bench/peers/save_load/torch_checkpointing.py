"""torch-checkpointing: one torch.save file per item, read back by eight threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from penstock_bench.harness.storage import files_below
from penstock_bench.peers.checkpoint.base import Writer

if TYPE_CHECKING:
    from pathlib import Path

_WRITE_THREADS = 4


class TorchCheckpointing(Writer):
    """The synchronous manager; an asynchronous save would not be durable when it returns.

    Its default of O_DIRECT fails with EINVAL on ext4 and XFS, as torch.save writes pieces of any
    length (0.1.1), so it is off. Nothing is given to fill: it then hands out the memory that it
    read into, instead of copying from there.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(rank, ranks)
        writer = CheckpointWriterConfig(file_write_max_threads=_WRITE_THREADS)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=SyncCheckpointSaverConfig(writer_config=writer),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, directory: Path, state: Any) -> None:
        """`CheckpointManager.save`."""
        self._manager.save(str(directory / "state"), state)

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, None]:
        """`CheckpointManager.load`."""
        items = [path.stem.rpartition("_")[0] for path in (directory / "state").glob("*_0.pt")]
        loaded = self._manager.load(str(directory / "state"), into=dict.fromkeys(items))
        return dict(loaded), None

    def own_files(self, directory: Path) -> list[Path]:
        """All: it saves alone."""
        return files_below(directory)

    def close(self) -> None:
        """Ends its threads."""
        self._manager.close()
