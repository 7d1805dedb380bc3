"""`FallbackSearch`: finds a good step for a load with ``fallback=True``."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from penstock.checkpoint.saving.destination import describe_quarantined
from penstock.checkpoint.steps.reader import is_lost
from penstock.checkpoint.view.live import LiveState
from penstock.common.events import report_end
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    TamperedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.loading.load import Loaded, LoadRequest
    from penstock.checkpoint.steps.reader import Reader


class FallbackSearch:
    """Tries steps from the newest down to the first that proves good."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._ranks = reader.ranks
        self._skipped: list[tuple[int, str]] = []
        self._damaged: dict[int, int] = {}
        """Damaged steps, with the index of the warning about each."""
        self._refused: StorageError | None = None
        self._unfinished: list[int] = []
        """Steps without a manifest, newest first."""

    def run(self, last: int | None, request: LoadRequest) -> Loaded:
        """Loads the newest step that proves good, not above ``last`` if given.

        Digests are always checked, whatever the options say.
        """
        reader = self._reader
        for step, state, reason in self._rows(last):
            if state == "incomplete":
                self._unfinished.append(step)
                self._skipped.append((step, "its save never finished, or is still running"))
            elif state in ("damaged", "partial"):
                reader.report_damage(step, state, reason)
                self._skip_damaged(step, reason or state)
            elif (loaded := self._try(step, request)) is not None:
                reader.is_awaited = isinstance(request.into, LiveState)
                self._quarantine()
                reader.warn_unfinished(self._unfinished, step)
                report = dataclasses.replace(loaded.report, skipped=tuple(self._skipped))
                return loaded._replace(report=report)
        # Not "not found", on any rank: callers take that error as a reason to start from scratch.
        quarantined = reader.native.quarantined()
        is_nothing = not (self._damaged or self._refused or quarantined)
        is_nothing_for_all = reader.is_true_for_all(is_nothing)
        reader.is_awaited = False
        if self._refused is not None and not self._damaged:
            raise self._refused
        if not is_nothing_for_all:
            raise self._none_is_good([path for _, path in quarantined])
        tried = "; ".join(f"step {step}: {reason}" for step, reason in self._skipped[:5])
        nothing = reader.nothing(f"none of its steps is good: {tried}" if tried else None)
        raise report_end("load", nothing, 0)

    def _rows(self, last: int | None) -> Iterator[tuple[int, str, str | None]]:
        """Yields the steps and their states from the top, listing no more of them than needed."""
        reader = self._reader
        top: int | None = last
        while top is None or top >= 0:
            find = functools.partial(reader.rows, top)
            rows = reader.found("the newest good step", find)
            if top is not None and top == last and all(row[0] != last for row in rows):
                self._skip(top, "there is no such step")
            yield from rows
            if not rows or rows[-1][1] in ("incomplete", "damaged", "partial"):
                # This is the lowest step.
                return
            top = rows[-1][0] - 1

    def _try(self, step: int, request: LoadRequest) -> Loaded | None:
        """Loads a step, if it is good on all ranks."""
        loaded = self._read(step, request)
        if self._reader.is_true_for_all(loaded is not None):
            return loaded
        if loaded is not None:
            self._skip_damaged(step, "another rank could not load it")
        return None

    def _read(self, step: int, request: LoadRequest) -> Loaded | None:
        """Loads a step, unless something is wrong with it."""
        reader = self._reader
        try:
            return self._read_twice(step, request)
        except TamperedError:
            # Those who changed the step would choose the weights that training goes on from.
            raise
        except CorruptCheckpointError as error:
            self._skip_damaged(step, str(error))
        except StorageError as error:
            if not reader.is_about(step, error):
                raise
            # A step that is unreadable on this host may be good on another.
            self._refused = self._refused or error
            self._skip(step, str(error))
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            # A rank with an outdated view of the directory makes the others skip the step too.
            self._skip(step, "it was removed meanwhile, or is not to be seen from here yet")
        return None

    def _read_twice(self, step: int, request: LoadRequest) -> Loaded:
        try:
            return self._reader.read(step, request, verifies=True)
        except StorageError as error:
            if not is_lost(error):
                raise
        # The device error may have been transient.
        return self._reader.read(step, request, verifies=True)

    def _quarantine(self) -> None:
        """Quarantines damaged steps, now that a good step is found."""
        if self._ranks is not None and self._ranks.rank != 0:
            return
        reader = self._reader
        # The newest is quarantined last, as the last few are kept.
        for step, number in sorted(self._damaged.items()):
            # A step that is unreadable here may be good elsewhere.
            if reader.is_unreadable(step):
                continue
            try:
                path = reader.native.quarantine(step)
            except CheckpointNotFoundError:
                continue
            except StorageError as error:
                reader.warnings[number] += f"; it could not be quarantined: {error}"
                continue
            if path is not None:
                reader.warnings[number] += f"; {describe_quarantined(path)}"

    def _skip_damaged(self, step: int, reason: str) -> None:
        self._damaged[step] = len(self._reader.warnings)
        self._skip(step, reason)

    def _skip(self, step: int, reason: str) -> None:
        self._skipped.append((step, reason))
        self._reader.warnings.append(f"step {step} is passed over for an older one: {reason}")

    def _none_is_good(self, quarantined: list[str]) -> CorruptCheckpointError:
        root = self._reader.root
        found = []
        if self._skipped:
            steps = ", ".join(str(step) for step, _ in self._skipped[:5])
            found.append(f"tried {steps}; each has a warning of its own")
        if quarantined:
            found.append(f"quarantined as damaged: {', '.join(quarantined[-5:])}")
        return CorruptCheckpointError(
            f"no step of {root} is good ({'; '.join(found) or 'other ranks have some'}); "
            "`penstock verify --explain` tells what is intact of one, `penstock salvage` "
            "recovers that for penstock.load; to begin anew, use an empty directory",
            path=root,
        )
