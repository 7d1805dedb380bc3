"""The contenders by name. Each module is imported only in the process that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.bench.writers.base import Writer

_OURS = "penstock.bench.writers"
_HERE = "benches.contenders"


@dataclass(frozen=True)
class Entry:
    """What is known of a contender without importing it.

    Attributes:
        package: The distribution it comes from.
        module: The module, of the package or of this directory.
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
        "penstock", f"{_OURS}.ours", "Penstock", "defaults; loads verified", ("unverified",)
    ),
    "penstock-threads": Entry(
        "penstock", f"{_HERE}.variants", "PenstockThreads", "engine='threads'"
    ),
    "penstock-buffered": Entry("penstock", f"{_HERE}.variants", "PenstockBuffered", "direct='off'"),
    "torch": Entry("torch", f"{_OURS}.torch_save", "TorchSave", "torch.save, torch.load"),
    "torch-tuned": Entry(
        "torch",
        f"{_HERE}.variants",
        "TorchSaveTuned",
        "saved without CRC-32; loaded with mmap=True and copied",
    ),
    "safetensors": Entry(
        "safetensors",
        f"{_OURS}.safetensors",
        "Safetensors",
        "flat; load: mmap and copied",
        ("pread",),
    ),
    "dcp-1": Entry("torch", f"{_OURS}.dcp", "Dcp", "1 thread; fills targets"),
    "dcp-4": Entry("torch", f"{_HERE}.variants", "DcpFour", "4 writing threads; fills targets"),
    "torchsnapshot": Entry(
        "torchsnapshot", f"{_OURS}.torchsnapshot", "TorchSnapshot", "fills targets"
    ),
    "tensorizer": Entry(
        "tensorizer",
        f"{_HERE}.tensorizer",
        "Tensorizer",
        "flat; hashes stored, not verified on load; index of 256 KiB at most",
    ),
    "fastsafetensors": Entry(
        "fastsafetensors", f"{_HERE}.fastsafetensors", "FastSafetensors", "flat; 16 shards"
    ),
    "torch-checkpointing": Entry(
        "torch-checkpointing",
        f"{_HERE}.torch_checkpointing",
        "TorchCheckpointing",
        "use_direct_io=False: its O_DIRECT writes fail with EINVAL",
    ),
}


def contender_class(name: str) -> type[Writer]:
    """The class of a contender.

    Raises:
        ImportError: Its library is not installed, or does not work with what is.
    """
    entry = CONTENDERS[name]
    module = import_module(entry.module)
    found: type[Writer] = getattr(module, entry.attribute)
    return found
