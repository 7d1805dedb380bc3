"""fastsafetensors: sixteen mapped shards on saving, direct reads by sixteen threads on loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastsafetensors import ParallelSaver, SafeTensorsFileLoader

from benches.contenders.base import FlatContender

if TYPE_CHECKING:
    from pathlib import Path


class FastSafetensors(FlatContender):
    """The defaults, without GPUDirect Storage."""

    def save(self, directory: Path, state: Any) -> None:
        """`ParallelSaver.save`."""
        ParallelSaver().save(state, str(directory / "state"))

    def load(self, directory: Path, targets: Any, variant: str | None) -> tuple[Any, None]:
        """`SafeTensorsFileLoader`; its tensors own their memory together."""
        loader = SafeTensorsFileLoader(None, device="cpu", nogds=True)
        loader.add_filenames({0: sorted(map(str, directory.glob("state-*.safetensors")))})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors, None
