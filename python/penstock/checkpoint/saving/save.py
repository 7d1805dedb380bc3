"""One save of this process, alone or among ranks: flattened, staged, written, committed."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.layout.sharding import Sharder, find_mismatch, is_balanced
from penstock.checkpoint.ranks.entering import abort_on_error
from penstock.checkpoint.ranks.round import Vote
from penstock.checkpoint.saving.apart import untied
from penstock.checkpoint.saving.grouping import Grouping
from penstock.checkpoint.saving.lazy import LazySources, lazy_sources
from penstock.checkpoint.saving.versions import Versions
from penstock.checkpoint.state.flatten import flatten
from penstock.checkpoint.view.live import captured
from penstock.common.events import observed
from penstock.common.found import has_bytes
from penstock.common.progress import Progress, shown
from penstock.common.tracing import span
from penstock.errors import (
    CheckpointNotFoundError,
    PenstockError,
    RankError,
    SaveCancelledError,
    StateMismatchError,
)
from penstock.reports import Fallback, SaveReport
from penstock.tensors.devices import current_streams
from penstock.tensors.marks import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.ranks.members import Copy
    from penstock.checkpoint.ranks.round import Round
    from penstock.checkpoint.saving.destination import Destination
    from penstock.checkpoint.state.flattened import Flattened

_SINGLE_RANK = 0

_DEPTH_OF_ALL = 16
_DEPTH_MIN = 2
"""Requests in flight per worker over all processes of a machine, and the least per process.

Four ranks with 16 each save at 2.4 GB/s, with 4 each at 3.0: the device is saturated, and its queue
delays the requests of the last rank.
"""


class Save:
    """One save; the caller's thread runs the first part, any thread the rest.

    Args:
        destination: The destination.
        state: The state.
        options: How bytes move, in the form that the native module takes.
        save_round: The round in which many ranks save; None for this process alone. The save leaves
            it at its end, here or in `run`.
        arena: Staging memory; None to allocate it for this call.
        lazy: Whether the state is copied while it is written, or when `stage` is called.
        watches: Whether the caller continues, so that the state may change before a lazy save has
            copied it; see `penstock.checkpoint.saving.lazy`.

    Attributes:
        is_lazy: Whether the save is lazy; False if changes of the state could not be detected.
    """

    def __init__(
        self,
        destination: Destination,
        state: Any,
        *,
        options: dict[str, Any],
        save_round: Round | None = None,
        arena: _native.Arena | None = None,
        lazy: bool,
        watches: bool = False,
    ) -> None:
        self.destination = destination
        self._round = save_round
        self._began = time.perf_counter()
        self._balance = 0
        self._copies: Sequence[Copy] = ()
        is_watched = lazy and watches and not isinstance(state, Frozen)
        with abort_on_error(save_round):
            if save_round is not None and options["queue_depth"] is None:
                sharers = save_round.processes_here()
                if sharers > 1:
                    depth = max(_DEPTH_MIN, _DEPTH_OF_ALL // sharers)
                    options = {**options, "queue_depth": depth}
            with span("flatten"):
                flat = self._take_apart(state, finds_overlaps=is_watched)
                rank = None if save_round is None else save_round.rank
                grouping = Grouping.of(destination.groups, flat, rank)
                self._index = grouping.index
                self._fallbacks = [*grouping.fallbacks, *untied(flat)]
            self._flatten_seconds = time.perf_counter() - self._began

            tensors = lazy_sources(flat) if is_watched else LazySources(flat.tensors, [])
            # Versions are counted before the copies are ordered after the streams' queued work.
            self._versions = Versions(destination.path, tensors.sources if is_watched else ())
            self.job = _native.Job(
                destination.path,
                tensors.sources,
                flat.aliases,
                flat.tree,
                linked=flat.linked,
                grouped=grouping.rows,
                options=options,
                arena=arena,
                lazy=lazy,
                nice=None,
                watched=is_watched,
                eager=tensors.at_once,
            )
            self.is_lazy = self.job.is_lazy
            if self.is_lazy:
                self._versions.leave_out(self.job.snapshots)
            else:
                self._versions.clear()

    def _take_apart(self, state: Any, *, finds_overlaps: bool) -> Flattened:
        state = captured(state)
        if self._round is None:
            return flatten(state, finds_overlaps=finds_overlaps)
        from penstock.checkpoint.saving.sharded import flatten_sharded

        sharder = Sharder(self._round.rank, self._round.global_ranks)
        flat = flatten_sharded(
            state,
            sharder,
            self._round.holders,
            finds_overlaps=finds_overlaps,
            groups=self.destination.groups,
        )
        self._balance = flat.balance.sum
        self._copies = flat.balance.copies
        return flat

    def hold(self) -> None:
        """Makes the current streams of this thread wait for the device copies.

        Later work in these streams may then change device tensors; host tensors may be changed as
        well.
        """
        self.job.hold(current_streams(self._versions.ordinals))
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Cancels the save if a device tensor was changed too early; `run` raises the error."""
        with contextlib.suppress(StateMismatchError):
            try:
                self._versions.check_unchanged()
            except StateMismatchError:
                self.job.cancel()
                raise

    def cancel(self) -> None:
        """Cancels the save, unless its commit has begun; from any thread."""
        self._versions.clear()
        self.job.cancel()
        if self._round is not None:
            self._round.cancel()

    def abort(self, error: BaseException) -> None:
        """Tells the other ranks that this rank will not take part; replaces `run`."""
        if self._round is not None:
            self._round.abort(error)

    def run(self) -> SaveReport:
        """Writes this rank's files, and completes the commit."""
        one = self._round
        try:
            if one is None:
                return self._run_single()
            report = self._run_coordinator(one) if one.is_coordinator else self._run_member(one)
            # The commit is final, even if a rank has died since.
            with contextlib.suppress(PenstockError):
                one.leave()
            return report
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            # Wakes the threads that wait for staging, and releases the staging memory.
            self.job.cancel()

    def _run_single(self) -> SaveReport:
        destination = self.destination
        destination.make_way()
        attempt = _native.Attempt.begin(destination.path, overwrite=destination.overwrite)
        try:
            written = self._write_single(attempt)
            file, nbytes, digest = written["vote"]
            return self._commit(attempt, written, [(_SINGLE_RANK, file, nbytes, digest)])
        finally:
            attempt.abandon()

    def _write_single(self, attempt: _native.Attempt) -> dict[str, Any]:
        try:
            written = self.job.write(attempt, _SINGLE_RANK)
        except KeyboardInterrupt:
            # The error of an early change says more.
            self._versions.check_unchanged()
            raise
        self._versions.check_unchanged()
        return written

    def _write(self, attempt: _native.Attempt, one: Round) -> dict[str, Any]:
        """Writes this rank's files in a save of many ranks, unless another rank fails."""
        try:
            with one.listening(self.job.cancel):
                written = self.job.write(attempt, one.rank)
        except KeyboardInterrupt:
            # The errors of another rank, or of an early change, say more.
            one.check_failed()
            self._versions.check_unchanged()
            raise
        self._versions.check_unchanged()
        return written

    def _commit(
        self,
        attempt: _native.Attempt,
        written: dict[str, Any],
        parts: list[tuple[int, str, int, int]],
    ) -> SaveReport:
        began = time.perf_counter()
        destination = self.destination
        committed = attempt.commit(
            parts,
            step=destination.step,
            metadata=destination.metadata,
            overwrite=destination.overwrite,
            files=list(destination.files),
            index=self._index,
        )
        if committed["left_behind"] is not None:
            written["fallbacks"].append(Fallback(committed["left_behind"], "leftover"))
        if committed["unindexed"] is not None:
            written["fallbacks"].append(Fallback(committed["unindexed"], "unindexed"))
        written["fallbacks"] += self._fallbacks
        written["bytes"] += committed["manifest_bytes"]
        written["files"] += 1
        return self._report(written, committed["checkpoint_id"], time.perf_counter() - began)

    # Saves of many ranks.

    def _run_coordinator(self, one: Round) -> SaveReport:
        destination = self.destination
        destination.make_way()
        attempt = _native.Attempt.begin(destination.path, overwrite=destination.overwrite)
        is_open = True
        try:
            one.post_begun(attempt.id)
            written = self._write(attempt, one)
            _, nbytes, digest = written["vote"]
            votes = one.count_votes(Vote(nbytes, digest, self._balance), self._copies)
            parts = self._check_votes(one, votes, attempt.id)
            # From here on a failure may follow a commit.
            is_open = False
            report = self._commit(attempt, written, parts)
        except BaseException as error:
            one.post_failed(error, discard=is_open)
            raise
        finally:
            attempt.abandon()
        with contextlib.suppress(PenstockError):
            # A rank that misses the message looks for itself.
            one.post_outcome({"id": report.checkpoint_id})
        return report

    def _check_votes(
        self, one: Round, votes: list[Vote], attempt_id: str
    ) -> list[tuple[int, str, int, int]]:
        """Checks the parts of all votes and returns them."""
        if not is_balanced(vote.balance for vote in votes):
            self._check_copies(one)
            raise RankError(
                f"{self.destination.path}: the ranks do not hold the same tensors: a DTensor has "
                "to be in the state of every rank of its mesh, under the same name, with the same "
                "type, shape and placements; nothing was committed",
                rank=0,
            )
        parts = []
        for rank, vote in enumerate(votes):
            file = _native.part_file(rank, attempt_id)
            if not has_bytes(os.path.join(self.destination.path, file), vote.part_bytes):
                raise RankError(
                    f"{self.destination.path}: what rank {rank} wrote is not there: all ranks have "
                    "to save to one directory of a file system that they share, and to several "
                    "stores in one order; nothing was committed",
                    rank=rank,
                )
            parts.append((rank, file, vote.part_bytes, vote.part_digest))
        return parts

    def _check_copies(self, one: Round) -> None:
        """Compares the replicas of `DTensor`s."""
        found = find_mismatch(one.collect_copies())
        if found is None:
            return
        name, leader, _, device = found.first
        how = "is not the same" if device == found.second.device else "is not on one device"
        raise RankError(
            f"{self.destination.path}: {name} {how} on ranks {leader} and {found.rank}, where its "
            "placements say that both hold a copy: broadcast it from one of them, or save what "
            "each has as penstock.PerRank(tensor.to_local()); nothing was committed",
            rank=found.rank,
        )

    def _run_member(self, one: Round) -> SaveReport:
        attempt = self._join(one.wait_begun(), one)
        try:
            written = self._write(attempt, one)
            began = time.perf_counter()
            _, nbytes, digest = written["vote"]
            one.cast(Vote(nbytes, digest, self._balance), self._copies)
            self._await_outcome(one, attempt)
            return self._report(written, attempt.id, time.perf_counter() - began)
        finally:
            attempt.abandon()

    def _await_outcome(self, one: Round, attempt: _native.Attempt) -> None:
        """Waits until this rank's files are part of a checkpoint."""
        try:
            outcome = one.wait_outcome()
        except (RankError, SaveCancelledError):
            # The coordinator may have died after the commit, before its message was read.
            if attempt.is_committed():
                return
            raise
        if "error" in outcome:
            if outcome["discard"]:
                attempt.discard()
            raise one.error_of(outcome)

    def _join(self, attempt_id: str, one: Round) -> _native.Attempt:
        path = self.destination.path
        try:
            return _native.Attempt.join(path, attempt_id)
        except CheckpointNotFoundError:
            # Rank 0 may have failed, and removed the directory.
            one.check_failed()
            raise RankError(
                f"rank {one.rank} does not see {path}, which rank 0 has made: all ranks have to "
                "save to one directory of a file system that they share",
                rank=one.rank,
            ) from None

    def _report(
        self, written: dict[str, Any], checkpoint_id: str, commit_seconds: float
    ) -> SaveReport:
        fields = {key: value for key, value in written.items() if key != "vote"}
        phases = {
            "flatten": self._flatten_seconds,
            **written["phases"],
            "commit": commit_seconds,
        }
        one = self._round
        changes = {
            "path": self.destination.path,
            "step": self.destination.step,
            "checkpoint_id": checkpoint_id,
            "phases": phases,
            "seconds": time.perf_counter() - self._began,
            "rank": 0 if one is None else one.rank,
            "world_size": 1 if one is None else one.size,
        }
        return SaveReport(**{**fields, **changes})


@observed("save")
def save_single(
    destination: Destination, state: Any, settings: dict[str, Any], progress: bool | Progress
) -> SaveReport:
    """Saves the state of this process alone; the arguments are checked."""
    return write_single(destination, state, settings, progress=progress)


def write_single(
    destination: Destination, state: Any, settings: dict[str, Any], *, progress: bool | Progress
) -> SaveReport:
    """Saves as a part of another call, without an event for observers."""
    began = time.perf_counter()
    with span("flatten"):
        flat = flatten(captured(state))
        grouping = Grouping.of(destination.groups, flat)
    flatten_seconds = time.perf_counter() - began
    destination.make_way()
    with shown(progress, "saving") as update:
        fields = _native.save(
            destination.path,
            flat.tensors,
            flat.aliases,
            flat.tree,
            linked=flat.linked,
            grouped=grouping.rows,
            step=destination.step,
            metadata=destination.metadata,
            overwrite=destination.overwrite,
            files=list(destination.files),
            index=grouping.index,
            options=settings,
            progress=update,
        )
    phases = {"flatten": flatten_seconds, **fields["phases"]}
    seconds = time.perf_counter() - began
    fields["fallbacks"] += [*grouping.fallbacks, *untied(flat)]
    return SaveReport(**{**fields, "path": destination.path, "phases": phases, "seconds": seconds})
