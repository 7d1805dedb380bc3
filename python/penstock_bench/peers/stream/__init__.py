"""Who generates text with a model that does not fit: by name, each imported in its own process."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_bench.peers.stream.base import Generator


@dataclass(frozen=True)
class Entry:
    """What is known of one without importing it.

    Attributes:
        module: The module of its class.
        attribute: Its class there.
        package: What has to be installed, as it is called by pip.
        note: What it does.
        is_limited: Whether memory is limited for it.
        has_files: Whether it reads from files that it makes before.
    """

    module: str
    attribute: str
    package: str
    note: str
    is_limited: bool = True
    has_files: bool = False

    @property
    def missing(self) -> str | None:
        """What to do to have it; None where it is there."""
        if find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed: pip install {self.package}"

    def generator(self) -> Generator:
        """One of it.

        Raises:
            ImportError: Its library is not installed, or does not work with what is.
        """
        made: Generator = getattr(import_module(self.module), self.attribute)()
        return made


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
