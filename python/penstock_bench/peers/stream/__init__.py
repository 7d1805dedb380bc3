"""Who generates text with a model that does not fit: by name, each imported in its own process."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_bench.peers import entry


@dataclass(frozen=True)
class Entry(entry.Entry):
    """A library that generates text.

    Attributes:
        is_limited: Whether memory is limited for it.
        has_files: Whether it reads from files that it makes before.
    """

    is_limited: bool = True
    has_files: bool = False


RESIDENT, OURS = "resident", "penstock"

GENERATORS = {
    RESIDENT: Entry(
        f"{__name__}.resident",
        "Resident",
        "transformers",
        "the whole model in memory, without a limit: what computing takes",
        is_limited=False,
    ),
    OURS: Entry(f"{__name__}.ours", "Ours", "transformers", "penstock.offload.stream"),
    "accelerate": Entry(
        f"{__name__}.accelerate",
        "Accelerate",
        "accelerate",
        "disk_offload, from its own files",
        has_files=True,
    ),
    "airllm": Entry(
        f"{__name__}.airllm", "AirLlm", "airllm", "its own files, a layer ahead", has_files=True
    ),
    "zero": Entry(
        f"{__name__}.zero", "Zero", "deepspeed", "ZeRO-Inference, by DeepSpeed's async_io"
    ),
    "zero-penstock": Entry(
        f"{__name__}.zero", "ZeroOnOurs", "deepspeed", "ZeRO-Inference, by penstock deepspeed"
    ),
}
"""In the order of the first round."""
