"""Which step of a store is loaded, and what is done about one that turns out to be bad."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
from typing import TYPE_CHECKING, TypeVar

from penstock.calls.arguments import to_native
from penstock.calls.events import observed, told
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PenstockError,
    StorageError,
)
from penstock.loading import load as loading
from penstock.options import Options
from penstock.saving.destination import told_aside
from penstock.state.live import LiveState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock import _native
    from penstock.loading.load import Wanted
    from penstock.ranks.group import Ranks

_T = TypeVar("_T")

_VANISHED_MAX = 8
"""How often a step may disappear while it is read before its error is passed on."""

_LOST = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EREMOTEIO})
"""What systems answer where the device cannot give the bytes back; and `EUCLEAN`, 117."""

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.ESTALE})
"""What they answer where this process may not read, or not by this name any more."""

_OF_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What says nothing of what is stored: the next step would fail as well."""


class Reader:
    """Loads steps of a store.

    Args:
        native: The store.
        root: Its directory.
        options: How bytes move.
        ranks: Who else loads the same; None for this process alone.

    Attributes:
        warnings: What the user should know about the steps that were passed over.
        is_awaited: Whether the other ranks come to a further round of this load.
    """

    def __init__(
        self, native: _native.Store, root: str, options: Options | None, ranks: Ranks | None = None
    ) -> None:
        self._native = native
        self._root = root
        self._options = options
        self._ranks = ranks
        self.warnings: list[str] = []
        self.is_awaited = False

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
        self.is_awaited = isinstance(wanted.into, LiveState)
        if self._ranks is not None:
            return self.step(chosen, wanted)
        for _ in range(_VANISHED_MAX):
            try:
                return self.step(chosen, wanted)
            except PenstockError:
                # A save elsewhere may commit a newer step and retire this one under our hands.
                newest = self._found("the newest step", self._newest)
                if newest == chosen:
                    raise
            chosen = newest
        return self.step(chosen, wanted)

    def step(self, step: int, wanted: Wanted) -> loading.Loaded:
        """Loads a step.

        Raises:
            CorruptCheckpointError: It is damaged; the message names the step before.
            StorageError: The system does not let it be read; likewise.
        """
        try:
            return self._read(step, wanted)
        except CorruptCheckpointError as error:
            raise self._with_way_back(error, step) from error
        except StorageError as error:
            if not self._is_about(step, error):
                raise
            raise StorageError(
                f"{error}; {self._way_back(step)}",
                path=error.path,
                errno=error.errno,
                needed_bytes=error.needed_bytes,
                free_bytes=error.free_bytes,
            ) from error

    def newest_good(self, last: int | None, wanted: Wanted) -> loading.Loaded:
        """Loads the newest step that turns out to be good, or the newest such up to ``last``.

        What is good is told by the digests, whatever the options say.

        Raises:
            CheckpointNotFoundError: There is none.
            CorruptCheckpointError: All there are turn out to be damaged.
            StorageError: The system does not let any be read.
        """
        return _Descent(self).run(last, wanted)

    def give_up(self, error: BaseException) -> None:
        """Tells the other ranks, if they wait for this one, of an error that ends the load."""
        if self._ranks is not None and self.is_awaited and not self._ranks.has_failed:
            self._ranks.refuse(*self._question(), error)

    @observed("load", ends=False)
    def _found(self, what: str, find: Callable[[], _T]) -> _T:
        """What is found, by the coordinator where there are ranks."""
        ranks = self._ranks
        if ranks is None:
            return find()
        label, timeout_seconds = self._question()
        if not self.is_awaited:
            # The first round of a load, which tells it from others.
            label = f"{what} of {os.path.basename(os.path.abspath(self._root))}"
            self.is_awaited = True
        found: _T = ranks.agree(label, timeout_seconds, lambda: {"found": find()})["found"]
        return found

    def is_true_for_all(self, is_true: bool) -> bool:
        """Whether all ranks that load this say so."""
        ranks = self._ranks
        return is_true if ranks is None else ranks.is_true_for_all(*self._question(), is_true)

    def _question(self) -> tuple[str, float]:
        """What ranks ask each other about a step, and for how long they wait for the answer.

        One for all rounds but the first, and without a number: who has to refuse need not know
        what the others are about to ask.
        """
        timeout_seconds = to_native(self._options)["rank_timeout_seconds"]
        return f"loading of a step of {os.path.basename(self._root)}", timeout_seconds

    def _tell_damage(self, step: int, state: str, reason: str | None) -> None:
        """Has a step counted that is seen to be damaged before it is read."""
        if state == "damaged":
            told("load", CorruptCheckpointError(reason or state, path=self.path(step)), 0)

    def _read(self, step: int, wanted: Wanted, *, verifies: bool = False) -> loading.Loaded:
        options = self._options
        if verifies:
            options = dataclasses.replace(options or Options(), verify=True)
        # Another checkpoint may take its place meanwhile, which is not the damaged one.
        checkpoint_id = observed("load", ends=False)(self._native.identity)(step)
        try:
            loaded = loading.read(self.path(step), wanted, options)
        except CorruptCheckpointError as error:
            # What makes no sense behind right digests does so for other versions perhaps.
            if checkpoint_id is not None and error.is_proven:
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

    def _newest(self) -> int:
        passed_over = []
        unfinished: list[int] = []
        for step, state, reason in self._native.steps(to_first=True):
            # One that cannot be read here may be good, so it is not passed over: reading it says
            # why.
            if state in ("complete", "newer", "unreadable"):
                self._tell_unfinished(unfinished, step)
                return step
            if state == "incomplete":
                unfinished.append(step)
            passed_over.append(f"{step} ({state})")
            if state in ("damaged", "partial"):
                warning = f"{self.path(step)} is {state} and passed over: {reason}"
                if warning not in self.warnings:
                    self.warnings.append(warning)
                    self._tell_damage(step, state, reason)
        detail = f"none of its steps is complete: {', '.join(passed_over[:5])}"
        raise self._nothing(detail if passed_over else None)

    def _tell_unfinished(self, steps: list[int], loaded: int) -> None:
        """Says of the newest step without a manifest above the one that is loaded what it may be.

        That a save is interrupted is no damage, and looks like a manifest that was lost. Where one
        is at work, or there is no file, there is nothing to lose.
        """
        ranks = self._ranks
        if ranks is not None and ranks.rank != 0:
            return
        # Who may not look into it has a warning of another kind, or an error.
        with contextlib.suppress(PenstockError):
            for step in steps:
                is_left_behind = self._native.is_left_behind(step)
                if is_left_behind is False:
                    continue
                elsewhere = "" if is_left_behind else ", or another host is saving it"
                self.warnings.append(
                    f"step {step} was never finished, or its manifest is lost{elsewhere}; step "
                    f"{loaded} is loaded instead; `penstock verify --explain {self.path(step)}` "
                    "tells what is there; the next save of that step, or a sweep, removes it"
                )
                return

    def _nothing(self, detail: str | None) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"no checkpoint to load in {self._root}: {detail or 'nothing was saved to it yet'}; "
            "check the path, or save a state with store.save(step, state)",
            path=self._root,
        )

    def _way_back(self, step: int) -> str:
        """The step before, in words."""
        before = self._native.newest_complete(below=step)
        if before is None:
            return "no earlier step is complete"
        return (
            f"the step before it is complete: store.load(step={before}), or "
            "store.load(fallback=True) for the newest good one"
        )

    def _is_about(self, step: int, error: StorageError) -> bool:
        """Whether the system refuses this step, and may well let another one be read."""
        if _is_lost(error) or error.errno in _REFUSED:
            # An engine that is refused has no path in a step.
            return error.path.startswith(self.path(step))
        return error.errno not in _OF_PROCESS and self._is_unreadable(step)

    def _is_unreadable(self, step: int) -> bool:
        return self._native.state(step) == "unreadable"

    def _with_way_back(self, error: CorruptCheckpointError, step: int) -> CorruptCheckpointError:
        """The same error, naming the step before."""
        return CorruptCheckpointError(
            f"{error}; {self._way_back(step)}",
            path=error.path,
            file=error.file,
            offset=error.offset,
            tensor=error.tensor,
            is_proven=error.is_proven,
        )


class _Descent:
    """Goes down from the newest step to one that turns out to be good.

    Args:
        reader: Who reads.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._ranks = reader._ranks
        self._skipped: list[tuple[int, str]] = []
        self._damaged: dict[int, int] = {}
        """Steps that are damaged, with the number of the warning that says so."""
        self._refused: StorageError | None = None
        self._unfinished: list[int] = []
        """Steps without a manifest, the newest first."""

    def run(self, last: int | None, wanted: Wanted) -> loading.Loaded:
        """See `Reader.newest_good`."""
        reader = self._reader
        for step, state, reason in self._rows(last):
            if state == "incomplete":
                self._unfinished.append(step)
                self._skipped.append((step, "its save never finished, or is still running"))
            elif state in ("damaged", "partial"):
                reader._tell_damage(step, state, reason)
                self._skip_damaged(step, reason or state)
            elif (loaded := self._try(step, wanted)) is not None:
                reader.is_awaited = isinstance(wanted.into, LiveState)
                self._set_aside()
                reader._tell_unfinished(self._unfinished, step)
                report = dataclasses.replace(loaded.report, skipped=tuple(self._skipped))
                return loaded._replace(report=report)
        # Not "not found", on any rank: who catches that starts from scratch.
        aside = reader._native.aside()
        is_nothing = not (self._damaged or self._refused or aside)
        is_nothing_for_all = reader.is_true_for_all(is_nothing)
        reader.is_awaited = False
        if self._refused is not None and not self._damaged:
            raise self._refused
        if not is_nothing_for_all:
            raise self._none_is_good([path for _, path in aside])
        tried = "; ".join(f"step {step}: {reason}" for step, reason in self._skipped[:5])
        nothing = reader._nothing(f"none of its steps is good: {tried}" if tried else None)
        raise told("load", nothing, 0)

    def _rows(self, last: int | None) -> Iterator[tuple[int, str, str | None]]:
        """The steps with their states from the top, no further down than they are asked for."""
        reader = self._reader
        top: int | None = last
        while top is None or top >= 0:
            find = functools.partial(reader._native.steps, last=top, to_first=True)
            rows = reader._found("the newest good step", find)
            if top is not None and top == last and all(row[0] != last for row in rows):
                self._skip(top, "there is no such step")
            yield from rows
            if not rows or rows[-1][1] in ("incomplete", "damaged", "partial"):
                # It is the last of all.
                return
            top = rows[-1][0] - 1

    def _try(self, step: int, wanted: Wanted) -> loading.Loaded | None:
        """Loads a step, if it is good for all ranks."""
        loaded = self._read(step, wanted)
        if self._reader.is_true_for_all(loaded is not None):
            return loaded
        if loaded is not None:
            self._skip_damaged(step, "another rank could not load it")
        return None

    def _read(self, step: int, wanted: Wanted) -> loading.Loaded | None:
        """Loads a step, unless something is wrong with it."""
        reader = self._reader
        try:
            return self._read_twice(step, wanted)
        except CorruptCheckpointError as error:
            self._skip_damaged(step, str(error))
        except StorageError as error:
            if not reader._is_about(step, error):
                raise
            # Whatever this host cannot read may be good for another one.
            self._refused = self._refused or error
            self._skip(step, str(error))
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            self._skipped.append((step, "it was removed meanwhile"))
        return None

    def _read_twice(self, step: int, wanted: Wanted) -> loading.Loaded:
        try:
            return self._reader._read(step, wanted, verifies=True)
        except StorageError as error:
            if not _is_lost(error):
                raise
        # The device may have failed this once.
        return self._reader._read(step, wanted, verifies=True)

    def _set_aside(self) -> None:
        """Has what is damaged give way, now that a good step is found."""
        if self._ranks is not None and self._ranks.rank != 0:
            return
        reader = self._reader
        # The newest last: the last few are kept.
        for step, number in sorted(self._damaged.items()):
            # What cannot be read may be good for somebody else.
            if reader._is_unreadable(step):
                continue
            try:
                aside = reader._native.set_aside(step)
            except CheckpointNotFoundError:
                continue
            except StorageError as error:
                reader.warnings[number] += f"; it could not be set aside: {error}"
                continue
            if aside is not None:
                reader.warnings[number] += f"; {told_aside(aside)}"

    def _skip_damaged(self, step: int, reason: str) -> None:
        self._damaged[step] = len(self._reader.warnings)
        self._skip(step, reason)

    def _skip(self, step: int, reason: str) -> None:
        self._skipped.append((step, reason))
        self._reader.warnings.append(f"step {step} is passed over for an older one: {reason}")

    def _none_is_good(self, aside: list[str]) -> CorruptCheckpointError:
        root = self._reader._root
        found = []
        if self._skipped:
            steps = ", ".join(str(step) for step, _ in self._skipped[:5])
            found.append(f"tried {steps}; each has a warning of its own")
        if aside:
            found.append(f"set aside as damaged: {', '.join(aside[-5:])}")
        return CorruptCheckpointError(
            f"no step of {root} is good ({'; '.join(found) or 'other ranks have some'}); "
            "`penstock verify --explain` tells what is intact of one, `penstock salvage` "
            "recovers that for penstock.load; to begin anew, use an empty directory",
            path=root,
        )


def _is_lost(error: StorageError) -> bool:
    """Whether the device cannot give the bytes back, to this host and for now."""
    return error.errno in _LOST or error.errno == 117
