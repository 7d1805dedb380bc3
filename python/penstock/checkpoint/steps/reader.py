"""`Reader`: chooses and loads a step of a store, and reports bad ones."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.checkpoint.loading import load as loading
from penstock.checkpoint.view.live import LiveState
from penstock.common.events import observed, report_end
from penstock.common.paths import absolute
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PenstockError,
    StorageError,
    TamperedError,
)
from penstock.options import Options
from penstock.tensors.arguments import to_native

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock import _native
    from penstock.checkpoint.loading.load import LoadRequest
    from penstock.checkpoint.ranks.group import Ranks

_T = TypeVar("_T")

_VANISHED_MAX = 8
"""Number of times that a step may disappear during a read before the error is raised."""

_LOST = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EREMOTEIO})
"""Errors of devices that cannot return the bytes; `EUCLEAN`, 117, is another."""

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.ESTALE})
"""Errors of steps that this process may not read, or not by this name any more."""

_OF_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that do not concern the stored bytes: the next step would fail as well."""


class Reader:
    """Loads steps of a store.

    Args:
        native: The store.
        root: Its directory.
        options: How bytes move.
        ranks: The ranks that load the same step; None for this process alone.

    Attributes:
        native: The store.
        root: Its directory.
        ranks: The ranks that load the same step.
        warnings: Warnings about skipped steps, for the user.
        is_awaited: Whether the other ranks take part in a further round of this load.
    """

    def __init__(
        self, native: StepSource, root: str, options: Options | None, ranks: Ranks | None = None
    ) -> None:
        self.native = native
        self.root = root
        self._options = options
        self.ranks = ranks
        self.warnings: list[str] = []
        self.is_awaited = False
        self._opened: tuple[int, _native.Checkpoint] | None = None

    def path(self, step: int) -> str:
        """Returns the directory of a step, whether it exists or not."""
        path = self.native.step_path(step)
        # The native module's paths are for display; the root may contain bytes that are not UTF-8.
        return os.path.join(self.root, os.path.basename(path))

    def newest(self, request: LoadRequest) -> loading.Loaded:
        """Loads the newest step whose files are present."""
        chosen = self.found("the newest step", self.newest_step)
        self.is_awaited = isinstance(request.into, LiveState)
        if self.ranks is not None:
            return self.step(chosen, request)
        for _ in range(_VANISHED_MAX):
            try:
                return self.step(chosen, request)
            except PenstockError:
                # Another process may commit a newer step and delete this one meanwhile.
                newest = self.found("the newest step", self.newest_step)
                if newest == chosen:
                    raise
            chosen = newest
        return self.step(chosen, request)

    def step(self, step: int, request: LoadRequest) -> loading.Loaded:
        """Loads a step; errors name the step before it."""
        try:
            return self.read(step, request)
        except TamperedError:
            raise
        except CorruptCheckpointError as error:
            raise self._with_way_back(error, step) from error
        except StorageError as error:
            if not self.is_about(step, error):
                raise
            raise StorageError(
                f"{error}; {self._way_back(step)}",
                path=error.path,
                errno=error.errno,
                needed_bytes=error.needed_bytes,
                free_bytes=error.free_bytes,
            ) from error

    def abort(self, error: BaseException) -> None:
        """Reports an error that ends the load to the other ranks, if they wait."""
        if self.ranks is not None and self.is_awaited and not self.ranks.has_failed:
            self.ranks.refuse(*self._question(), error)

    @observed("load", ends=False)
    def found(self, what: str, find: Callable[[], _T]) -> _T:
        """Returns the result of a search, which the coordinator makes if there are ranks."""
        ranks = self.ranks
        if ranks is None:
            return find()
        label, timeout_seconds = self._question()
        if not self.is_awaited:
            # The first round of a load, whose label distinguishes it from other loads.
            label = f"{what} of {os.path.basename(absolute(self.root))}"
            self.is_awaited = True
        found: _T = ranks.agree(label, timeout_seconds, lambda: {"found": find()})["found"]
        return found

    def is_true_for_all(self, is_true: bool) -> bool:
        """Whether the answer is True on all ranks that load this step."""
        ranks = self.ranks
        return is_true if ranks is None else ranks.is_true_for_all(*self._question(), is_true)

    def _question(self) -> tuple[str, float]:
        """Returns the label and the timeout of the rounds about a step.

        All rounds but the first share a label without a number: a rank that fails need not know the
        next question of the others.
        """
        timeout_seconds = to_native(self._options)["rank_timeout_seconds"]
        return f"loading of a step of {os.path.basename(self.root)}", timeout_seconds

    def report_damage(self, step: int, state: str, reason: str | None) -> None:
        """Reports a step that is found damaged without reading its data."""
        if state == "damaged":
            report_end("load", CorruptCheckpointError(reason or state, path=self.path(step)), 0)

    def read(self, step: int, request: LoadRequest, *, verifies: bool = False) -> loading.Loaded:
        """Loads a step, and records whether it is good; ``verifies`` overrides the options."""
        options = self._options
        if verifies:
            options = dataclasses.replace(options or Options(), verify=True)
        # Another checkpoint may replace the damaged one meanwhile, and must not be marked.
        opened = self.take_opened(step)
        if opened is None:
            checkpoint_id = observed("load", ends=False)(self.native.identity)(step)
        else:
            checkpoint_id = opened.id
        try:
            loaded = loading.read(self.path(step), request, options, opened)
        except TamperedError:
            # Without a mark, as a step that is marked as damaged is passed over.
            raise
        except CorruptCheckpointError as error:
            # A checkpoint with correct digests that makes no sense may make sense to other
            # versions.
            if checkpoint_id is not None and error.is_proven:
                self.mark(step, checkpoint_id, is_good=False)
            raise
        self.warnings += loaded.warnings
        if loaded.is_whole and not request.allow_partial and loaded.report.verified:
            self.mark(step, loaded.report.checkpoint_id, is_good=True)
        return loaded

    def mark(self, step: int, checkpoint_id: str, *, is_good: bool) -> None:
        """Records the outcome of reading a whole step."""
        mark = self.native.mark_verified if is_good else self.native.mark_damaged
        # A store may be read-only, and a mark only helps whoever deletes steps.
        with contextlib.suppress(StorageError):
            mark(step, checkpoint_id)

    def rows(self, last: int | None = None) -> list[tuple[int, str, str | None]]:
        """Returns the steps from a limit down to the first loadable one, with their states."""
        rows, opened = self.native.newest(last=last)
        self._opened = None if opened is None else (rows[-1][0], opened)
        return rows

    def take_opened(self, step: int) -> _native.Checkpoint | None:
        """Returns a step that was opened during the search, once; None if it was not."""
        found, self._opened = self._opened, None
        return None if found is None or found[0] != step else found[1]

    def newest_step(self) -> int:
        """Returns the newest step that is complete, or may be."""
        passed_over = []
        unfinished: list[int] = []
        for step, state, reason in self.rows():
            # An unreadable step may be good, so it is not skipped: reading it raises the reason.
            if state in ("complete", "newer", "unreadable"):
                self.warn_unfinished(unfinished, step)
                return step
            if state == "incomplete":
                unfinished.append(step)
            passed_over.append(f"{step} ({state})")
            if state in ("damaged", "partial"):
                warning = f"{self.path(step)} is {state} and passed over: {reason}"
                if warning not in self.warnings:
                    self.warnings.append(warning)
                    self.report_damage(step, state, reason)
        detail = f"none of its steps is complete: {', '.join(passed_over[:5])}"
        raise self.nothing(detail if passed_over else None)

    def warn_unfinished(self, steps: list[int], loaded: int) -> None:
        """Warns of the newest step without a manifest above the loaded one.

        An interrupted save is no damage, but looks like a lost manifest. A step that is being
        saved, or has no files, causes no warning.
        """
        ranks = self.ranks
        if ranks is not None and ranks.rank != 0:
            return
        # An unreadable directory causes another warning or error.
        with contextlib.suppress(PenstockError):
            for step in steps:
                is_left_behind = self.native.is_left_behind(step)
                if is_left_behind is False:
                    continue
                elsewhere = "" if is_left_behind else ", or another host is saving it"
                self.warnings.append(
                    f"step {step} was never finished, or its manifest is lost{elsewhere}; step "
                    f"{loaded} is loaded instead; `penstock verify --explain {self.path(step)}` "
                    "tells what is there; the next save of that step, or a sweep, removes it"
                )
                return

    def nothing(self, detail: str | None) -> CheckpointNotFoundError:
        """Returns the error for a store without a step to load."""
        return CheckpointNotFoundError(
            f"no checkpoint to load in {self.root}: {detail or 'nothing was saved to it yet'}; "
            "check the path, or save a state with store.save(step, state)",
            path=self.root,
        )

    def _way_back(self, step: int) -> str:
        """Describes the step before a bad one."""
        before = self.native.newest_complete(below=step)
        if before is None:
            return "no earlier step is complete"
        return (
            f"the step before it is complete: store.load(step={before}), or "
            "store.load(fallback=True) for the newest good one"
        )

    def is_about(self, step: int, error: StorageError) -> bool:
        """Whether the system cannot read this step, but may well be able to read another."""
        if is_lost(error) or error.errno in _REFUSED:
            # The error of an unavailable engine has no path in a step.
            return error.path.startswith(self.path(step))
        return error.errno not in _OF_PROCESS and self.is_unreadable(step)

    def is_unreadable(self, step: int) -> bool:
        """Whether this process may not read the step; its contents may be good."""
        return self.native.state(step) == "unreadable"

    def _with_way_back(self, error: CorruptCheckpointError, step: int) -> CorruptCheckpointError:
        """Returns the same error, extended by the step before."""
        return CorruptCheckpointError(
            f"{error}; {self._way_back(step)}",
            path=error.path,
            file=error.file,
            offset=error.offset,
            tensor=error.tensor,
            is_proven=error.is_proven,
        )


def is_lost(error: StorageError) -> bool:
    """Whether the device cannot return the bytes, to this host and for now."""
    return error.errno in _LOST or error.errno == 117


class StepSource(Protocol):
    """The interface of a store that a load uses."""

    def newest(
        self, *, last: int | None = None
    ) -> tuple[list[tuple[int, str, str | None]], _native.Checkpoint | None]:
        """Returns the steps from a limit down to the first loadable one, with states and reasons.

        That step is also returned open if it was opened on the way. Its files may still be removed;
        this only saves repeated requests to a bucket.
        """

    def state(self, step: int) -> str | None:
        """Returns the state of a step."""

    def step_path(self, step: int) -> str:
        """Returns the path of a step, whether it exists or not."""

    def identity(self, step: int) -> str | None:
        """Returns the id of the checkpoint at a step."""

    def newest_complete(self, *, below: int | None = None) -> int | None:
        """Returns the newest complete step that is not known to be damaged."""

    def is_left_behind(self, step: int) -> bool | None:
        """Whether a step without a manifest has files that no running save owns."""

    def mark_verified(self, step: int, checkpoint_id: str) -> None:
        """Records that a checkpoint was found good."""

    def mark_damaged(self, step: int, checkpoint_id: str) -> None:
        """Records that a checkpoint was found damaged."""

    def quarantine(self, step: int) -> str | None:
        """Quarantines a damaged step; returns its new path."""

    def quarantined(self) -> list[tuple[int, str]]:
        """Returns the steps that were quarantined."""
