"""The writers by name. Each module is imported only in the process that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_bench.peers import entry


@dataclass(frozen=True)
class Entry(entry.Entry):
    """A writer.

    Attributes:
        is_emulated: Whether only its requests are made, by code of ours.
        load_variants: Further ways to load the same files.
    """

    is_emulated: bool = False
    load_variants: tuple[str, ...] = ()


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
