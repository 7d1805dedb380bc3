"""Loads one checkpoint: finds what one rank sees of it, reads its tensors and builds the state."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import _native
from penstock.checkpoint.loading.fetch import fetch, merged
from penstock.checkpoint.loading.load_plan import BuildPlan, LoadPlan
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.checkpoint.loading.target import NEW
from penstock.checkpoint.state.tree.names import is_wild
from penstock.checkpoint.state.tree.plain import plain
from penstock.checkpoint.state.tree.select import select
from penstock.checkpoint.view.live import LiveState
from penstock.checkpoint.view.partial import loadable
from penstock.checkpoint.view.view import View, view
from penstock.common.events import observed
from penstock.common.found import is_there
from penstock.common.process import own_rank, own_size, placement
from penstock.common.progress import shown
from penstock.common.tracing import call, span
from penstock.errors import CheckpointNotFoundError, OtherCheckpointError, StateMismatchError
from penstock.reports import LoadReport
from penstock.sealing.unsealing import CLEAR, Unsealing
from penstock.tensors.arguments import check_device, check_rank, to_native
from penstock.tensors.gc_paused import gc_paused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.common.progress import Progress
    from penstock.options import Options

_NAMED_MAX = 8

_REPLACED_MAX = 8
"""Number of times that a checkpoint may be replaced during a read before this is an error."""


class Loaded(NamedTuple):
    """A loaded state with its report.

    Attributes:
        state: The state.
        report: The report of the load.
        is_whole: Whether every byte of every file was read.
        is_partial: Whether the checkpoint holds more than was requested, or less than is complete.
        warnings: Warnings for the caller.
    """

    state: Any
    report: LoadReport
    is_whole: bool
    is_partial: bool
    warnings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The request of a load; see `load`.

    Attributes:
        own_rank: This process's rank, used if ``rank`` is None; None to look it up.
        is_strict: Whether a `Training` and the checkpoint must have the same parts.
        is_plain: Whether values of classes are returned as their stored members.
        replica: Another copy of the checkpoint, from which damaged chunks are read.
        unsealing: How a sealed checkpoint is opened, and whether a clear one is refused.
        expect: The id of the only checkpoint that is accepted; None for any.
        not_before: The id of a checkpoint that the loaded one must be or come after; None for any.
    """

    into: Any = None
    keys: Sequence[str] | None = None
    device: Any = None
    progress: bool | Progress = False
    allow_partial: bool = False
    rank: int | None = None
    own_rank: int | None = None
    is_strict: bool = True
    is_plain: bool = False
    replica: str | None = None
    unsealing: Unsealing = CLEAR
    expect: str | None = None
    not_before: str | None = None


def check_expected(expect: str | None, argument: str = "expect") -> str | None:
    """Returns the id of a checkpoint that an argument demands.

    Raises:
        TypeError: It is no text.
        ValueError: It is no id.
    """
    given: object = expect
    if given is None:
        return None
    if not isinstance(given, str):
        raise TypeError(f"{argument}: must be an id or None, not {type(given).__name__}")
    if re.fullmatch("[0-9a-f]{32}", given) is None:
        raise ValueError(
            f"{argument}={given!r}: must be an id of 32 lower-case hexadecimal digits, as "
            "SaveReport.checkpoint_id is"
        )
    return given


def read(
    path: str,
    request: LoadRequest,
    options: Options | None,
    opened: _native.Checkpoint | None = None,
) -> Loaded:
    """Loads a checkpoint as `load` does, and returns the report too.

    A checkpoint that is replaced during the read is read again: a complete one exists at any time.
    """
    with call("stall", "load", path), gc_paused():
        # Outside the observed call: a call refused for its arguments is not a failed load.
        reading = _Reading(path, request, options, opened)
        return _run(reading, path, request, options)


def restore_into(loaded: Loaded, request: LoadRequest, world_size: int | None = None) -> Any:
    """Returns the state to the caller; a `Training` takes over the loaded values only here.

    Args:
        loaded: The loaded state; its warnings are extended.
        request: The request.
        world_size: Number of ranks that load it together; None to look it up.
    """
    training = request.into
    if not isinstance(training, LiveState):
        return loaded.state
    report = loaded.report
    loaded.warnings.extend(
        training._restore(
            loaded.state,
            path=report.path,
            is_partial=loaded.is_partial,
            is_strict=request.is_strict,
        )
    )
    size = own_size() if world_size is None else world_size
    rank = own_rank() if request.own_rank is None else request.own_rank
    if rank is None and (placed := placement()) is not None:
        # The processes of the job have not joined a group yet: one of them is enough to warn.
        rank = placed.rank
    if size != report.world_size and not rank:
        loaded.warnings.append(_ranks_warning(report.path, report.world_size, size))
    return training


def _ranks_warning(path: str, saved: int, here: int) -> str:
    """Returns the warning for a resume with another number of ranks."""
    if here < saved:
        left_out = f"rank {here}" if saved - here == 1 else f"ranks {here} to {saved - 1}"
        meaning = f"those of {left_out} are left out: samples may be seen twice, or not at all"
    else:
        further = f"rank {saved} gets" if here - saved == 1 else f"ranks {saved} to {here - 1} get"
        first = "rank 0" if saved == 1 else "the first ones"
        meaning = f"{further} those of {first} as well: they draw the same numbers"
    return (
        f"{path}: {saved} rank{'s'[: saved != 1]} saved it and {here} go{'es'[: 2 * (here == 1)]} "
        "on with it: what ranks share, such as the weights, is as it was; of what each has of its "
        f"own, such as random states and places in the data, {meaning}"
    )


@observed("load")
def _run(reading: _Reading, path: str, request: LoadRequest, options: Options | None) -> Loaded:
    for _ in range(_REPLACED_MAX):
        try:
            return reading.run()
        except CheckpointNotFoundError:
            if not is_there(os.path.join(path, _native.MANIFEST)):
                raise
        reading = _Reading(path, request, options)
    return reading.run()


class _Reading:
    """One attempt to load a checkpoint."""

    def __init__(
        self,
        path: str,
        request: LoadRequest,
        options: Options | None,
        opened: _native.Checkpoint | None = None,
    ) -> None:
        if request.into is not None and request.device is not None:
            raise ValueError(
                "device= places new tensors, into= fills existing ones: give one of them"
            )
        if request.into is not None and request.is_plain:
            raise ValueError(
                "plain=True builds a state without classes, into= fills existing values of them: "
                "give one of them"
            )
        self._path = path
        self._opened = opened
        self._request = request
        self._patterns = request.keys
        self._options = to_native(options) | {"replica": request.replica}
        self._device = check_device(request.device)
        self._warnings: list[str] = []
        self._into = request.into
        self._is_partial = False
        self._rank, self._is_alone = self._whose()

    def run(self) -> Loaded:
        """Loads the checkpoint."""
        began = time.perf_counter()
        source = OpenCheckpoint(self._path, self._opened, self._request.unsealing)
        checkpoint = source.native
        try:
            self._check_id(source.id)
            self._check_age(source.id, checkpoint.previous)
            with span("plan"), source.reading():
                seen, plan = self._plan_view(checkpoint)
                made = plan.allocate()
                is_everything = self._patterns is None and not seen.is_shared
                selection = plan.selection(is_everything=is_everything)
            opened = time.perf_counter()
            reports: list[dict[str, Any]] = []
            with made, shown(self._request.progress, "loading") as update:
                with source.reading():
                    reports += plan.fill_files(checkpoint, self._options)
                fetched = fetch(
                    checkpoint, seen, selection, plan, options=self._options, progress=update
                )
                reports.append(fetched.fields)
                with source.reading():
                    reports += plan.copy_through_devices(checkpoint, self._options, update)
        finally:
            # An exception keeps this frame, which must not keep the files from being deleted.
            source.release()
        fields = merged(reports)
        loaded = time.perf_counter()
        with span("build"), source.reading():
            state = plan.finish(fetched.places)
        ended = time.perf_counter()
        phases = {
            "open": opened - began,
            **fields["phases"],
            "build": ended - loaded,
        }
        changes = {
            "path": self._path,
            "phases": phases,
            "seconds": ended - began,
            "world_size": checkpoint.world_size,
            "previous": tuple(checkpoint.previous),
        }
        if checkpoint.partial is not None and checkpoint.partial[1]:
            # The digests were computed by the salvage: they prove nothing about the original.
            changes["verified"] = False
        report = LoadReport(**{**fields, **changes})
        return Loaded(state, report, fetched.is_whole, self._is_partial, self._warnings)

    def _check_id(self, found: str) -> None:
        """Refuses another checkpoint than the expected one."""
        expected = self._request.expect
        if expected is not None and found != expected:
            raise OtherCheckpointError(
                f"{self._path} is checkpoint {found}, not {expected}; find out who put it there, "
                "or load the checkpoint with that id from a copy",
                path=self._path,
                expected=expected,
                found=found,
            )

    def _check_age(self, found: str, previous: list[str]) -> None:
        """Refuses a checkpoint that is older than a known one, or of another line."""
        expected = self._request.not_before
        if expected is not None and found != expected and expected not in previous:
            raise OtherCheckpointError(
                f"{self._path} is checkpoint {found}, which does not list {expected} among the "
                f"{len(previous)} checkpoints that it comes after; an older one was put there, the "
                "run went on from an older one, or more checkpoints were saved since than a "
                "manifest lists; find out which",
                path=self._path,
                expected=expected,
                found=found,
            )

    def _whose(self) -> tuple[int, bool]:
        """Returns the rank whose state is loaded, and whether exactly as that rank saved it."""
        request = self._request
        if request.rank is not None:
            return check_rank(request.rank), True
        rank = own_rank() if request.own_rank is None else request.own_rank
        if rank is None:
            return 0, False
        return rank, request.into is None and self._patterns is None

    def _plan_view(self, checkpoint: _native.Checkpoint) -> tuple[View, BuildPlan | LoadPlan]:
        """Returns the view to load, and the plan of the load."""
        request = self._request
        training = request.into if isinstance(request.into, LiveState) else None
        into = request.into if training is None else training._requested_names()
        seen = view(checkpoint, self._rank, into, is_alone=self._is_alone)
        if (
            seen.unreached
            and request.into is None
            and self._patterns is None
            and not self._is_alone
        ):
            self._leave_out(seen)
        node = plain(seen.node) if request.is_plain else seen.node
        if self._patterns is not None:
            node = select(node, self._patterns, self._path)
        # Every leaf requested by its exact name must be in the tree.
        is_named = self._patterns is not None and not any(map(is_wild, self._patterns))
        node, is_left_out = loadable(
            node,
            checkpoint,
            self._path,
            allow_partial=request.allow_partial,
            lost=() if is_named else seen.lost,
        )
        self._is_partial = is_partial = self._patterns is not None or is_left_out
        if training is not None:
            node, self._into = training._targets(
                node,
                seen._replace(node=node),
                self._path,
                is_partial=is_partial,
                is_strict=request.is_strict,
            )
        seen = seen._replace(node=node)
        if self._into is None or self._into is NEW:
            return seen, BuildPlan(seen, self._device)
        return seen, LoadPlan(node, self._into, seen, self._path, is_partial=is_partial)

    def _leave_out(self, seen: View) -> None:
        """Warns of tensors that ranks saved separately and that have no place in a single state."""
        names = list(seen.unreached)
        named = ", ".join(map(repr, names[:_NAMED_MAX]))
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        if seen.are_few_unreached:
            self._warnings.append(
                f"{self._path}: other ranks have their own values of {len(names)} tensors, which "
                f"are left out: {named}{more}; rank= loads the state of one rank"
            )
            return
        raise StateMismatchError(
            f"{self._path}: the states of its ranks do not make one: beside what this one sees "
            f"they hold {named}{more}, under keys that are other tensors here; load what one rank "
            "saved with rank=, or choose leaves with keys=",
            key=names[0],
            path=self._path,
        )
