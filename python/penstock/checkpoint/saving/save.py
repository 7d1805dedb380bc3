"""`Save`: one save of this process, alone or among ranks: staged, written, committed."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.layout.sharding import find_mismatch, is_balanced
from penstock.checkpoint.layout.tiling import find_mistiled
from penstock.checkpoint.ranks.round import Vote
from penstock.checkpoint.saving.capture import capture
from penstock.checkpoint.saving.lazy import LazySources, lazy_sources
from penstock.checkpoint.saving.versions import Versions
from penstock.common.found import first_without_bytes
from penstock.errors import (
    CheckpointNotFoundError,
    PenstockError,
    RankError,
    SaveCancelledError,
    StateMismatchError,
)
from penstock.tensors.devices import current_streams
from penstock.tensors.marks import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.ranks.round import Round
    from penstock.checkpoint.saving.destination import Destination, Part
    from penstock.reports import SaveReport

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
        save_round: The round in which many ranks save, which `run` leaves; None for this process
            alone.
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
        began = time.perf_counter()
        if save_round is not None and options["queue_depth"] is None:
            sharers = save_round.processes_here()
            if sharers > 1:
                depth = max(_DEPTH_MIN, _DEPTH_OF_ALL // sharers)
                options = {**options, "queue_depth": depth}
        is_watched = lazy and watches and not isinstance(state, Frozen)
        flat, grouped, self._captured = capture(
            destination, state, save_round, began=began, finds_overlaps=is_watched
        )
        tensors = lazy_sources(flat) if is_watched else LazySources(flat.tensors, [])
        # Versions are counted before the copies are ordered after the streams' queued work.
        self._versions = Versions(destination.path, tensors.sources if is_watched else ())
        self._key = self._draw_key()
        self.job = _native.Job(
            destination.path,
            tensors.sources,
            flat.aliases,
            flat.tree,
            linked=flat.linked,
            grouped=grouped,
            options=options,
            arena=arena,
            lazy=lazy,
            nice=None,
            watched=is_watched,
            eager=tensors.at_once,
            sealed=destination.sealing is not None,
            hashed=destination.signing is not None,
        )
        self.is_lazy = self.job.is_lazy
        if self.is_lazy:
            self._versions.leave_out(self.job.snapshots)
        else:
            self._versions.clear()

    def _draw_key(self) -> _native.AttemptKey | None:
        """Draws the key of a sealed save on the rank that commits it; None on the others."""
        destination, one = self.destination, self._round
        if destination.sealing is None:
            return None
        return destination.draw_key() if one is None or one.is_coordinator else None

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
            if one is None or one.is_coordinator:
                report = self._run_coordinator(one)
            else:
                report = self._run_member(one)
            if one is not None:
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

    def _run_coordinator(self, one: Round | None) -> SaveReport:
        attempt = self.destination.begin()
        is_open = True
        try:
            if self._key is not None:
                attempt.seal(self._key)
            if one is not None:
                # First, so that a rank that does not seal fails instead of being waited for.
                is_signed = self.destination.signing is not None
                one.post_begun(attempt.id, is_sealed=self._key is not None, is_signed=is_signed)
                if self._key is not None:
                    one.hand_out_key(self._key)
            written = self._write(attempt, one)
            parts, total_bytes = self._collect_parts(one, written, attempt)
            # From here on a failure may follow a commit.
            is_open = False
            report = self._commit(attempt, written, parts, total_bytes)
        except BaseException as error:
            if one is not None:
                one.post_failed(error, discard=is_open)
            raise
        finally:
            attempt.abandon()
        if one is not None:
            one.announcement = one.proposal
            with contextlib.suppress(PenstockError):
                # A rank that misses the message looks for itself.
                one.post_outcome({"id": report.checkpoint_id})
        return report

    def _run_member(self, one: Round) -> SaveReport:
        own = None
        if self.destination.sealing is not None:
            own = _native.EphemeralKey()
            one.offer_key(own.recipient)
        is_signed = self.destination.signing is not None
        begun = one.wait_begun(is_sealed=own is not None, is_signed=is_signed)
        attempt = self._join(begun, one)
        try:
            if own is not None:
                attempt.seal(own.open(*one.receive_key()))
            written = self._write(attempt, one)
            began = time.perf_counter()
            one.cast(self._vote(written), self._captured.copies)
            self._await_outcome(one, attempt)
            return self._report(written, attempt.id, began)
        finally:
            attempt.abandon()

    def _write(self, attempt: _native.Attempt, one: Round | None) -> dict[str, Any]:
        """Writes this rank's files, unless another rank fails."""
        listening = contextlib.nullcontext() if one is None else one.listening(self.job.cancel)
        try:
            with listening:
                written = self.job.write(attempt, 0 if one is None else one.rank)
        except KeyboardInterrupt:
            # The errors of another rank, or of an early change, say more.
            if one is not None:
                one.check_failed()
            self._versions.check_unchanged()
            raise
        self._versions.check_unchanged()
        return written

    def _commit(
        self,
        attempt: _native.Attempt,
        written: dict[str, Any],
        parts: Sequence[Part],
        total_bytes: int,
    ) -> SaveReport:
        began = time.perf_counter()
        committed = self.destination.commit(attempt, parts, self._captured.index)
        written["total_bytes"] = total_bytes + committed.manifest_bytes
        written["fallbacks"] += [*committed.fallbacks, *self._captured.fallbacks]
        written["bytes"] += committed.manifest_bytes
        written["files"] += 1
        return self._report(written, committed.checkpoint_id, began)

    def _report(
        self, written: dict[str, Any], checkpoint_id: str, commit_began: float
    ) -> SaveReport:
        fields = {key: value for key, value in written.items() if key != "vote"}
        commit_seconds = time.perf_counter() - commit_began
        fields["phases"] = {**written["phases"], "commit": commit_seconds}
        one = self._round
        return self._captured.report(
            fields,
            checkpoint_id=checkpoint_id,
            rank=0 if one is None else one.rank,
            world_size=1 if one is None else one.size,
        )

    # Messages of many ranks.

    def _collect_parts(
        self, one: Round | None, written: dict[str, Any], attempt: _native.Attempt
    ) -> tuple[Sequence[Part], int]:
        """Returns the parts of all ranks, checked, and the bytes that the ranks have written."""
        if one is None:
            return [(0, *written["vote"])], written["bytes"]
        votes = one.count_votes(self._vote(written), self._captured.copies)
        total_bytes = sum(vote.written_bytes for vote in votes)
        return self._check_votes(one, votes, attempt), total_bytes

    def _vote(self, written: dict[str, Any]) -> Vote:
        _, part_bytes, part_digest, *sealed = written["vote"]
        captured = self._captured
        return Vote(
            part_bytes,
            part_digest,
            captured.balance,
            written["bytes"],
            captured.has_pieces,
            sealed[0] if sealed else "",
        )

    def _check_votes(
        self, one: Round, votes: list[Vote], attempt: _native.Attempt
    ) -> Sequence[Part]:
        """Checks the parts of all votes and returns them."""
        if not is_balanced(vote.balance for vote in votes):
            self._check_copies(one)
            raise RankError(
                f"{self.destination.path}: the ranks do not hold the same tensors: a DTensor has "
                "to be in the state of every rank of its mesh, under the same name, with the same "
                "type, shape and placements; nothing was committed",
                rank=0,
            )
        parts = [
            (rank, _native.part_file(rank, attempt.id), vote.part_bytes, vote.part_digest)
            for rank, vote in enumerate(votes)
        ]
        directory = self.destination.path
        # Ranks of a sealed save all have one, and so do those of a signed save that sign.
        hashed: list[Part] = [
            (*part, vote.part_sha256) if vote.part_sha256 else part
            for part, vote in zip(parts, votes, strict=True)
        ]
        rank_without = first_without_bytes(
            [(os.path.join(directory, file), nbytes) for _, file, nbytes, _ in parts]
        )
        if rank_without is not None:
            raise RankError(
                f"{directory}: what rank {rank_without} wrote is not there: all ranks have to save "
                "to one directory of a file system that they share, and to several stores in one "
                "order; nothing was committed",
                rank=rank_without,
            )
        if any(vote.has_pieces for vote in votes):
            self._check_pieces(attempt, hashed)
        return hashed

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

    def _check_pieces(self, attempt: _native.Attempt, parts: Sequence[Part]) -> None:
        """Refuses tensors that the pieces of all ranks do not cover once.

        Only the parts say where each piece lies: no sum of all ranks tells a gap beside an overlap,
        or a tensor that two ranks give whole, from one that is right.
        """
        path = self.destination.path
        found = find_mistiled(attempt.voted_tensors(part) for part in parts)
        if found is not None:
            raise RankError(
                f"{path}: {found.name} is not whole on all ranks together: {found.why}: every "
                "element has to be in one piece on one rank; nothing was committed",
                rank=0,
            )

    def _await_outcome(self, one: Round, attempt: _native.Attempt) -> None:
        """Waits until this rank's files are part of a checkpoint."""
        try:
            outcome = one.wait_outcome()
        except (RankError, SaveCancelledError):
            # The coordinator may have died after the commit, before its message was read.
            if not attempt.is_committed():
                raise
            one.announcement = one.proposal
            return
        if "error" in outcome:
            if outcome["discard"]:
                attempt.discard()
            raise one.error_of(outcome)
        one.announcement = one.proposal

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
