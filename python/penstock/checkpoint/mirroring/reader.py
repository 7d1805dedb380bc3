"""`TieredReader`: loads each step from its nearest complete copy."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from penstock.checkpoint.loading import load as loading
from penstock.checkpoint.mirroring.tiers import Tiers
from penstock.checkpoint.steps.reader import Reader
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    SealedError,
    StorageError,
    TamperedError,
)
from penstock.options import Options

if TYPE_CHECKING:
    from penstock import _native
    from penstock.checkpoint.loading.load import LoadRequest
    from penstock.checkpoint.mirroring.mirror import Mirror
    from penstock.checkpoint.ranks.group import Ranks

_ELSEWHERE = (
    CorruptCheckpointError,
    StorageError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
)
"""Errors that may affect one copy and not the other."""


class TieredReader(Reader):
    """Loads steps of a store and its mirror.

    Args:
        local: The local store.
        remote: The mirror.
        root: The store's directory.
        mirror: The mirror's settings.
        options: How bytes move.
        ranks: The ranks that load the same step; None for this process alone.
        needs: Whether an unreachable mirror is an error.
    """

    def __init__(
        self,
        local: _native.Store,
        remote: _native.Store,
        root: str,
        mirror: Mirror,
        options: Options | None,
        ranks: Ranks | None,
        *,
        needs: bool,
    ) -> None:
        self._tiers = Tiers(local, remote, warn=self._warn_once, needs=needs)
        super().__init__(self._tiers, root, options, ranks)
        self._url = mirror.url
        self._unsealing = mirror.unsealing

    def _warn_once(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def read(self, step: int, request: LoadRequest, *, verifies: bool = False) -> loading.Loaded:
        """Loads a step from the nearest copy, and damaged chunks from the other."""
        here, there = self.path(step), self._there(step)
        first, second = (here, there) if self._tiers.is_local(step) else (there, here)
        try:
            return self._read_at(step, first, second, request, verifies=verifies)
        except TamperedError:
            # The other copy may be of an older checkpoint, which an attacker would choose so.
            raise
        except _ELSEWHERE as error:
            try:
                loaded = self._read_at(step, second, first, request, verifies=verifies)
            except _ELSEWHERE:
                # It says more about the step than the absence of another copy.
                raise error from None
            except SealedError:
                error.add_note(f"{second} is sealed, and there are no identities")
                raise error from None
            self.warnings.append(f"step {step} is loaded from {second}: {error}")
            return loaded

    def is_about(self, step: int, error: StorageError) -> bool:
        """Whether a copy of this step is unreadable, and another step may well be readable."""
        return error.path.startswith(self._there(step)) or super().is_about(step, error)

    def _there(self, step: int) -> str:
        return f"{self._url}/{os.path.basename(self.path(step))}"

    def _request_at(self, request: LoadRequest, other: str, *, is_here: bool) -> LoadRequest:
        """Returns the request to one copy; a copy that the mirror sealed has other bytes."""
        if self._unsealing is None:
            return dataclasses.replace(request, replica=other)
        if is_here:
            return request
        # Signatures are demanded of every copy.
        unsealing = self._unsealing._replace(signers=request.unsealing.signers)
        return dataclasses.replace(request, unsealing=unsealing)

    def _read_at(
        self, step: int, path: str, other: str, request: LoadRequest, *, verifies: bool
    ) -> loading.Loaded:
        options = self._options or Options()
        if verifies:
            options = dataclasses.replace(options, verify=True)
        is_here = path == self.path(step)
        checkpoint_id = self.native.identity(step) if is_here else None
        try:
            loaded = loading.read(path, self._request_at(request, other, is_here=is_here), options)
        except TamperedError:
            raise
        except CorruptCheckpointError as error:
            if checkpoint_id is not None and error.is_proven:
                self.mark(step, checkpoint_id, is_good=False)
            raise
        self.warnings += loaded.warnings
        mended = [str(one) for one in loaded.report.fallbacks if one.kind == "copy"]
        self.warnings += mended
        if is_here and mended:
            self.mark(step, loaded.report.checkpoint_id, is_good=False)
        elif is_here and loaded.is_whole and not request.allow_partial and loaded.report.verified:
            self.mark(step, loaded.report.checkpoint_id, is_good=True)
        return loaded
