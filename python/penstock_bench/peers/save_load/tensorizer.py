"""tensorizer: one file, several writing and reading threads, hashes stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorizer import TensorDeserializer, TensorSerializer

from penstock_bench.harness.storage import files_below
from penstock_bench.peers.checkpoint.base import FlatWriter

if TYPE_CHECKING:
    from pathlib import Path


class Tensorizer(FlatWriter):
    """The defaults: it chooses the number of readers by itself and does not verify."""

    def save(self, directory: Path, state: Any) -> None:
        """`TensorSerializer.write_state_dict`."""
        serializer = TensorSerializer(str(directory / "state.tensors"))
        serializer.write_state_dict(state)
        serializer.close()

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, None]:
        """`TensorDeserializer`, everything at once."""
        with TensorDeserializer(str(directory / "state.tensors"), device="cpu") as tensors:
            return {name: tensors[name] for name in tensors}, None

    def own_files(self, directory: Path) -> list[Path]:
        """All: it saves alone."""
        return files_below(directory)
