"""`Destination`: path, step and options of a saved checkpoint, and those before it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock import _native
from penstock.checkpoint.saving.groups import (
    NO_GROUPS,
    Groups,
    check_copies,
    check_no_index,
    read_files,
)
from penstock.common.found import is_there
from penstock.common.paths import absolute
from penstock.common.warn import warn
from penstock.errors import CannotSealError, PenstockError, StorageError
from penstock.reports import Fallback
from penstock.sealing.sealing import Sealing, check_sealing
from penstock.tensors.arguments import check_step, encode_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.checkpoint.saving.groups import Files
    from penstock.signing import SigningKeys


Part: TypeAlias = "tuple[int, str, int, int] | tuple[int, str, int, int, str]"
"""A rank, its part's file, size and digest, and in a sealed or signed save its SHA-256."""


class Committed(NamedTuple):
    """The result of a commit.

    Attributes:
        checkpoint_id: The checkpoint's id.
        manifest_bytes: Size of the manifest.
        fallbacks: Replaced files that could not be removed, and an index that is missing.
    """

    checkpoint_id: str
    manifest_bytes: int
    fallbacks: list[Fallback]


class Lineage:
    """Ids of the checkpoints that a store knows to be older than its next one, newest first.

    Ids are random, so a checkpoint that lists one was written after that one began. The list comes
    from memory: from what this store has saved, or the step that it has loaded since. Only a store
    that has done neither takes it from the newest step in the storage, where anybody may have
    written it.

    Args:
        native: The store.
    """

    def __init__(self, native: _native.Store) -> None:
        self._native = native
        self._former: list[str] | None = None
        self._loaded: int | None = None
        self._has_saved = False

    def former(self) -> list[str]:
        """Returns the ids for the next save, at most `PREVIOUS_MAX`."""
        if self._former is None:
            self._former = self._stored()
        return self._former

    def saved(self, checkpoint_id: str) -> None:
        """Records a checkpoint that was committed."""
        self._former = [checkpoint_id, *self.former()][: _native.PREVIOUS_MAX]
        self._has_saved = True

    def loaded(
        self, step: int | None, checkpoint_id: str, previous: tuple[str, ...], *, is_newest: bool
    ) -> None:
        """Records a checkpoint that was loaded.

        A run goes on from a step that it loads as the newest good one. It may only look at one
        that it asks for by number: that counts if it is newer than others before the first save.
        """
        rank = -1 if step is None else step
        is_look = self._has_saved or (self._loaded is not None and rank < self._loaded)
        if is_look and not is_newest:
            return
        self._loaded = rank
        self._former = [checkpoint_id, *previous][: _native.PREVIOUS_MAX]

    def _stored(self) -> list[str]:
        """Returns the ids that the newest complete step gives."""
        # A save does not fail because an older step cannot be read.
        with contextlib.suppress(PenstockError):
            newest = self._native.newest_complete()
            found = None if newest is None else self._native.lineage(newest)
            if found is not None:
                checkpoint_id, previous = found
                return [checkpoint_id, *previous][: _native.PREVIOUS_MAX]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Path, step and options of a saved checkpoint.

    Attributes:
        path: The checkpoint's directory.
        step: The training step, if any.
        metadata: The user's note as JSON text.
        overwrite: Whether a complete checkpoint is replaced.
        store: The store that contains the step, if any; a damaged step there is quarantined.
        groups: The groups of tensors that are stored in separate shards.
        files: Small files stored with the checkpoint, by name.
        sealing: For whom the checkpoint is sealed; None for a clear one.
        signing: The keys that sign it; None for none.
        lineage: The checkpoints before it, which a sealed or signed one lists; None for none.
    """

    path: str
    step: int | None = None
    metadata: str = "{}"
    overwrite: bool = False
    store: _native.Store | None = None
    groups: Groups = NO_GROUPS
    files: Sequence[tuple[str, bytes]] = ()
    sealing: Sealing | None = None
    signing: SigningKeys | None = None
    lineage: Lineage | None = None

    @classmethod
    def of(
        cls,
        path: str,
        *,
        step: int | None,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        groups: Mapping[str, str] | None,
        files: Files | None,
        store: _native.Store | None = None,
        sealing: Sealing | None = None,
        signing: SigningKeys | None = None,
        lineage: Lineage | None = None,
    ) -> Destination:
        """Checks the arguments of a caller's save; see `penstock.save`."""
        return cls(
            path=path,
            step=None if step is None else check_step(step),
            metadata=encode_metadata(metadata),
            overwrite=bool(overwrite),
            store=store,
            groups=Groups.check(groups),
            files=read_files(files),
            sealing=sealing,
            signing=signing,
            lineage=lineage,
        )

    @property
    def label(self) -> str:
        """A label of the save that is equal on all ranks, wherever they mount the directory."""
        name = os.path.basename(absolute(self.path))
        return name if self.step is None else f"{name} (step {self.step})"

    def __post_init__(self) -> None:
        check_no_index(self.groups, self.files)
        check_sealing(self.sealing)
        if self.sealing is not None:
            self._check_sealing()

    def _check_sealing(self) -> None:
        """Refuses what a sealed checkpoint cannot hold, before anything is written."""
        if self.groups.group_of:
            what = "groups= is for readers of models, which cannot open a sealed checkpoint"
        elif self.files:
            what = "files= are stored as they are, so they would stay clear"
        else:
            return
        raise CannotSealError(
            f"{self.path}: {what}; leave that out, or save without sealing=", path=self.path
        )

    def draw_key(self) -> _native.AttemptKey | None:
        """Returns the key of one attempt; None for a clear checkpoint.

        Raises:
            KmsError: A key management service that wraps it was not reachable.
        """
        return None if self.sealing is None else self.sealing.wrap_new()

    def former(self) -> list[str]:
        """Returns the ids of older checkpoints that this one lists.

        A checkpoint that is neither sealed nor signed lists none: anybody could change the list.
        """
        if self.lineage is None or (self.sealing is None and self.signing is None):
            return []
        return self.lineage.former()

    def committed(self, checkpoint_id: str) -> None:
        """Records that this checkpoint is complete, for the next one."""
        if self.lineage is not None and (self.sealing is not None or self.signing is not None):
            self.lineage.saved(checkpoint_id)

    def check_free(self) -> None:
        """Refuses early a save that the commit would refuse."""
        self.make_way()
        if is_there(os.path.join(self.path, _native.MANIFEST)):
            # Beginning an attempt raises the same error, after the directory is synced.
            _native.Attempt.begin(self.path, overwrite=False).abandon()

    def begin(self) -> _native.Attempt:
        """Begins an attempt to save, after `make_way`."""
        self.make_way()
        attempt = _native.Attempt.begin(self.path, overwrite=self.overwrite)
        if self.signing is not None:
            attempt.sign(self.signing.native)
        if former := self.former():
            attempt.follow(former)
        return attempt

    def commit(
        self, attempt: _native.Attempt, parts: Sequence[Part], index: str | None
    ) -> Committed:
        """Commits an attempt as the checkpoint."""
        committed = attempt.commit(
            parts,
            step=self.step,
            metadata=self.metadata,
            overwrite=self.overwrite,
            files=list(self.files),
            index=index,
        )
        self.committed(committed["checkpoint_id"])
        fallbacks = []
        if committed["left_behind"] is not None:
            fallbacks.append(Fallback(committed["left_behind"], "leftover"))
        if committed["unindexed"] is not None:
            fallbacks.append(Fallback(committed["unindexed"], "unindexed"))
        return Committed(committed["checkpoint_id"], committed["manifest_bytes"], fallbacks)

    def make_way(self) -> None:
        """Quarantines a damaged or unreadable step at the path; see `QuarantinedStep`."""
        self._quarantine()
        check_copies(self.path, self.groups, self.files)

    def _quarantine(self) -> None:
        if self.store is None or self.step is None:
            return
        try:
            quarantined = self.store.make_way(self.step)
        except StorageError as error:
            if not self.overwrite:
                raise
            # The caller asked for a replacement; the new save matters more than the old one.
            warn(f"{self.path} is damaged and is replaced: it could not be quarantined: {error}")
            return
        if quarantined is not None:
            where = describe_quarantined(quarantined)
            warn(f"{self.path} cannot be loaded and makes way for a new save: {where}")


def describe_quarantined(path: str) -> str:
    """Describes where a damaged step was quarantined."""
    return f"it is quarantined as {path}, from where `penstock salvage` takes what is intact"
