"""`RankAttempt`: one rank's part of a save whose framework passes the messages between ranks.

The ranks of `penstock.save` agree by messages of their own. A framework with its own gather and
scatter takes the steps one by one:

1. The coordinator begins an attempt, and sends its id to the others, which join it.
2. Every rank writes, and sends its vote to the coordinator.
3. The coordinator commits the votes of all, or abandons the attempt.

Nothing is visible before the commit. Every rank gets the groups, and the coordinator the small
files, as in `penstock.save`.

In a sealed save every other rank makes a `KeyOffer` first, whose recipient it sends to the
coordinator. With the attempt's id it gets the `RankAttempt.handed` for it, and joins with that.
"""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock import _native
from penstock.checkpoint.ranks.group import check_single_rank
from penstock.checkpoint.saving.destination import Destination
from penstock.checkpoint.saving.grouping import Grouping
from penstock.checkpoint.saving.groups import IN_PLACE, NO_GROUPS, Groups
from penstock.checkpoint.state.flattened import Flattened
from penstock.checkpoint.state.tree.tree import AS_FIRST
from penstock.common.found import has_bytes
from penstock.common.process import own_rank
from penstock.errors import CheckpointNotFoundError, RankError
from penstock.tensors.native_rows import Linked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.checkpoint.saving.destination import Part
    from penstock.reports import Fallback
    from penstock.sealing import Sealing
    from penstock.signing import SigningKeys
    from penstock.tensors.native_rows import TensorSource

_T = TypeVar("_T")


class PartVote(NamedTuple):
    """The part that a rank has written, for the commit.

    Attributes:
        file: Name of the part.
        part_bytes: Size of the part.
        part_digest: Digest of the part.
        part_sha256: SHA-256 of the part of a sealed save; else empty.
    """

    file: str
    part_bytes: int
    part_digest: int
    part_sha256: str = ""


class HandedKey(NamedTuple):
    """The key of a sealed save, wrapped for one rank, and for the recipients of the checkpoint."""

    wrapped: str
    wraps: str


class KeyOffer:
    """A key pair of one rank and one save, for which the coordinator wraps the key of the save.

    Attributes:
        recipient: The public key.
    """

    def __init__(self) -> None:
        self._native = _native.EphemeralKey()
        self.recipient = self._native.recipient

    def open(self, handed: HandedKey) -> _native.AttemptKey:
        """Opens the key that was handed out; for this package.

        Raises:
            WrongKeyError: It is not wrapped for this rank.
        """
        return self._native.open(*handed)


def check_in_group() -> None:
    """Refuses a process that was started as one of several ranks, but has no process group.

    Raises:
        RankError: Each such rank would overwrite the others' save.
    """
    if own_rank() is None:
        check_single_rank()


class RankAttempt:
    """One rank's part of an attempt to save; created by `begin` or `join`.

    Attributes:
        path: The checkpoint's directory.
        written: Fields of this rank's `SaveReport`; empty until `write` or `write_part` returns.
            `commit` appends to its ``fallbacks``, for example the reason why a group has no index.
    """

    def __init__(
        self,
        native: _native.Attempt,
        destination: Destination,
        key: _native.AttemptKey | None = None,
        *,
        is_hashed: bool = False,
    ) -> None:
        self.path = destination.path
        self.written: dict[str, Any] = {}
        self._destination = destination
        self._renamed: list[Fallback] = []
        self._native = native
        self._key = key
        self._is_hashed = is_hashed
        if key is not None:
            native.seal(key)
        self._job: _native.Job | None = None

    @classmethod
    def begin(
        cls,
        path: str,
        *,
        overwrite: bool,
        groups: Groups = NO_GROUPS,
        files: Sequence[tuple[str, bytes]] = (),
        sealing: Sealing | None = None,
        signing: SigningKeys | None = None,
    ) -> RankAttempt:
        """Begins an attempt as its coordinator.

        Args:
            path: The checkpoint's directory; created if missing.
            overwrite: Whether the commit may replace a complete checkpoint.
            groups: The groups of tensors stored in separate shards; see `Groups.check`.
            files: Small files stored with the checkpoint; see `read_files`.
            sealing: For whom the checkpoint is sealed; None for a clear one.
            signing: The keys that sign it; None for none.

        Raises:
            CannotSealError: With ``sealing``, something would stay clear.
            KmsError: A key management service refused or was not reachable.
            CheckpointExistsError: A complete checkpoint exists and ``overwrite`` is False.
            StorageError: The operating system failed an operation, or a directory has the name of a
                small file.
            ValueError: ``files`` holds model.safetensors.index.json, which the save writes itself
                for the group ``""``.
        """
        destination = Destination(
            path=path,
            overwrite=overwrite,
            groups=groups,
            files=files,
            sealing=sealing,
            signing=signing,
        )
        key = destination.draw_key()
        return cls(destination.begin(), destination, key, is_hashed=signing is not None)

    @classmethod
    def join(
        cls,
        path: str,
        attempt_id: str,
        number: int,
        groups: Groups = NO_GROUPS,
        offer: KeyOffer | None = None,
        handed: HandedKey | None = None,
        *,
        signs: bool = False,
        is_signed: bool = False,
    ) -> RankAttempt:
        """Joins the attempt of a coordinator.

        Args:
            path: The checkpoint's directory.
            attempt_id: The coordinator's `id`.
            number: The number of this rank, for the error.
            groups: The coordinator's groups.
            offer: The offer of this rank; None for a clear save.
            handed: The key that the coordinator has handed out for it; None for a clear save.
            signs: Whether this rank is to sign the save, too.
            is_signed: Whether the coordinator signs, so that this rank hashes what it writes.

        Raises:
            RankError: The attempt does not exist here: the ranks do not share the directory; or
                this rank seals or signs and the coordinator does not, or the reverse.
        """
        if (offer is None) != (handed is None) or signs != is_signed:
            raise _not_alike(path, number)
        key = None if offer is None or handed is None else offer.open(handed)
        try:
            native = _native.Attempt.join(path, attempt_id)
        except CheckpointNotFoundError:
            raise _not_shared(path, number) from None
        return cls(native, Destination(path=path, groups=groups), key, is_hashed=is_signed)

    @property
    def id(self) -> str:
        """The id by which other ranks join."""
        return self._native.id

    def handed(self, recipient: str | None, number: int) -> HandedKey | None:
        """Wraps the key of a sealed save for another rank; on the coordinator only.

        Args:
            recipient: That of the rank's `KeyOffer`; None if it has made none.
            number: The number of that rank, for the error.

        Returns:
            The wrapped key for `join`; None in a clear save.

        Raises:
            RankError: That rank seals and this one does not, or the reverse.
        """
        if (recipient is None) != (self._key is None):
            raise _not_alike(self.path, number)
        if recipient is None or self._key is None:
            return None
        return HandedKey(self._key.wrap_for(recipient), self._key.wraps())

    def write(self, number: int, tensors: list[TensorSource], options: dict[str, Any]) -> PartVote:
        """Writes all tensors of a rank that has joined; returns when they are durable.

        The trees of such ranks refer to the coordinator's tree.

        Args:
            number: The number of this rank, from 0.
            tensors: See `penstock.tensors.memory.to_source`.
            options: How bytes move.

        Raises:
            StorageError: The operating system failed an operation.
            UnsupportedStateError: Two tensors of a group have one name.
        """
        try:
            job = self._make_job(number, tensors, options)
            written = _run(job, partial(job.write, self._native, number))
        finally:
            # The files of a vote stay. The coordinator's lease protects them; a lease of this rank
            # would keep the commit from removing the replaced files.
            self.abandon()
        return self._vote(written)

    def write_shards(
        self, number: int, tensors: list[TensorSource], options: dict[str, Any]
    ) -> None:
        """Writes the coordinator's tensors before its tree is known; returns when they are durable.

        Args:
            number: The number of this rank, from 0.
            tensors: See `penstock.tensors.memory.to_source`.
            options: How bytes move.

        Raises:
            StorageError: The operating system failed an operation.
            UnsupportedStateError: Two tensors of a group have one name.
        """
        job = self._make_job(number, tensors, options)
        _run(job, partial(job.write_shards, self._native, number))
        self._job = job

    def write_part(self, tree: str) -> PartVote:
        """Writes the coordinator's part, with the tree of the whole state as JSON text.

        Raises:
            StorageError: The operating system failed an operation.
        """
        job = self._job
        if job is None:
            raise AssertionError("the part says where in the shards tensors are: they come first")
        return self._vote(_run(job, partial(job.write_part, self._native, tree)))

    def commit(
        self,
        votes: Mapping[int, PartVote],
        *,
        metadata: str,
        overwrite: bool,
        step: int | None = None,
    ) -> None:
        """Commits the votes of all ranks as a checkpoint; on the coordinator only.

        Args:
            votes: The vote of every rank, by its number.
            metadata: A note as JSON text.
            overwrite: Whether a complete checkpoint is replaced.
            step: The training step, if any.

        Raises:
            RankError: A rank's files are missing; nothing is committed.
            CheckpointExistsError: A complete checkpoint exists and ``overwrite`` is False.
            UnsupportedStateError: The group that gets an index has no tensors.
            StorageError: The operating system failed an operation.
        """
        for number, vote in votes.items():
            if not has_bytes(os.path.join(self.path, vote.file), vote.part_bytes):
                raise _not_shared(self.path, number)
            if bool(vote.part_sha256) != (self._key is not None or self._is_hashed):
                raise _not_alike(self.path, number)
        destination = dataclasses.replace(
            self._destination, step=step, metadata=metadata, overwrite=overwrite
        )
        committed = destination.commit(
            self._native,
            [_part(number, vote) for number, vote in sorted(votes.items())],
            IN_PLACE if IN_PLACE in destination.groups.group_of.values() else None,
        )
        self.written["fallbacks"] += [*committed.fallbacks, *self._renamed]

    def abandon(self) -> None:
        """Ends the attempt. On the coordinator, removes written files that were not committed."""
        self._native.abandon()

    def _vote(self, written: dict[str, Any]) -> PartVote:
        self.written = {key: value for key, value in written.items() if key != "vote"}
        return PartVote(*written["vote"])

    def _make_job(
        self, number: int, tensors: list[TensorSource], options: dict[str, Any]
    ) -> _native.Job:
        flat = Flattened(tensors, [], AS_FIRST, Linked([], []))
        grouping = Grouping.of(self._destination.groups, flat, number)
        self._renamed = [one for one in grouping.fallbacks if one.kind == "renamed"]
        return _native.Job(
            self.path,
            tensors,
            flat.aliases,
            flat.tree,
            grouped=grouping.rows,
            options=options,
            arena=None,
            lazy=True,
            nice=None,
            sealed=self._key is not None,
            hashed=self._is_hashed,
        )


def _run(job: _native.Job, work: Callable[[], _T]) -> _T:
    """Runs a job's work in a thread that takes no signals, so that a Ctrl-C can cancel it."""
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-attempt") as executor:
        try:
            future = executor.submit(work)
        except RuntimeError:
            # An interpreter that ends has none: a background save goes on in its own thread.
            return work()
        try:
            return future.result()
        except BaseException:
            job.cancel()
            raise


def _part(number: int, vote: PartVote) -> Part:
    clear = (number, vote.file, vote.part_bytes, vote.part_digest)
    return (*clear, vote.part_sha256) if vote.part_sha256 else clear


def _not_alike(path: str, number: int) -> RankError:
    return RankError(
        f"{path}: ranks 0 and {number} differ in sealing= or sign=: pass it on all or none; "
        "nothing was committed",
        rank=number,
    )


def _not_shared(path: str, number: int) -> RankError:
    return RankError(
        f"what rank {number} writes to {path} is not there for rank 0: all ranks have to save to "
        "one directory of a file system that they share; nothing was committed",
        rank=number,
    )
