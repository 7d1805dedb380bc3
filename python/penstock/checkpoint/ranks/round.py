"""`Round`: the protocol by which ranks reach one verdict about one save.

Each rank enters the round, and leaves it with a report or an error. In between, in this order:

1. ranks with plain tensors find out which ranks hold the same ones; 2. the *coordinator* (rank 0)
begins the attempt and posts its id; 3. every rank writes its files and casts its *vote*, with the
digest of its part; 4. the coordinator counts the votes, commits, and posts the *outcome*.

A rank that cannot continue posts the *reason*. A rank that times out, or learns of another's
failure, raises; nothing is then committed. The last rank to arrive summarizes the messages of all,
so that the others read one message. The last rank to leave deletes all messages.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
from base64 import b64decode, b64encode
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import errors
from penstock.checkpoint.ranks.exchange import POLLS_PER_SECOND, Exchange
from penstock.checkpoint.ranks.members import (
    NOTHING,
    Copy,
    Members,
    classes_of,
    groups_of,
    sums_of,
)
from penstock.checkpoint.ranks.node_ranks import COUNTS
from penstock.errors import PenstockError, RankError, SaveCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock import _native
    from penstock.checkpoint.ranks.mailbox import Mailbox
    from penstock.checkpoint.ranks.node_ranks import Neighbours

_VOTE = struct.Struct("<QQQQ?")
"""The fields of a `Vote`."""

_COMMIT_SECONDS = 10
"""Longest wait for the end of a commit that has begun."""

_LISTEN_SECONDS = 0.5
"""Interval at which a writing rank checks whether another rank has failed."""


class RoundMismatch(Enum):
    """The position of another rank's call relative to the coordinator's in the same round."""

    AHEAD = auto()
    BEHIND = auto()
    UNKNOWN = auto()


class Vote(NamedTuple):
    """A rank's vote for a save.

    Attributes:
        part_bytes: Size of its part.
        part_digest: Digest of its part.
        balance: Its sum; see `penstock.checkpoint.layout.sharding.Balance`.
        written_bytes: Bytes of all files that it has written.
        has_pieces: Whether it gives pieces of tensors without a mesh.
        part_sha256: SHA-256 of its part as hexadecimal digits, in a sealed save.
    """

    part_bytes: int
    part_digest: int
    balance: int
    written_bytes: int
    has_pieces: bool
    part_sha256: str = ""


def _unpacked(text: str) -> Vote:
    """Returns the vote of a message."""
    raw = b64decode(text)
    size, digest, balance, written, pieces = _VOTE.unpack_from(raw)
    return Vote(size, digest, balance, written, pieces, raw[_VOTE.size :].decode())


class Round(Exchange):
    """One save, or another common operation, seen from one rank.

    Args:
        mailbox: The store of the messages.
        number: The number of the round; each rank counts for itself.
        label: The subject; the same on all ranks.
        order: Determines which of two labels is earlier, if they are training steps.
        rank: Number of this rank in the group.
        global_ranks: Numbers of all ranks in the job, in the group's order.
        timeout_seconds: Longest wait for another rank, in seconds.
        neighbours: The ranks on this machine.

    Attributes:
        misfit: How this rank is out of step; None if it is in step.
        has_left: Whether this rank has left the round.
        proposal: A number that the coordinator gives to all ranks if the save succeeds; None for
            none. The others have it once the save has begun.
        announcement: That number, on every rank, once the save has succeeded.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        number: int,
        label: str,
        *,
        order: int | None,
        rank: int,
        global_ranks: tuple[int, ...],
        timeout_seconds: float,
        neighbours: Neighbours,
    ) -> None:
        super().__init__(mailbox, number, label, rank, len(global_ranks), timeout_seconds)
        self.misfit: RoundMismatch | None = None
        self.proposal: int | None = None
        self.announcement: int | None = None
        self.global_ranks = global_ranks
        self._order = order
        self._neighbours = neighbours
        self._copies: Sequence[Copy] = ()
        self.has_left = False
        self._has_voted = False
        self._opened: dict[str, Any] | None = None
        self.has_failed = False

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank begins attempts and commits them."""
        return self.rank == 0

    # Entering and leaving.

    def open(self) -> None:
        """Announces this rank; the coordinator also announces the subject of the round."""
        self._neighbours.publish(self._mailbox)
        self._put_own("come", "")
        if self.is_coordinator:
            self._post("round", {"label": self.label, "order": self._order})

    def wait_opened(self) -> None:
        """Waits for the coordinator's announcement."""
        if not self.is_coordinator and self._wait(["round"], self.timeout_seconds) is None:
            raise self._missing("come", None)

    def concerns(self) -> bool:
        """Whether the subject is the same as for the others, as far as is known.

        If not, and the round has not ended, ``misfit`` gives the difference.
        """
        opened = self._opening()
        over = self.over()
        if over is not None:
            # Before the coordinator has come, only another member's label is known.
            about: str = (opened or over)["label"]
            return self.label == about
        return self._fits(opened)

    def over(self) -> dict[str, Any] | None:
        """Returns the reason or outcome of an ended round; None if it has not ended."""
        return self._message("reason") or self._message("outcome")

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks that this rank cannot continue, so that none waits for it.

        A cast vote stands: a rank that has voted can only `withdraw` it.
        """
        self.has_failed = True
        if not self._has_voted:
            self.withdraw(error)

    def withdraw(self, error: BaseException) -> None:
        """Asks the other ranks not to commit, if they have not begun to."""
        # The first reason is kept.
        self._mailbox.post_first(self._name("reason"), self._describe(error))

    def mismatch(self) -> RankError:
        """Returns the error for a rank whose subject differs from the coordinator's."""
        opened = self._opening() or {"label": "something else"}
        return RankError(
            f"rank 0 is at {opened['label']} where rank {self.rank} is at {self.label}: all ranks "
            "have to save and load the same in the same order, with step= if one may leave a save "
            "out; nothing was committed",
            rank=self.rank,
        )

    def abort(self, error: BaseException) -> None:
        """Fails and leaves the round, ignoring errors: the caller is about to raise one."""
        if self.has_left:
            # No rank may be left to delete further messages.
            return
        try:
            with contextlib.suppress(PenstockError):
                self.fail(error)
        finally:
            # Also if the store is gone: `has_left` ends the waits of this process for the round.
            with contextlib.suppress(PenstockError):
                self.leave()

    def leave(self) -> None:
        """Leaves the round, whatever its outcome; further calls do nothing."""
        if self.has_left:
            return
        self.has_left = True
        if not self.has_failed:
            # All ranks have read them.
            self._delete(self._own)
        if self._count("left") < self.size:
            return
        names = ["round", "left", "asking", "classes", "sums", "begun", "busy", "full"]
        names += ["outcome", "reason", "plains", "sets", "votes", "answers"]
        names += ["reminded", "doubt", "accounts", "told", "offers", "offered"]
        if "error" in (self.over() or ()):
            kinds = ("come", "plain", "set", "vote", "answer", "account", "offer", "key")
            names += [f"{kind}/{rank}" for kind in kinds for rank in range(self.size)]
        self._delete(names)

    @contextlib.contextmanager
    def listening(self, abort: Callable[[], None]) -> Iterator[None]:
        """Calls ``abort`` on a thread, once, if another rank fails while the block runs."""
        is_done = threading.Event()

        def listen() -> None:
            with contextlib.suppress(PenstockError):
                while not is_done.wait(max(_LISTEN_SECONDS, self.size / POLLS_PER_SECOND)):
                    if self._has("reason"):
                        abort()
                        return

        listener = threading.Thread(target=listen, name="penstock-listen", daemon=True)
        listener.start()
        try:
            yield
        finally:
            is_done.set()
            listener.join()

    def check_failed(self) -> None:
        """Raises another rank's failure, unless this rank has cancelled the save itself."""
        reason = None if self._is_cancelled.is_set() else self._message("reason")
        if reason is not None:
            raise self.error_of(reason)

    # Messages of all ranks.

    def processes_here(self) -> int:
        """Returns the number of ranks on this machine.

        If no launcher gives it, this waits once for all ranks.
        """
        if self._neighbours.count is None:
            reason = self._name("reason")
            found = self._wait_for([COUNTS, reason], self.timeout_seconds)
            if found is None:
                raise self._missing("come", "come")
            if found == reason:
                raise self.error_of(self._get("reason"))
            return self._neighbours.count_here(self._mailbox)
        return self._neighbours.count

    def holders(self, hashes: Sequence[int]) -> list[Members]:
        """Finds the ranks that hold the same plain tensors as this rank, by fingerprints.

        Ranks without plain tensors do not wait.

        Returns:
            For each tensor the ranks that have one with its fingerprint.
        """
        text = struct.pack(f"<{len(hashes)}Q", *sorted(hashes))
        digest = blake2b(text, digest_size=8).hexdigest() if hashes else NOTHING
        if hashes:
            # Before this rank is counted, so that the last rank sees it.
            self._count("asking")
        self._put_own("plain", digest)
        if self._count("plains") == self.size and self._has("asking"):
            self._post("classes", classes_of(groups_of(self._read_all("plain"))))
        if not hashes:
            return []
        classes = self._await("classes", "come", "plain")
        own = next((group for group in classes["larger"] if self.rank in group), [self.rank])
        if classes["count"] == 1:
            return [Members.of(own)] * len(hashes)
        if own[0] == self.rank:
            self._put_own("set", text.hex())
            if self._count("sets") == classes["count"]:
                groups = groups_of(self._read_all("plain"))
                texts = self._read([f"set/{group[0]}" for group in groups])
                self._post("sums", sums_of(groups, texts))
        sums = self._await("sums", "come", "plain")
        known = [Members.of(members) for members in [own, *sums["members"]]]
        return [known[sums["of"].get(f"{one:x}", 0)] for one in hashes]

    def is_true_for_all(self, answer: bool) -> bool:
        """Returns whether all ranks answer True, once all have come."""
        self._put_own("answer", str(int(answer)))
        if self._count("answers") == self.size:
            self._post("full", {"all": all(text == "1" for text in self._read_all("answer"))})
        is_yes: bool = self._await("full", "come", "answer")["all"]
        return is_yes

    def cast(self, vote: Vote, copies: Sequence[Copy] = ()) -> None:
        """Votes for the save; replicated tensors are published if the votes do not balance."""
        self._has_voted = True
        self._copies = copies
        packed = _VOTE.pack(*vote[:-1]) + vote.part_sha256.encode()
        self._put_own("vote", b64encode(packed).decode())
        if self._count("votes") == self.size:
            self._post("full", {})

    # Actions of the coordinator.

    def post_begun(
        self, attempt_id: str, *, is_sealed: bool = False, is_signed: bool = False
    ) -> None:
        """Tells the other ranks that the save has begun, and whether it is sealed and signed."""
        protection = {"sealing": is_sealed, "sign": is_signed}
        self._post("begun", {"id": attempt_id, "number": self.proposal, "protection": protection})

    def hand_out_key(self, key: _native.AttemptKey) -> None:
        """Gives every other rank the key of a sealed save, wrapped for the key that it offered."""
        self.offer_key("")
        self._await("offered", "offered a key for a sealed save", "offer")
        wraps = key.wraps()
        for rank, recipient in enumerate(self._read_all("offer")):
            if recipient:
                message = json.dumps([key.wrap_for(recipient), wraps])
                self._own.append(f"key/{rank}")
                self._mailbox.put(self._name(f"key/{rank}"), message)

    def count_votes(self, own: Vote, copies: Sequence[Copy] = ()) -> list[Vote]:
        """Waits for the votes of all ranks, this one's included; returns them in order."""
        self.cast(own, copies)
        self._await("full", "written its part", "vote")
        reason = self._message("reason")
        if reason is not None:
            raise self.error_of(reason)
        return [_unpacked(text) for text in self._read_all("vote")]

    def collect_copies(self) -> Iterator[list[Copy]]:
        """Asks every rank for its copies; yields those of each rank, in order."""
        self._post("doubt", {})
        self._post_copies()
        self._await("told", "said what it holds", "account")
        for rank in range(self.size):
            (text,) = self._read([f"account/{rank}"])
            yield [Copy(*copy) for copy in json.loads(text)]

    def post_outcome(self, outcome: dict[str, Any]) -> None:
        """Tells the other ranks the outcome."""
        self._post("outcome", {"label": self.label, **outcome})

    def post_failed(self, error: BaseException, *, discard: bool) -> None:
        """Tells the other ranks that the save failed.

        ``discard``: certainly nothing is committed, so that all ranks may remove their files.
        """
        self.has_failed = True
        self.withdraw(error)
        self._post("outcome", {**self._describe(error), "discard": discard})

    def post_busy(self, is_busy: bool) -> None:
        """Tells the other ranks whether this save is skipped."""
        self._post("busy", {"is_busy": is_busy})
        if is_busy:
            self.post_outcome({})

    # Actions of the other ranks.

    def wait_busy(self) -> bool:
        """Returns whether the coordinator skips this save."""
        is_busy: bool = self._await("busy", "come to save", None)["is_busy"]
        return is_busy

    def offer_key(self, recipient: str) -> None:
        """Offers a public key of this rank, for which the coordinator wraps the save's key."""
        self._put_own("offer", recipient)
        if self._count("offers") == self.size:
            self._post("offered", {})

    def receive_key(self) -> tuple[str, str]:
        """Returns the key of the save wrapped for this rank, and the wraps of the checkpoint."""
        wrapped, wraps = self._await(f"key/{self.rank}", "handed out the key of the save", None)
        return wrapped, wraps

    def wait_begun(self, *, is_sealed: bool = False, is_signed: bool = False) -> str:
        """Waits for the coordinator to begin the save; returns the id of the attempt to join.

        Raises:
            RankError: The coordinator seals or signs the save and this rank does not, or the
                reverse.
        """
        begun = self._await("begun", "begun the save", None)
        for option, is_given in (("sealing", is_sealed), ("sign", is_signed)):
            if begun["protection"][option] != is_given:
                raise RankError(
                    f"{self.label}: ranks 0 and {self.rank} differ in {option}=: pass it on all or "
                    "none",
                    rank=self.rank,
                )
        self.proposal = begun["number"]
        attempt_id: str = begun["id"]
        return attempt_id

    def wait_outcome(self) -> dict[str, Any]:
        """Waits for the coordinator's verdict."""
        # The coordinator may have started its wait for votes as late as this rank its own.
        seconds = 2 * self.timeout_seconds
        try:
            found = self._wait(["outcome", "doubt"], seconds)
            if found == "doubt":
                self._post_copies()
                found = self._wait(["outcome"], seconds)
        except SaveCancelledError as error:
            self.withdraw(error)
            # If the withdrawal came too late, an outcome follows soon.
            if self._mailbox.wait([self._name("outcome")], _COMMIT_SECONDS, _keep_waiting) is None:
                raise SaveCancelledError(
                    f"{error}, after this rank had written its part; it is not committed so far, "
                    "but if rank 0 hangs in its commit it may yet be"
                ) from None
            found = "outcome"
        if found is None:
            raise RankError(
                f"{self.label}: rank 0 has not said within {seconds:g} s whether it is committed: "
                "it has died or hangs; look at what the store lists as complete",
                rank=0,
            )
        return self._get("outcome")

    def wait_decision(self) -> dict[str, Any]:
        """Waits for the coordinator's decision, after all ranks have come."""
        decision = self._await("outcome", "decided", None)
        if "error" in decision:
            raise self.error_of(decision)
        return decision

    def error_of(self, reason: dict[str, Any]) -> PenstockError:
        """Converts another rank's error description to the error that this rank raises."""
        name, message, rank = reason["error"], reason["message"], reason["rank"]
        kind = errors.called(name)
        if kind is not None and (
            kind is RankError or (rank == 0 and errors.is_true_for_all_ranks(kind))
        ):
            return kind(message, **reason["fields"])
        # After the begin of a commit, the commit's own error describes the outcome.
        result = ", so nothing was done" if reason.get("discard", True) else ""
        return RankError(f"rank {rank} failed{result}: {name}: {message}", rank=rank)

    # Internals.

    def _post_copies(self) -> None:
        self._put_own("account", json.dumps(self._copies))
        if self._count("accounts") == self.size:
            self._post("told", {})

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """Describes an error for the other ranks."""
        fields = errors.fields_of(error) if isinstance(error, PenstockError) else {}
        reason = {"rank": self.rank, "error": type(error).__name__, "message": str(error)}
        return {"label": self.label, **reason, "fields": fields}

    def _opening(self) -> dict[str, Any] | None:
        """The coordinator's announcement, which never changes; None before it has come."""
        if self._opened is None:
            self._opened = self._message("round")
        return self._opened

    def _fits(self, opened: dict[str, Any] | None) -> bool:
        if opened is None or opened["label"] == self.label:
            return True
        self.misfit = RoundMismatch.UNKNOWN
        if opened["order"] is not None and self._order is not None:
            self.misfit = (
                RoundMismatch.AHEAD if self._order > opened["order"] else RoundMismatch.BEHIND
            )
        return False

    def _await(self, what: str, deed: str, by: str | None) -> dict[str, Any]:
        """Waits for a message that follows an action of all ranks, or for a failure.

        Args:
            what: The name of the message.
            deed: The action, in words.
            by: The kind of message that each rank leaves; None if only the coordinator acts.
        """
        found = self._wait([what, "reason"], self.timeout_seconds)
        if found is None:
            raise self._missing(deed, by)
        if found == "reason":
            raise self.error_of(self._get("reason"))
        if not self._fits(self._opening()):
            raise self.mismatch()
        return self._get(what)


def _keep_waiting() -> None:
    pass
