"""The ways to save while training: each as its documentation recommends for speed."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from pathlib import Path

State = dict[str, Any]

# DCP warns at every call that it runs without torch.distributed, as it does here on purpose.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


class Saver(ABC):
    """Saves the state of a training loop, step after step, into one directory."""

    def __init__(self, root: Path, optimizer: torch.optim.Optimizer) -> None:
        self.root = root
        self.optimizer = optimizer

    def path(self, step: int) -> Path:
        """Where a step goes: below here, everything is synced for everyone."""
        return self.root / f"step-{step:010}"

    @abstractmethod
    def save(self, step: int, state: State) -> Callable[[], object] | None:
        """Saves; returns what waits for the end of it, or None if nothing goes on."""

    def change(self) -> AbstractContextManager[object]:
        """A context in which the state may change; entering it waits until it may."""
        return nullcontext()

    def waited_seconds(self) -> float:
        """Seconds that the optimizer's own step has waited so far."""
        return 0.0

    def close(self) -> None:  # noqa: B027
        """Ends what outlives a save; not timed."""


class Nothing(Saver):
    """Training without saves."""

    def save(self, step: int, state: State) -> None:
        """Does not."""


class TorchSave(Saver):
    """One file, synced afterwards."""

    def save(self, step: int, state: State) -> None:
        """`torch.save`."""
        self.path(step).mkdir()
        torch.save(state, self.path(step) / "state.pt")


class Dcp(Saver):
    """`dcp.async_save` as it comes: the writer stages into memory of its own each time."""

    threads: ClassVar[int] = 1

    def __init__(self, root: Path, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(root, optimizer)
        self._stager = self._make_stager()
        self._staging: Future[Any] | None = None

    def _make_stager(self) -> Any:
        return None

    def save(self, step: int, state: State) -> Callable[[], object]:
        """`async_save` in a thread."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

        writer = FileSystemWriter(self.path(step), thread_count=self.threads, sync_files=True)
        response = async_save(state, storage_writer=writer, async_stager=self._stager, no_dist=True)
        if isinstance(response, AsyncSaveResponse):
            self._staging = response.staging_completion
            return response.upload_completion.result
        return response.result

    def change(self) -> AbstractContextManager[object]:
        """Waits until everything is staged, where that goes on in the background."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None
        return nullcontext()

    def close(self) -> None:
        """Gives the staging memory back."""
        if self._stager is not None:
            self._stager.close()


class DcpCached(Dcp):
    """With a stager that keeps its memory for the next save."""

    is_async_staging: ClassVar[bool] = False

    def _make_stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # Pinned memory and copies that do not block take an accelerator.
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=self.is_async_staging,
                use_non_blocking_copy=False,
            )
        )


class DcpCachedFour(DcpCached):
    """And four writing threads."""

    threads = 4


class DcpStaged(DcpCached):
    """Staged in the background too: the optimizer waits for it."""

    is_async_staging = True


class TorchCheckpointing(Saver):
    """Staged in the background into shared memory, written by a process of its own."""

    def __init__(self, root: Path, optimizer: torch.optim.Optimizer) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(root, optimizer)
        writer = CheckpointWriterConfig(file_write_max_threads=4)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(writer_config=writer),
                # Its O_DIRECT writes fail with EINVAL (0.1.1).
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, step: int, state: State) -> Callable[[], object]:
        """`CheckpointManager.save`."""
        saving = self._manager.save(str(self.path(step)), state)
        if saving is None:
            raise AssertionError("an asynchronous save has a future")
        result: Callable[[], object] = saving.result
        return result

    def change(self) -> AbstractContextManager[object]:
        """Its lock, as it asks for around the optimizer's step."""
        lock: AbstractContextManager[object] = self._manager.lock()
        return lock

    def close(self) -> None:
        """Ends its process."""
        self._manager.close()


class Penstock(Saver):
    """`CheckpointStore.save`."""

    def __init__(self, root: Path, optimizer: torch.optim.Optimizer) -> None:
        import penstock

        super().__init__(root, optimizer)
        self.store = penstock.CheckpointStore(root, no_dist=True)

    def save(self, step: int, state: State) -> Callable[[], object] | None:
        """The default."""
        self.store.save(step, state)
        return None

    def close(self) -> None:
        """Gives the staging memory back."""
        self.store.close()


class PenstockAsync(Penstock):
    """`save_async`: copied, then written in the background."""

    def save(self, step: int, state: State) -> Callable[[], object]:
        """The default."""
        return self.store.save_async(step, state).result


class PenstockLazy(Penstock):
    """`save_async(lazy=True)` with `guard`: copied in the background too."""

    def __init__(self, root: Path, optimizer: torch.optim.Optimizer) -> None:
        import penstock

        super().__init__(root, optimizer)
        self._guard = penstock.guard(optimizer)

    def save(self, step: int, state: State) -> Callable[[], object]:
        """The default."""
        return self.store.save_async(step, state, lazy=True).result

    def waited_seconds(self) -> float:
        """The waits that the guard counts."""
        return self._guard.waited_seconds


@dataclass(frozen=True)
class Entry:
    """A saver as the tables show it."""

    kind: type[Saver]
    package: str
    note: str


NOTHING = "nothing"
SYNC, ASYNC, LAZY = "penstock", "penstock-async", "penstock-lazy"

# In the order of the first round.
SAVERS = {
    NOTHING: Entry(Nothing, "torch", "no saves"),
    LAZY: Entry(PenstockLazy, "penstock", "save_async(lazy=True), penstock.guard(optimizer)"),
    ASYNC: Entry(PenstockAsync, "penstock", "save_async"),
    SYNC: Entry(Penstock, "penstock", "save"),
    "torch": Entry(TorchSave, "torch", "torch.save, which training waits for"),
    "dcp-async": Entry(Dcp, "torch", "async_save, FileSystemWriter, 1 thread"),
    "dcp-cached": Entry(DcpCached, "torch", "the same with a DefaultStager that is kept"),
    "dcp-cached-4": Entry(DcpCachedFour, "torch", "and 4 writing threads"),
    "dcp-staged": Entry(DcpStaged, "torch", "DefaultStager, use_async_staging; awaited by step()"),
    "torch-checkpointing": Entry(
        TorchCheckpointing,
        "torch-checkpointing",
        "async, its own process and lock(); use_direct_io=False: it fails with EINVAL",
    ),
}
DCP = tuple(name for name in SAVERS if name.startswith("dcp"))
