"""The contenders by name: writers of `penstock_bench`, and what only these benchmarks compare with.

Each module is imported only in the process that runs it.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_bench.peers.checkpoint import WRITERS, Entry

# In the order of the first round.
CONTENDERS = {
    "penstock": replace(WRITERS["penstock"], note="defaults; loads verified"),
    "penstock-threads": Entry(
        f"{__name__}.variants", "PenstockThreads", "penstock", "engine='threads'"
    ),
    "penstock-buffered": Entry(
        f"{__name__}.variants", "PenstockBuffered", "penstock", "direct='off'"
    ),
    "torch": replace(WRITERS["torch.save"], note="torch.save, torch.load"),
    "torch-tuned": Entry(
        f"{__name__}.variants",
        "TorchSaveTuned",
        "torch",
        "saved without CRC-32; loaded with mmap=True and copied",
    ),
    "safetensors": replace(WRITERS["safetensors"], note="flat; load: mmap and copied"),
    "dcp-1": replace(WRITERS["dcp"], note="1 thread; fills targets"),
    "dcp-4": Entry(f"{__name__}.variants", "DcpFour", "torch", "4 writing threads; fills targets"),
    "torchsnapshot": replace(WRITERS["torchsnapshot"], note="fills targets"),
    "tensorizer": Entry(
        f"{__name__}.tensorizer",
        "Tensorizer",
        "tensorizer",
        "flat; hashes stored, not verified on load; index of 256 KiB at most",
    ),
    "fastsafetensors": Entry(
        f"{__name__}.fastsafetensors", "FastSafetensors", "fastsafetensors", "flat; 16 shards"
    ),
    "torch-checkpointing": Entry(
        f"{__name__}.torch_checkpointing",
        "TorchCheckpointing",
        "torch-checkpointing",
        "use_direct_io=False: its O_DIRECT writes fail with EINVAL",
    ),
}
