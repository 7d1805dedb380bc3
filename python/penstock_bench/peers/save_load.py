"""The contenders of `make bench` by name: writers, and what only it compares with."""

from __future__ import annotations

from dataclasses import replace

from penstock_bench.peers.checkpoint import LIBRARIES, OURS, WRITERS, Entry

# In the order of the first round.
CONTENDERS = {
    "penstock": replace(WRITERS["penstock"], note="defaults; loads verified"),
    # For kernels and containers without io_uring, and for file systems without direct I/O.
    "penstock-threads": Entry(
        OURS, "Penstock", "penstock", "engine='threads'", options={"engine": "threads"}
    ),
    "penstock-buffered": Entry(
        OURS, "Penstock", "penstock", "direct='off'", options={"direct": "off"}
    ),
    "torch": replace(WRITERS["torch.save"], note="torch.save, torch.load"),
    "torch-tuned": Entry(
        LIBRARIES,
        "TorchSaveTuned",
        "torch",
        "saved without CRC-32; loaded with mmap=True and copied",
    ),
    "safetensors": replace(WRITERS["safetensors"], note="flat; load: mmap and copied"),
    "dcp-1": replace(WRITERS["dcp"], note="1 thread; fills targets"),
    "dcp-4": Entry(
        LIBRARIES, "Dcp", "torch", "4 writing threads; fills targets", options={"threads": 4}
    ),
    "torchsnapshot": replace(WRITERS["torchsnapshot"], note="fills targets"),
    "tensorizer": WRITERS["tensorizer"],
    "fastsafetensors": Entry(LIBRARIES, "FastSafetensors", "fastsafetensors", "flat; 16 shards"),
    "torch-checkpointing": Entry(
        LIBRARIES,
        "TorchCheckpointing",
        "torch-checkpointing",
        "use_direct_io=False: its O_DIRECT writes fail with EINVAL",
    ),
}
