"""The writers by name. Each module is imported only in the process that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_bench.peers.checkpoint.base import Writer


@dataclass(frozen=True)
class Entry:
    """What is known of a writer without importing it.

    Attributes:
        module: The module of its class.
        attribute: Its class there.
        package: What has to be installed, as it is called by pip.
        note: What it does.
        is_emulated: Whether only its requests are made, by code of ours.
        load_variants: Further ways to load the same files.
    """

    module: str
    attribute: str
    package: str
    note: str
    is_emulated: bool = False
    load_variants: tuple[str, ...] = ()

    @property
    def missing(self) -> str | None:
        """What to do to have it; None where it is there."""
        if find_spec(self.package.replace("-", "_")) is not None:
            return None
        return f"{self.package} is not installed: pip install {self.package}"

    def writer(self, rank: int = 0, ranks: int = 1) -> Writer:
        """One for a rank of so many that save together.

        Raises:
            ImportError: Its library is not installed, or does not work with what is.
        """
        kind: type[Writer] = getattr(import_module(self.module), self.attribute)
        return kind(rank, ranks)


# In the order of the first round.
WRITERS = {
    "penstock": Entry(
        f"{__name__}.ours",
        "Penstock",
        "penstock",
        "save; loads verified",
        load_variants=("unverified",),
    ),
    "penstock-async": Entry(
        f"{__name__}.ours", "PenstockAsync", "penstock", "CheckpointStore.save_async"
    ),
    "torch.save": Entry(
        f"{__name__}.torch_save", "TorchSave", "torch", "a file of each rank, buffered"
    ),
    "safetensors": Entry(
        f"{__name__}.safetensors",
        "Safetensors",
        "safetensors",
        "a file of each rank, one buffered stream",
        load_variants=("pread",),
    ),
    "dcp": Entry(
        f"{__name__}.dcp",
        "Dcp",
        "torch",
        "torch.distributed.checkpoint, one thread, synced files",
    ),
    "torchsnapshot": Entry(
        f"{__name__}.torchsnapshot",
        "TorchSnapshot",
        "torchsnapshot",
        "chunks and slabs, 16 writes at a time",
    ),
    "datastates": Entry(
        f"{__name__}.emulated",
        "DataStates",
        "torch",
        "emulated DataStates-LLM: one thread, open, seek, write, close for each tensor",
        is_emulated=True,
    ),
    "fastpersist": Entry(
        f"{__name__}.emulated",
        "FastPersist",
        "torch",
        "emulated FastPersist: O_DIRECT, two buffers of 64 MiB, 1 MiB requests, 8 in flight",
        is_emulated=True,
    ),
}
"""Every writer with what it is."""
