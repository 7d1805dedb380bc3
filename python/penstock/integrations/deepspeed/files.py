"""`Files`: the files of a tag that one rank saves, as one state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from penstock import Training
from penstock.errors import PenstockError
from penstock.integrations import pickling
from penstock.integrations.deepspeed import tags, values
from penstock.plugin import LiveState

if TYPE_CHECKING:
    from collections.abc import Sequence


class Files(LiveState):
    """Files received from DeepSpeed, converted when the save flattens the state.

    A save tells all ranks if flattening fails on one. A failure before that would leave the others
    in a barrier of DeepSpeed's. So `state_dict` does everything that can fail.

    Args:
        directory: The tag's directory.
        pickled: Names of values to store as pickled bytes.
        rng: Whether to save the random states of this rank with it.
    """

    def __init__(self, directory: str, *, pickled: Sequence[str], rng: bool) -> None:
        self._directory = directory
        self._pickled = pickled
        self._rng = rng
        self._states: dict[str, Any] = {}

    def add(self, path: str, state: Any) -> None:
        """Adds a file."""
        self._states[os.path.abspath(path)] = state

    def state_dict(self) -> dict[str, Any]:
        """The state; writes a stub for each file.

        Raises:
            CheckpointExistsError: DeepSpeed itself has saved one of them.
            UnsupportedStateError: A value to be pickled cannot be pickled.
            StorageError: The operating system failed an operation.
        """
        files = {}
        for path, state in self._states.items():
            above, name = os.path.split(path)
            if above != self._directory:
                raise PenstockError(f"{path} lies outside of the tag {self._directory}")
            tags.check_stub(path)
            files[name] = pickling.packed(values.plain(state), name, self._pickled)
            # Not of bytes, which would be taken for the state of a generator, one for each rank.
            files[name][tags.SHARED] = torch.zeros(1)
        tags.make(self._directory)
        for path in self._states:
            tags.put_stub(path)
        return {"files": files, **({"rng": Training().state_dict()["rng"]} if self._rng else {})}

    def _optimizers(self) -> list[Any]:
        return []
