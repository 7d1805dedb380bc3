"""fastsafetensors: sixteen mapped shards on saving, direct reads by sixteen threads on loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastsafetensors import ParallelSaver, SafeTensorsFileLoader

from penstock_bench.harness.storage import files_below
from penstock_bench.peers.checkpoint.base import FlatWriter

if TYPE_CHECKING:
    from pathlib import Path


class FastSafetensors(FlatWriter):
    """The defaults, without GPUDirect Storage."""

    def save(self, directory: Path, state: Any) -> None:
        """`ParallelSaver.save`."""
        ParallelSaver().save(state, str(directory / "state"))

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, None]:
        """`SafeTensorsFileLoader`; its tensors own their memory together."""
        loader = SafeTensorsFileLoader(None, device="cpu", nogds=True)
        loader.add_filenames({0: sorted(map(str, directory.glob("state-*.safetensors")))})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors, None

    def own_files(self, directory: Path) -> list[Path]:
        """All: it saves alone."""
        return files_below(directory)
