"""`Files`: the files of a tag that one rank saves, as a state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from penstock import Training
from penstock.checkpoint.view.live import LiveState
from penstock.errors import PenstockError
from penstock.integrations import raw
from penstock.integrations.deepspeed import tags, values

if TYPE_CHECKING:
    from collections.abc import Sequence


class Files(LiveState):
    """What DeepSpeed hands over, put together when the save takes it.

    What a save takes apart may fail on one rank: the save tells the others. A failure before that
    would leave them in a barrier of DeepSpeed's. So all that can fail is done in `state_dict`.

    Args:
        directory: The tag's directory.
        pickled: Names of values that are stored as pickle.
        rng: Whether the random states of this rank belong to it.
    """

    def __init__(self, directory: str, *, pickled: Sequence[str], rng: bool) -> None:
        self._directory = directory
        self._pickled = pickled
        self._rng = rng
        self._states: dict[str, Any] = {}

    def add(self, path: str, state: Any) -> None:
        """Takes a file."""
        self._states[os.path.abspath(path)] = state

    def state_dict(self) -> dict[str, Any]:
        """The state; leaves a stub for each file.

        Raises:
            CheckpointExistsError: DeepSpeed itself has saved one of them.
            UnsupportedStateError: A value that was to be pickled cannot be.
            StorageError: The operating system failed an operation.
        """
        files = {}
        for path, state in self._states.items():
            above, name = os.path.split(path)
            if above != self._directory:
                raise PenstockError(f"{path} lies outside of the tag {self._directory}")
            tags.check_stub(path)
            files[name] = raw.packed(values.plain(state), name, self._pickled)
            # Not of bytes: these would be taken for the state of a generator, one of each rank.
            files[name][tags.SHARED] = torch.zeros(1)
        tags.make(self._directory)
        for path in self._states:
            tags.put_stub(path)
        return {"files": files, **({"rng": Training().state_dict()["rng"]} if self._rng else {})}

    def _optimizers(self) -> list[Any]:
        return []
