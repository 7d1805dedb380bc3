"""`Destination`: where and as what a state is saved."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.saving.groups import NO_GROUPS, Groups, check_copies, check_no_index
from penstock.common.found import is_there
from penstock.common.paths import absolute
from penstock.errors import (
    PenstockWarning,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where and as what a state is saved.

    Attributes:
        path: The checkpoint's directory.
        step: The training step, if any.
        metadata: The user's note as JSON text.
        overwrite: Whether a complete checkpoint is replaced.
        store: The store that it is a step of, if any: there a damaged one gives way.
        groups: Which tensors lie in shards of their own.
        files: Small files that go with it, by name.
    """

    path: str
    step: int | None
    metadata: str
    overwrite: bool
    store: _native.Store | None = None
    groups: Groups = NO_GROUPS
    files: Sequence[tuple[str, bytes]] = ()

    @property
    def label(self) -> str:
        """What ranks that save the same call the same, wherever they have it mounted."""
        name = os.path.basename(absolute(self.path))
        return name if self.step is None else f"{name} (step {self.step})"

    def __post_init__(self) -> None:
        check_no_index(self.groups, self.files)

    def check_free(self) -> None:
        """Refuses early what the commit would refuse in any case.

        Raises:
            CheckpointExistsError: A complete checkpoint is there.
        """
        self.give_way()
        if is_there(os.path.join(self.path, _native.MANIFEST)):
            # It says so with the same words, and after the directory is synced.
            _native.Attempt.begin(self.path, overwrite=False).abandon()

    def give_way(self) -> None:
        """Sets aside what is in the way and damaged, or cannot be read; see `SetAside`.

        Raises:
            StorageError: The operating system failed an operation, or somebody reads it for long;
                or a directory is in the way of a small file, which stays.
        """
        self._set_aside()
        check_copies(self.path, self.groups, self.files)

    def _set_aside(self) -> None:
        if self.store is None or self.step is None:
            return
        try:
            aside = self.store.give_way(self.step)
        except StorageError as error:
            if not self.overwrite:
                raise
            # To be replaced is what was asked for; the save matters more than what it replaces.
            warn(f"{self.path} is damaged and is replaced: it could not be set aside: {error}")
            return
        if aside is not None:
            warn(f"{self.path} cannot be loaded and makes way for a new save: {told_aside(aside)}")


def warn(message: str) -> None:
    """Warns, and fails nothing: not where warnings are errors either."""
    try:
        warnings.warn(message, PenstockWarning, stacklevel=3)
    except PenstockWarning:
        # Warnings are errors here. The save has not failed, so it goes on.
        sys.stderr.write(f"penstock: {message}\n")


def told_aside(path: str) -> str:
    """Where a step is now, in words that follow its damage."""
    return f"it is set aside as {path}, from where `penstock salvage` takes what is intact"
