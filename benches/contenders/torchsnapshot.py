"""TorchSnapshot: chunks and slabs, sixteen writes at a time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torchsnapshot import Snapshot, StateDict

from benches.contenders.base import Contender

if TYPE_CHECKING:
    from pathlib import Path

    from benches.states import StateSpec

warnings.filterwarnings("ignore", "TypedStorage is deprecated")


class TorchSnapshot(Contender):
    """`Snapshot.take` and `restore`."""

    def targets(self, spec: StateSpec) -> Any:
        """It fills the tensors of a state."""
        return StateDict(**spec.nested_targets())

    def input(self, spec: StateSpec) -> Any:
        """The state as an application's state, which is not timed as it copies nothing."""
        return StateDict(**spec.nested())

    def save(self, directory: Path, state: Any) -> None:
        """`Snapshot.take`."""
        Snapshot.take(str(directory / "snapshot"), {"state": state})

    def load(self, directory: Path, targets: Any, variant: str | None) -> tuple[Any, None]:
        """`Snapshot.restore`."""
        Snapshot(str(directory / "snapshot")).restore({"state": targets})
        return dict(targets), None
