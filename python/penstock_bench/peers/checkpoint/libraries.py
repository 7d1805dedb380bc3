"""Writers of other libraries."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from penstock_bench.harness.storage import files_below
from penstock_bench.peers.checkpoint.base import Writer

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.workloads.content import StateSpec

# DCP warns at every call that it runs without torch.distributed, as it does here on purpose.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
warnings.filterwarnings("ignore", "TypedStorage is deprecated")

_Loaded = tuple[Any, None]


class TorchSave(Writer):
    """`torch.save` and `torch.load`, with their defaults: a file for each rank."""

    suffix = ".pt"

    def save(self, directory: Path, state: Any) -> None:
        """`torch.save`."""
        import torch

        torch.save(state, self.path(directory))

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> _Loaded:
        """`torch.load`."""
        import torch

        return torch.load(self.path(directory), weights_only=True), None


class TorchSaveTuned(TorchSave):
    """No CRC-32 on saving; on loading, the file mapped and every tensor copied out of it."""

    def save(self, directory: Path, state: Any) -> None:
        """`torch.save` without its checksums."""
        import torch

        torch.serialization.set_crc32_options(False)
        super().save(directory, state)

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> _Loaded:
        """`torch.load` from a mapping; tied tensors stay tied."""
        import torch

        copies: dict[int, torch.Tensor] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                key = value.data_ptr()
                if key not in copies:
                    copies[key] = value.clone()
                return copies[key]
            if isinstance(value, dict):
                return {key: copied(item) for key, item in value.items()}
            return value

        return copied(torch.load(self.path(directory), weights_only=True, mmap=True)), None


class Safetensors(Writer):
    """safetensors: one buffered stream for each rank; loads mapped and copied, or by pread."""

    is_flat = True
    suffix = ".safetensors"

    def save(self, directory: Path, state: Any) -> None:
        """`safetensors.torch.save_file`."""
        from safetensors.torch import save_file

        save_file(state, self.path(directory))

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> _Loaded:
        """`safetensors.torch.load_file`; pread fills memory of its own, so nothing is copied."""
        from safetensors.torch import load_file

        if variant == "pread":
            return load_file(self.path(directory), backend="pread"), None
        mapped = load_file(self.path(directory))
        return {name: tensor.clone() for name, tensor in mapped.items()}, None


class Dcp(Writer):
    """PyTorch's distributed checkpoint: one file per rank and writing thread."""

    synced = "files"
    fills = True

    def __init__(self, rank: int = 0, ranks: int = 1, *, threads: int = 1) -> None:
        super().__init__(rank, ranks)
        self._threads = threads

    def input(self, source: StateSpec) -> Any:
        """The state of each rank under a name of its own: DCP saves one name once."""
        return self._own(source.nested())

    def targets(self, source: StateSpec) -> Any:
        """The same."""
        return self._own(source.nested_targets())

    def _own(self, state: Any) -> Any:
        return {f"rank-{self.rank}": state} if self.ranks > 1 else state

    def save(self, directory: Path, state: Any) -> None:
        """`dcp.save`."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(directory, thread_count=self._threads, sync_files=True)
        save(state, storage_writer=writer, no_dist=self.ranks == 1)

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> _Loaded:
        """`dcp.load`; its reader has one thread, whatever the number of files."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(targets, storage_reader=FileSystemReader(directory), no_dist=self.ranks == 1)
        return (targets[f"rank-{self.rank}"] if self.ranks > 1 else targets), None

    def own_files(self, directory: Path) -> list[Path]:
        """The files with the number of the rank; of the first, also the metadata."""
        return [
            path
            for path in files_below(directory)
            if path.name.startswith(f"__{self.rank}_") or (not self.rank and path.name[0] == ".")
        ]


class TorchSnapshot(Writer):
    """TorchSnapshot: chunks and slabs, sixteen writes at a time."""

    fills = True
    _taken: Any = None

    def input(self, source: StateSpec) -> Any:
        """The state as an application's state, which is not timed as it copies nothing."""
        from torchsnapshot import StateDict

        return StateDict(**source.nested())

    def targets(self, source: StateSpec) -> Any:
        """The same."""
        from torchsnapshot import StateDict

        return StateDict(**source.nested_targets())

    def save(self, directory: Path, state: Any) -> None:
        """`Snapshot.take`."""
        from torchsnapshot import Snapshot

        self._taken = Snapshot.take(str(directory / "snapshot"), {"state": state})

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> _Loaded:
        """`Snapshot.restore`."""
        from torchsnapshot import Snapshot

        Snapshot(str(directory / "snapshot")).restore({"state": targets})
        return dict(targets), None

    def own_files(self, directory: Path) -> list[Path]:
        """Those that the last save has put tensors of this rank into; of the first, also others."""
        if self._taken is None:
            return []
        place = directory / "snapshot"
        # Slabs have random names: of whom they are, only the manifest says.
        entries = self._taken.metadata.manifest.items()
        locations = {
            location
            for name, entry in entries
            if name.startswith(f"{self.rank}/")
            for location in _locations(entry)
        }
        others = [] if self.rank else [path for path in place.iterdir() if path.is_file()]
        return [*(place / location for location in sorted(locations)), *others]


def _locations(entry: Any) -> list[str]:
    """The files of an entry of TorchSnapshot's manifest."""
    if hasattr(entry, "location"):
        return [entry.location]
    return [chunk.tensor.location for chunk in getattr(entry, "chunks", [])]


class FastSafetensors(Writer):
    """Sixteen mapped shards on saving, direct reads by sixteen threads on loading; no GPU."""

    is_flat = True

    def save(self, directory: Path, state: Any) -> None:
        """`ParallelSaver.save`."""
        from fastsafetensors import ParallelSaver

        ParallelSaver().save(state, str(self.path(directory)))

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> _Loaded:
        """`SafeTensorsFileLoader`; its tensors own their memory together."""
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, device="cpu", nogds=True)
        loader.add_filenames({0: list(map(str, self.own_files(directory)))})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors, None


class Tensorizer(Writer):
    """The defaults: it chooses the number of readers by itself and does not verify.

    Sealed, by a random key: opening checks the tag of each chunk, so names and order are not
    authenticated.
    """

    is_flat = True
    suffix = ".tensors"

    def __init__(self, rank: int = 0, ranks: int = 1, *, is_sealed: bool = False) -> None:
        from tensorizer import DecryptionParams, EncryptionParams

        super().__init__(rank, ranks)
        self._encryption = EncryptionParams.random() if is_sealed else None
        self._decryption = None
        if self._encryption is not None:
            self._decryption = DecryptionParams.from_key(self._encryption.key)

    def save(self, directory: Path, state: Any) -> None:
        """`TensorSerializer.write_state_dict`."""
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(self.path(directory)), encryption=self._encryption)
        serializer.write_state_dict(state)
        serializer.close()

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> _Loaded:
        """`TensorDeserializer`, everything at once."""
        from tensorizer import TensorDeserializer

        with TensorDeserializer(
            str(self.path(directory)), device="cpu", encryption=self._decryption
        ) as tensors:
            return {name: tensors[name] for name in tensors}, None


class TorchCheckpointing(Writer):
    """One torch.save file per item, by four threads, read back by eight.

    The synchronous manager: an asynchronous save would not be durable when it returns. Its default
    of O_DIRECT fails with EINVAL on ext4 and XFS, as torch.save writes pieces of any length
    (0.1.1), so it is off. Nothing is given to fill: it then hands out the memory that it read into,
    instead of copying from there.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(rank, ranks)
        writer = CheckpointWriterConfig(file_write_max_threads=4)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=SyncCheckpointSaverConfig(writer_config=writer),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, directory: Path, state: Any) -> None:
        """`CheckpointManager.save`."""
        self._manager.save(str(self.path(directory)), state)

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> _Loaded:
        """`CheckpointManager.load`."""
        place = self.path(directory)
        items = [path.stem.rpartition("_")[0] for path in place.glob("*_0.pt")]
        return dict(self._manager.load(str(place), into=dict.fromkeys(items))), None

    def close(self) -> None:
        """Ends its threads."""
        self._manager.close()
