"""TorchSnapshot: chunks and slabs, sixteen writes at a time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torchsnapshot import Snapshot, StateDict

from penstock_bench.peers.checkpoint.base import Writer

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.workloads.content import Source

warnings.filterwarnings("ignore", "TypedStorage is deprecated")


class TorchSnapshot(Writer):
    """`Snapshot.take` and `restore`."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(rank, ranks)
        self._taken: Snapshot | None = None

    def targets(self, source: Source) -> Any:
        """It fills the tensors of a state."""
        return StateDict(**source.nested_targets())

    def input(self, source: Source) -> Any:
        """The state as an application's state, which is not timed as it copies nothing."""
        return StateDict(**source.nested())

    def save(self, directory: Path, state: Any) -> None:
        """`Snapshot.take`."""
        self._taken = Snapshot.take(str(directory / "snapshot"), {"state": state})

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, None]:
        """`Snapshot.restore`."""
        Snapshot(str(directory / "snapshot")).restore({"state": targets})
        return dict(targets), None

    def own_files(self, directory: Path) -> list[Path]:
        """Those that the last save has put tensors of this rank into; of the first, also others."""
        place = directory / "snapshot"
        if self._taken is None:
            return []
        # Slabs have random names: of whom they are, only the manifest says.
        locations = {
            location
            for name, entry in self._taken.metadata.manifest.items()
            if name.startswith(f"{self.rank}/")
            for location in _locations(entry)
        }
        found = [place / location for location in sorted(locations)]
        if not self.rank:
            found += [path for path in place.iterdir() if path.is_file()]
        return found


def _locations(entry: Any) -> list[str]:
    """The files of an entry of the manifest."""
    if hasattr(entry, "location"):
        return [entry.location]
    return [chunk.tensor.location for chunk in getattr(entry, "chunks", [])]
