"""The contenders by name. Each module is imported only in the process that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benches.contenders.base import Contender


@dataclass(frozen=True)
class Entry:
    """What is known of a contender without importing it.

    Attributes:
        package: The distribution it comes from.
        module: The module here.
        attribute: Its class there.
        note: How it is used, where that is not obvious.
        load_variants: Further ways to load the same files, each a row of its own.
    """

    package: str
    module: str
    attribute: str
    note: str
    load_variants: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        """Whether it counts as another library."""
        return self.package != "penstock"


# In the order of the first round.
CONTENDERS = {
    "penstock": Entry(
        "penstock", "penstock", "Penstock", "defaults; loads verified", ("unverified",)
    ),
    "penstock-threads": Entry("penstock", "penstock", "PenstockThreads", "engine='threads'"),
    "penstock-buffered": Entry("penstock", "penstock", "PenstockBuffered", "direct='off'"),
    "torch": Entry("torch", "torch_save", "TorchSave", "torch.save, torch.load"),
    "torch-tuned": Entry(
        "torch",
        "torch_save",
        "TorchSaveTuned",
        "saved without CRC-32; loaded with mmap=True and copied",
    ),
    "safetensors": Entry(
        "safetensors", "safetensors", "Safetensors", "flat; load: mmap and copied", ("pread",)
    ),
    "dcp-1": Entry("torch", "dcp", "Dcp", "1 thread; fills targets"),
    "dcp-4": Entry("torch", "dcp", "DcpFour", "4 writing threads; fills targets"),
    "torchsnapshot": Entry("torchsnapshot", "torchsnapshot", "TorchSnapshot", "fills targets"),
    "tensorizer": Entry(
        "tensorizer",
        "tensorizer",
        "Tensorizer",
        "flat; hashes stored, not verified on load; index of 256 KiB at most",
    ),
    "fastsafetensors": Entry(
        "fastsafetensors", "fastsafetensors", "FastSafetensors", "flat; 16 shards"
    ),
    "torch-checkpointing": Entry(
        "torch-checkpointing",
        "torch_checkpointing",
        "TorchCheckpointing",
        "use_direct_io=False: its O_DIRECT writes fail with EINVAL",
    ),
}


def contender_class(name: str) -> type[Contender]:
    """The class of a contender.

    Raises:
        ImportError: Its library is not installed, or does not work with what is.
    """
    entry = CONTENDERS[name]
    module = import_module(f"benches.contenders.{entry.module}")
    found: type[Contender] = getattr(module, entry.attribute)
    return found
