"""Opens the checkpoint at a path, or the newest complete step of a store."""

from __future__ import annotations

import warnings

from penstock import _native
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.checkpoint.loading.path_kind import is_checkpoint, steps_in
from penstock.checkpoint.steps.reader import Reader
from penstock.errors import CheckpointNotFoundError, PenstockWarning
from penstock.sealing.unsealing import CLEAR, Unsealing

_VANISHED_MAX = 8
"""Number of times that the newest step may disappear before opening, while newer ones are saved."""


def is_penstock(path: str) -> bool:
    """Whether a directory is a checkpoint, or a store of them."""
    return is_checkpoint(path) or bool(steps_in(path))


def open_newest(path: str, *, stacklevel: int, unsealing: Unsealing = CLEAR) -> OpenCheckpoint:
    """Opens a checkpoint; the caller releases it.

    The path is that of a checkpoint, or of a store, whose newest complete step is used.
    """
    if is_checkpoint(path) or not steps_in(path):
        return OpenCheckpoint(path, None, unsealing)
    reader = Reader(_native.Store(path), path, None)
    step = reader.newest_step()
    for message in reader.warnings:
        warnings.warn(PenstockWarning(message), stacklevel=stacklevel + 1)
    for _ in range(_VANISHED_MAX):
        try:
            return OpenCheckpoint(reader.path(step), reader.take_opened(step), unsealing)
        except CheckpointNotFoundError:
            newest = reader.newest_step()
            if newest == step:
                raise
            step = newest
    return OpenCheckpoint(reader.path(step), None, unsealing)
