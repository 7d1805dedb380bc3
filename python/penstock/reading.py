"""Which step of a store is loaded, and what is done about one that turns out to be bad."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from typing import TYPE_CHECKING, TypeVar

from penstock import _native, loading
from penstock.arguments import to_native
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PenstockError,
    StorageError,
)
from penstock.events import observed, told
from penstock.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.loading import Wanted
    from penstock.ranks import Ranks

_T = TypeVar("_T")

_VANISHED_MAX = 8
"""How often a step may disappear while it is read before its error is passed on."""

_LOST = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EREMOTEIO})
"""What systems answer where the device cannot give the bytes back; and `EUCLEAN`, 117."""


class Reader:
    """Loads steps of a store.

    Args:
        native: The store.
        root: Its directory.
        options: How bytes move.
        ranks: Who else loads the same; None for this process alone.

    Attributes:
        warnings: What the user should know about the steps that were passed over.
    """

    def __init__(
        self, native: _native.Store, root: str, options: Options | None, ranks: Ranks | None = None
    ) -> None:
        self._native = native
        self._root = root
        self._options = options
        self._ranks = ranks
        self.warnings: list[str] = []

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        path = self._native.step_path(step)
        # The native module gives paths for display; ours also holds what is no UTF-8.
        return os.path.join(self._root, os.path.basename(path))

    def newest(self, wanted: Wanted) -> loading.Loaded:
        """Loads the newest step whose files are there.

        Raises:
            CheckpointNotFoundError: There is none.
            CorruptCheckpointError: Its data is damaged.
        """
        chosen = self._found("the newest step", self._newest)
        if self._ranks is not None:
            return self.step(chosen, wanted)
        for _ in range(_VANISHED_MAX):
            try:
                return self.step(chosen, wanted)
            except PenstockError:
                # A save elsewhere may commit a newer step and retire this one under our hands.
                if chosen in self._complete():
                    raise
            chosen = self._found("the newest step", self._newest)
        return self.step(chosen, wanted)

    def step(self, step: int, wanted: Wanted) -> loading.Loaded:
        """Loads a step.

        Raises:
            CorruptCheckpointError: It is damaged; the message names the step before.
        """
        try:
            return self._read(step, wanted)
        except CorruptCheckpointError as error:
            raise self._with_way_back(error, step) from error

    def newest_good(self, last: int | None, wanted: Wanted) -> loading.Loaded:
        """Loads the newest step that turns out to be good, or the newest such up to ``last``.

        What is good is told by the digests, whatever the options say.

        Raises:
            CheckpointNotFoundError: There is none.
            CorruptCheckpointError: All there are turn out to be damaged.
        """
        skipped: list[tuple[int, str]] = []
        ranks = self._ranks
        found = self._found("the newest good step", self._native.steps)
        rows = [row for row in found if last is None or row[0] <= last]
        is_damaged = False
        if last is not None and all(step != last for step, _, _ in rows):
            self._skip(last, "there is no such step", skipped)
        for step, state, reason in sorted(rows, reverse=True):
            if state == "incomplete":
                skipped.append((step, "its save never finished, or is still running"))
                continue
            if state in ("damaged", "partial"):
                is_damaged = True
                self._tell_damage(step, state, reason)
                self._skip(step, reason or state, skipped)
                continue
            loaded = None
            try:
                loaded = self._read(step, wanted, verifies=True)
            except CorruptCheckpointError as error:
                is_damaged = True
                self._skip(step, str(error), skipped)
            except StorageError as error:
                if error.errno not in _LOST and error.errno != 117:
                    if ranks is not None:
                        ranks.refuse(*self._question(step), error)
                    raise
                is_damaged = True
                self._skip(step, str(error), skipped)
            except (CheckpointNotFoundError, IncompleteCheckpointError):
                skipped.append((step, "it was removed meanwhile"))
            except BaseException as error:
                if ranks is not None:
                    ranks.refuse(*self._question(step), error)
                raise
            is_good = loaded is not None
            if ranks is not None and not self._is_good_for_all(ranks, step, is_good) and is_good:
                is_damaged = True
                self._skip(step, "another rank could not load it", skipped)
            elif loaded is not None:
                report = dataclasses.replace(loaded.report, skipped=tuple(skipped))
                return loaded._replace(report=report)
        if is_damaged:
            # Not "not found": who catches that starts from scratch.
            steps = ", ".join(str(step) for step, _ in skipped[:5])
            raise CorruptCheckpointError(
                f"no step of {self._root} is good (tried {steps}; each has a warning of its own); "
                "`penstock verify --explain` tells what is intact of one, `penstock salvage` "
                "recovers that",
                path=self._root,
            )
        tried = "; ".join(f"step {step}: {reason}" for step, reason in skipped[:5])
        nothing = self._nothing(f"none of its steps is good: {tried}" if skipped else None)
        raise told("load", nothing, 0)

    @observed("load", ends=False)
    def _found(self, what: str, find: Callable[[], _T]) -> _T:
        """What is found, by the coordinator where there are ranks."""
        ranks = self._ranks
        if ranks is None:
            return find()
        label = f"{what} of {os.path.basename(os.path.abspath(self._root))}"
        timeout_seconds = to_native(self._options)["rank_timeout_seconds"]
        found: _T = ranks.agree(label, timeout_seconds, lambda: {"found": find()})["found"]
        return found

    def _is_good_for_all(self, ranks: Ranks, step: int, is_good: bool) -> bool:
        return ranks.is_true_for_all(*self._question(step), is_good)

    def _question(self, step: int) -> tuple[str, float]:
        """What ranks ask each other about a step, and for how long they wait for the answer."""
        timeout_seconds = to_native(self._options)["rank_timeout_seconds"]
        return f"loading of step {step}", timeout_seconds

    def _tell_damage(self, step: int, state: str, reason: str | None) -> None:
        """Has a step counted that is seen to be damaged before it is read."""
        if state == "damaged":
            told("load", CorruptCheckpointError(reason or state, path=self.path(step)), 0)

    def _skip(self, step: int, reason: str, skipped: list[tuple[int, str]]) -> None:
        skipped.append((step, reason))
        self.warnings.append(f"step {step} is passed over for an older one: {reason}")

    def _read(self, step: int, wanted: Wanted, *, verifies: bool = False) -> loading.Loaded:
        options = self._options
        if verifies:
            options = dataclasses.replace(options or Options(), verify=True)
        # Another checkpoint may take its place meanwhile, which is not the damaged one.
        checkpoint_id = observed("load", ends=False)(self._native.identity)(step)
        try:
            loaded = loading.read(self.path(step), wanted, options)
        except CorruptCheckpointError:
            if checkpoint_id is not None:
                self.mark(step, checkpoint_id, is_good=False)
            raise
        self.warnings += loaded.warnings
        if loaded.is_whole and not wanted.allow_partial and loaded.report.verified:
            self.mark(step, loaded.report.checkpoint_id, is_good=True)
        return loaded

    def mark(self, step: int, checkpoint_id: str, *, is_good: bool) -> None:
        """Remembers what came of reading a step whole."""
        mark = self._native.mark_verified if is_good else self._native.mark_damaged
        # A store may be read-only, and a mark is only for the benefit of whoever deletes.
        with contextlib.suppress(StorageError):
            mark(step, checkpoint_id)

    def _complete(self) -> list[int]:
        return [step for step, state, _ in self._native.steps() if state == "complete"]

    def _newest(self) -> int:
        passed_over = []
        for step, state, reason in sorted(self._native.steps(), reverse=True):
            # A newer one that this build cannot read is not passed over: reading it says why.
            if state in ("complete", "newer"):
                return step
            passed_over.append(f"{step} ({state})")
            if state in ("damaged", "partial"):
                warning = f"{self.path(step)} is {state} and passed over: {reason}"
                if warning not in self.warnings:
                    self.warnings.append(warning)
                    self._tell_damage(step, state, reason)
        detail = f"none of its steps is complete: {', '.join(passed_over[:5])}"
        raise self._nothing(detail if passed_over else None)

    def _nothing(self, detail: str | None) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"no checkpoint to load in {self._root}: {detail or 'nothing was saved to it yet'}; "
            "check the path, or save a state with store.save(step, state)",
            path=self._root,
        )

    def _with_way_back(self, error: CorruptCheckpointError, step: int) -> CorruptCheckpointError:
        """The same error, naming the step before."""
        before = max((other for other in self._complete() if other < step), default=None)
        way_back = "no earlier step is complete"
        if before is not None:
            way_back = (
                f"the step before it is complete: store.load(step={before}), or "
                "store.load(fallback=True) for the newest good one"
            )
        return CorruptCheckpointError(
            f"{error}; {way_back}",
            path=error.path,
            file=error.file,
            offset=error.offset,
            tensor=error.tensor,
        )
