"""The writers by name."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_bench import peers

OURS, LIBRARIES, EMULATED = (f"{__name__}.{name}" for name in ("ours", "libraries", "emulated"))


@dataclass(frozen=True)
class Entry(peers.Entry):
    """A writer.

    Attributes:
        load_variants: Further ways to load the same files.
    """

    load_variants: tuple[str, ...] = ()

    @property
    def is_emulated(self) -> bool:
        """Whether only its requests are made, by code of ours."""
        return self.module == EMULATED


# In the order of the first round.
WRITERS = {
    "penstock": Entry(OURS, "Penstock", "penstock", "save; loads verified", ("unverified",)),
    "penstock-async": Entry(OURS, "PenstockAsync", "penstock", "CheckpointStore.save_async"),
    "penstock-sealed": Entry(
        OURS,
        "Penstock",
        "penstock",
        "as penstock, sealed by a key file",
        options={"is_sealed": True},
    ),
    "penstock-async-sealed": Entry(
        OURS,
        "PenstockAsync",
        "penstock",
        "as penstock-async, sealed by a key file",
        options={"is_sealed": True},
    ),
    "torch.save": Entry(LIBRARIES, "TorchSave", "torch", "a file of each rank, buffered"),
    "safetensors": Entry(
        LIBRARIES,
        "Safetensors",
        "safetensors",
        "a file of each rank, one buffered stream",
        ("pread",),
    ),
    "dcp": Entry(
        LIBRARIES, "Dcp", "torch", "torch.distributed.checkpoint, one thread, synced files"
    ),
    "torchsnapshot": Entry(
        LIBRARIES, "TorchSnapshot", "torchsnapshot", "chunks and slabs, 16 writes at a time"
    ),
    "tensorizer": Entry(
        LIBRARIES,
        "Tensorizer",
        "tensorizer",
        "flat; hashes stored, not verified on load; index of 256 KiB at most",
    ),
    "tensorizer-sealed": Entry(
        LIBRARIES,
        "Tensorizer",
        "tensorizer",
        "as tensorizer, each chunk encrypted by libsodium",
        options={"is_sealed": True},
    ),
    "datastates": Entry(
        EMULATED,
        "DataStates",
        "torch",
        "emulated DataStates-LLM: one thread, open, seek, write, close for each tensor",
    ),
    "fastpersist": Entry(
        EMULATED,
        "FastPersist",
        "torch",
        "emulated FastPersist: O_DIRECT, two buffers of 64 MiB, 1 MiB requests, 8 in flight",
    ),
}
"""Every writer with what it is."""

SEALED = "-sealed"
"""The end of the name of a writer that encrypts; without it, it is the name of the clear one."""


def with_sealed(names: list[str]) -> list[str]:
    """The names, and those of the same writers that encrypt, where there are some."""
    sealed = (f"{name}{SEALED}" for name in names)
    return list(dict.fromkeys([*names, *(name for name in sealed if name in WRITERS)]))
