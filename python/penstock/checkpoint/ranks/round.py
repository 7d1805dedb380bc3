"""`Round`: how the ranks of a job come to one verdict about one save.

Each rank enters the round, and leaves it with a report or an error. In between, in this order:

1. those who have plain tensors find out who holds the same ones;
2. the *coordinator* (rank 0) begins the attempt and posts its id;
3. every rank writes its files and casts its *vote*, with the digest of its part;
4. the coordinator counts the votes, commits, and posts the *outcome*.

Who cannot go on posts the *reason*. Who waited in vain, or learns that another rank failed, raises;
nothing is committed then. What all ranks have to say is summed up by whoever comes last, so that
the others read one message. Whoever leaves last clears up.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import errors
from penstock.checkpoint.ranks.exchange import Exchange
from penstock.checkpoint.ranks.holders import NOTHING, classes_of, groups_of, sums_of
from penstock.checkpoint.ranks.members import Copy, Members
from penstock.checkpoint.ranks.node_ranks import COUNTS
from penstock.errors import PenstockError, RankError, SaveCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.checkpoint.ranks.mailbox import Mailbox
    from penstock.checkpoint.ranks.node_ranks import Neighbours

_VOTE = struct.Struct("<QQQ")
"""Size and digest of the part, balance."""

_COMMIT_SECONDS = 10
"""For how long to wait for the end of a commit that has begun."""

_LISTEN_SECONDS = 0.5
"""How often a rank that writes looks whether another one has failed."""


class Misfit(Enum):
    """How far another rank's call is from the coordinator's in the same round."""

    AHEAD = auto()
    BEHIND = auto()
    UNKNOWN = auto()


class Vote(NamedTuple):
    """What a rank has to say about a save.

    Attributes:
        part_bytes: Size of its part.
        part_digest: Digest of that.
        balance: What it saw; see `penstock.checkpoint.layout.sharding.Balance`.
    """

    part_bytes: int
    part_digest: int
    balance: int


class Round(Exchange):
    """One save, or another thing that ranks do together, seen from one of them.

    Args:
        mailbox: Where they leave messages.
        number: Of the round; each rank counts for itself.
        label: What it is about; the same for all.
        order: Tells which of two labels comes first, if they are steps of a training run.
        rank: Number of this rank in the group.
        global_ranks: Numbers of all of them in the job, in the order of the group.
        timeout_seconds: For how long to wait for another rank.
        neighbours: How many of them are on this machine.

    Attributes:
        misfit: How this rank turned out not to be in step, if it did.
        has_left: Whether it is done with the round.
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
        self.misfit: Misfit | None = None
        self.global_ranks = global_ranks
        self._order = order
        self._neighbours = neighbours
        self._copies: Sequence[Copy] = ()
        self.has_left = False
        self._has_voted = False
        self.has_failed = False

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the one that begins and commits."""
        return self.rank == 0

    # Coming and going.

    def open(self) -> None:
        """Says that this rank has come; of the coordinator also what the round is about."""
        self._neighbours.tell(self._mailbox)
        self._put_own("come", "")
        if self.is_coordinator:
            self._post("round", {"label": self.label, "order": self._order})

    def wait_opened(self) -> None:
        """Waits for the coordinator to say so.

        Raises:
            RankError: It has not come in time.
        """
        if not self.is_coordinator and self._wait(["round"], self.timeout_seconds) is None:
            raise self._missing("come", None)

    def concerns(self) -> bool:
        """Whether it is about the same as for the others, as far as that is known yet.

        If not, ``misfit`` tells why, where the round has not ended yet.
        """
        opened = self._look("round")
        over = self.over()
        if over is not None:
            # Before the coordinator has come, what another member called it is all there is.
            about: str = (opened or over)["label"]
            return self.label == about
        return self._fits(opened)

    def over(self) -> dict[str, Any] | None:
        """Why or how it has ended, if it has."""
        return self._look("reason") or self._look("outcome")

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank cannot go on, and that nobody has to wait for it.

        A vote that is cast stands: whoever has cast one may no more than `withdraw` it.
        """
        self.has_failed = True
        if not self._has_voted:
            self.withdraw(error)

    def withdraw(self, error: BaseException) -> None:
        """Tells the others not to commit, if they have not begun to."""
        # The first reason stays.
        self._mailbox.post_first(self._name("reason"), self._describe(error))

    def mismatch(self) -> RankError:
        """The error for a rank that is about something else than the coordinator."""
        opened = self._look("round") or {"label": "something else"}
        return RankError(
            f"rank 0 is at {opened['label']} where rank {self.rank} is at {self.label}: all ranks "
            "have to save and load the same in the same order, with step= if one may leave a save "
            "out; nothing was committed",
            rank=self.rank,
        )

    def give_up(self, error: BaseException) -> None:
        """Fails and leaves, as well as it can: the caller has an error to raise."""
        if self.has_left:
            # There may be nobody left to clear up what is said now.
            return
        with contextlib.suppress(PenstockError):
            self.fail(error)
            self.leave()

    def leave(self) -> None:
        """Is done with the round, one way or another; further calls do nothing."""
        if self.has_left:
            return
        self.has_left = True
        if not self.has_failed:
            # All have read them.
            self._delete(self._own)
        if self._count("left") < self.size:
            return
        names = ["round", "left", "asking", "classes", "sums", "begun", "busy", "full"]
        names += ["outcome", "reason", "plains", "sets", "votes", "answers"]
        names += ["reminded", "doubt", "accounts", "told"]
        if "error" in (self.over() or ()):
            kinds = ("come", "plain", "set", "vote", "answer", "account")
            names += [f"{kind}/{rank}" for kind in kinds for rank in range(self.size)]
        self._delete(names)

    @contextlib.contextmanager
    def listening(self, give_up: Callable[[], None]) -> Iterator[None]:
        """While this rank is busy, calls a function as soon as another one has failed.

        Args:
            give_up: Called once at most, on another thread.
        """
        is_done = threading.Event()

        def listen() -> None:
            with contextlib.suppress(PenstockError):
                while not is_done.wait(_LISTEN_SECONDS):
                    if self._has("reason"):
                        give_up()
                        return

        listener = threading.Thread(target=listen, name="penstock-listen", daemon=True)
        listener.start()
        try:
            yield
        finally:
            is_done.set()
            listener.join()

    def check_failed(self) -> None:
        """Raises what another rank has failed of, unless this one has cancelled the save itself.

        Raises:
            PenstockError: That.
        """
        reason = None if self._is_cancelled.is_set() else self._look("reason")
        if reason is not None:
            raise self.error_of(reason)

    # What all say.

    def processes_here(self) -> int:
        """How many of the ranks this machine has.

        Where no launcher says it, that takes all ranks to come: once, as it stays.

        Raises:
            RankError: One has not come in time, or failed.
        """
        if self._neighbours.count is None:
            reason = self._name("reason")
            found = self._wait_for([COUNTS, reason], self.timeout_seconds)
            if found is None:
                raise self._missing("come", "come")
            if found == reason:
                raise self.error_of(self._get("reason"))
            return self._neighbours.hear(self._mailbox)
        return self._neighbours.count

    def holders(self, hashes: Sequence[int]) -> list[Members]:
        """Who holds the same plain tensors as this rank.

        Ranks that hold none wait for nobody.

        Args:
            hashes: Stand for the tensors, contents included.

        Returns:
            For each of them the ranks that have one of that hash.

        Raises:
            RankError: A rank has not come in time, or failed.
        """
        text = struct.pack(f"<{len(hashes)}Q", *sorted(hashes))
        digest = blake2b(text, digest_size=8).hexdigest() if hashes else NOTHING
        if hashes:
            # Before the rank is counted: whoever is last finds it.
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
        """Whether all ranks say yes, when all have come.

        Raises:
            RankError: A rank has not come in time, or failed.
        """
        self._put_own("answer", str(int(answer)))
        if self._count("answers") == self.size:
            self._post("full", {"all": all(text == "1" for text in self._read_all("answer"))})
        is_yes: bool = self._await("full", "come", "answer")["all"]
        return is_yes

    def cast(self, vote: Vote, copies: Sequence[Copy] = ()) -> None:
        """Votes in favour of the save.

        Args:
            vote: What this rank has written and seen.
            copies: What it tells beside that if votes do not balance.
        """
        self._has_voted = True
        self._copies = copies
        self._put_own("vote", _VOTE.pack(*vote).hex())
        if self._count("votes") == self.size:
            self._post("full", {})

    # What the coordinator does.

    def post_begun(self, attempt_id: str) -> None:
        """Tells the others that the save has begun."""
        self._post("begun", {"id": attempt_id})

    def count_votes(self, own: Vote, copies: Sequence[Copy] = ()) -> list[Vote]:
        """Waits for the votes of all ranks, this one's included; returns them in order.

        Raises:
            RankError: A rank failed, or has not voted in time.
        """
        self.cast(own, copies)
        self._await("full", "written its part", "vote")
        reason = self._look("reason")
        if reason is not None:
            raise self.error_of(reason)
        return [Vote(*_VOTE.unpack(bytes.fromhex(text))) for text in self._read_all("vote")]

    def ask_copies(self) -> Iterator[list[Copy]]:
        """Has every rank tell of its copies; those of each, in order.

        Raises:
            RankError: A rank has not told in time.
        """
        self._post("doubt", {})
        self._tell_copies()
        self._await("told", "said what it holds", "account")
        for rank in range(self.size):
            (text,) = self._read([f"account/{rank}"])
            yield [Copy(*copy) for copy in json.loads(text)]

    def post_outcome(self, outcome: dict[str, Any]) -> None:
        """Tells the others how it ended."""
        self._post("outcome", {"label": self.label, **outcome})

    def post_failed(self, error: BaseException, *, discard: bool) -> None:
        """Tells the others that it failed.

        Args:
            error: Why.
            discard: Whether nothing is committed for certain, so that all may remove their files.
        """
        self.has_failed = True
        self.withdraw(error)
        self._post("outcome", {**self._describe(error), "discard": discard})

    def post_busy(self, is_busy: bool) -> None:
        """Tells the others whether this save is left out."""
        self._post("busy", {"is_busy": is_busy})
        if is_busy:
            self.post_outcome({})

    # What the others do.

    def wait_busy(self) -> bool:
        """Whether the coordinator leaves this save out.

        Raises:
            RankError: It has not come in time, or failed.
        """
        is_busy: bool = self._await("busy", "come to save", None)["is_busy"]
        return is_busy

    def wait_begun(self) -> str:
        """Waits for the coordinator to begin the save; returns the id of the attempt to join.

        Raises:
            RankError: It has not begun in time, or saves something else.
            PenstockError: Whatever kept it from beginning.
        """
        attempt_id: str = self._await("begun", "begun the save", None)["id"]
        return attempt_id

    def wait_outcome(self) -> dict[str, Any]:
        """Waits for the coordinator's verdict.

        Raises:
            RankError: There was none in time. The save may be complete or not.
        """
        # The coordinator may have begun to wait for the votes as late as this rank.
        seconds = 2 * self.timeout_seconds
        try:
            found = self._wait(["outcome", "doubt"], seconds)
            if found == "doubt":
                self._tell_copies()
                found = self._wait(["outcome"], seconds)
        except SaveCancelledError as error:
            self.withdraw(error)
            # If that came too late there is an outcome soon.
            if self._mailbox.wait([self._name("outcome")], _COMMIT_SECONDS, _go_on) is None:
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
        """Waits for what the coordinator decides when all have come.

        Raises:
            RankError: It has not decided in time, or failed.
            PenstockError: What it found instead.
        """
        decision = self._await("outcome", "decided", None)
        if "error" in decision:
            raise self.error_of(decision)
        return decision

    def error_of(self, reason: dict[str, Any]) -> PenstockError:
        """The error that a rank described, as it is raised on this one."""
        name, message, rank = reason["error"], reason["message"], reason["rank"]
        kind = errors.called(name)
        if kind is not None and (
            kind is RankError or (rank == 0 and errors.is_true_for_all_ranks(kind))
        ):
            return kind(message, **reason["fields"])
        # Where a commit has begun its own error says what there is.
        result = ", so nothing was done" if reason.get("discard", True) else ""
        return RankError(f"rank {rank} failed{result}: {name}: {message}", rank=rank)

    # Inside.

    def _tell_copies(self) -> None:
        self._put_own("account", json.dumps(self._copies))
        if self._count("accounts") == self.size:
            self._post("told", {})

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """An error as the others can be told of it."""
        fields = errors.fields_of(error) if isinstance(error, PenstockError) else {}
        reason = {"rank": self.rank, "error": type(error).__name__, "message": str(error)}
        return {"label": self.label, **reason, "fields": fields}

    def _fits(self, opened: dict[str, Any] | None) -> bool:
        if opened is None or opened["label"] == self.label:
            return True
        self.misfit = Misfit.UNKNOWN
        if opened["order"] is not None and self._order is not None:
            self.misfit = Misfit.AHEAD if self._order > opened["order"] else Misfit.BEHIND
        return False

    def _await(self, what: str, deed: str, by: str | None) -> dict[str, Any]:
        """A message that comes when all have done something, or one rank fails.

        Args:
            what: Its name.
            deed: What they have done then.
            by: The kind of message that each leaves; None where the coordinator alone does.

        Raises:
            RankError: A rank has not done it in time.
            PenstockError: It failed.
        """
        found = self._wait([what, "reason"], self.timeout_seconds)
        if found is None:
            raise self._missing(deed, by)
        if found == "reason":
            raise self.error_of(self._get("reason"))
        if not self._fits(self._look("round")):
            raise self.mismatch()
        return self._get(what)


def _go_on() -> None:
    pass
