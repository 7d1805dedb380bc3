"""The writers by name. Each module is imported only in the process that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.bench.writers.base import Writer


@dataclass(frozen=True)
class Entry:
    """What is known of a writer without importing it.

    Attributes:
        module: The module here.
        attribute: Its class there.
        package: What has to be installed, as it is imported and as it is called by pip.
        note: What it does.
        is_emulated: Whether only its requests are made, by code of ours.
    """

    module: str
    attribute: str
    package: str
    note: str
    is_emulated: bool = False

    @property
    def missing(self) -> str | None:
        """What to do to have it; None where it is there."""
        if find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed: pip install {self.package}"


# In the order of the first round.
WRITERS = {
    "penstock": Entry("ours", "Penstock", "penstock", "save; loads verified"),
    "penstock-async": Entry("ours", "PenstockAsync", "penstock", "CheckpointStore.save_async"),
    "torch.save": Entry("torch_save", "TorchSave", "torch", "a file of each rank, buffered"),
    "safetensors": Entry(
        "safetensors", "Safetensors", "safetensors", "a file of each rank, one buffered stream"
    ),
    "dcp": Entry("dcp", "Dcp", "torch", "torch.distributed.checkpoint, one thread, synced files"),
    "torchsnapshot": Entry(
        "torchsnapshot", "TorchSnapshot", "torchsnapshot", "chunks and slabs, 16 writes at a time"
    ),
    "datastates": Entry(
        "emulated",
        "DataStates",
        "torch",
        "emulated DataStates-LLM: one thread, open, seek, write, close for each tensor",
        is_emulated=True,
    ),
    "fastpersist": Entry(
        "emulated",
        "FastPersist",
        "torch",
        "emulated FastPersist: O_DIRECT, two buffers of 64 MiB, 1 MiB requests, 8 in flight",
        is_emulated=True,
    ),
}
"""Every writer with what it is."""


def writer_class(name: str) -> type[Writer]:
    """The class of a writer.

    Raises:
        ImportError: Its library is not installed, or does not work with what is.
    """
    entry = WRITERS[name]
    module = import_module(f"penstock.bench.writers.{entry.module}")
    found: type[Writer] = getattr(module, entry.attribute)
    return found
