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
import struct
import threading
from collections import defaultdict
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import errors
from penstock.errors import PenstockError, RankError, SaveCancelledError
from penstock.sharding import Members

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.mailbox import Mailbox

_VOTE = struct.Struct("<QQQ")
"""Size and digest of the part, balance."""

_SHARED_ERRORS = frozenset(
    {"CheckpointExistsError", "CheckpointNotFoundError", "ProtectedCheckpointError"}
)
"""What is as true for every rank as for the coordinator that found it."""

_NOTHING = "-"
"""Stands for the plain tensors of a rank that has none."""

_LISTED_MAX = 8
"""Of so many further ranks that have not come, a message has the numbers."""


_COMMIT_SECONDS = 10
"""For how long to wait for the end of a commit that has begun."""


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
        balance: What it saw; see `penstock.sharding.Balance`.
    """

    part_bytes: int
    part_digest: int
    balance: int


class Round:
    """One save, or another thing that ranks do together, seen from one of them.

    Args:
        mailbox: Where they leave messages.
        number: Of the round; each rank counts for itself.
        label: What it is about; the same for all.
        order: Tells which of two labels comes first, if they are steps of a training run.
        rank: Number of this rank in the group.
        global_ranks: Numbers of all of them in the job, in the order of the group.
        timeout_seconds: For how long to wait for another rank.

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
    ) -> None:
        self.number = number
        self.label = label
        self.misfit: Misfit | None = None
        self.rank = rank
        self.global_ranks = global_ranks
        self.timeout_seconds = timeout_seconds
        self._mailbox = mailbox
        self._order = order
        self._is_cancelled = threading.Event()
        self._own: list[str] = []
        self.has_left = False
        self._has_voted = False
        self._has_failed = False

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.global_ranks)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the one that begins and commits."""
        return self.rank == 0

    # Coming and going.

    def open(self) -> None:
        """Says what the round is about, if this is the coordinator."""
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

    def cancel(self) -> None:
        """Ends what this rank waits for, from another thread."""
        self._is_cancelled.set()

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank cannot go on, and that nobody has to wait for it.

        A vote that is cast stands: whoever has cast one may no more than `withdraw` it.
        """
        self._has_failed = True
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
            f"rank 0 saves {opened['label']} where rank {self.rank} saves {self.label}: every rank "
            "has to save the same in the same order, with step= if one may leave a save out; "
            "nothing was committed",
            rank=self.rank,
        )

    def give_up(self, error: BaseException) -> None:
        """Fails and leaves, as well as it can: the caller has an error to raise."""
        with contextlib.suppress(PenstockError):
            self.fail(error)
            self.leave()

    def leave(self) -> None:
        """Is done with the round, one way or another; further calls do nothing."""
        if self.has_left:
            return
        self.has_left = True
        if not self._has_failed:
            # All have read them.
            self._delete(self._own)
        if self._count("left") < self.size:
            return
        names = ["round", "left", "asking", "classes", "sums", "begun", "busy", "full"]
        names += ["outcome", "reason", "plains", "sets", "votes", "answers"]
        if "error" in (self.over() or ()):
            kinds = ("plain", "set", "vote", "answer")
            names += [f"{kind}/{rank}" for kind in kinds for rank in range(self.size)]
        self._delete(names)

    # What all say.

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
        digest = blake2b(text, digest_size=8).hexdigest() if hashes else _NOTHING
        if hashes:
            # Before the rank is counted: whoever is last finds it.
            self._count("asking")
        self._put_own("plain", digest)
        if self._count("plains") == self.size and self._has("asking"):
            self._post("classes", _classes(_groups(self._read_all("plain"))))
        if not hashes:
            return []
        classes = self._await("classes", "come", "plain")
        own = next((group for group in classes["larger"] if self.rank in group), [self.rank])
        if classes["count"] == 1:
            return [Members.of(own)] * len(hashes)
        if own[0] == self.rank:
            self._put_own("set", text.hex())
            if self._count("sets") == classes["count"]:
                groups = _groups(self._read_all("plain"))
                texts = self._read([f"set/{group[0]}" for group in groups])
                self._post("sums", _sums(groups, texts))
        sums = self._await("sums", "come", "plain")
        known = [Members.of(members) for members in [own, *sums["members"]]]
        return [known[sums["of"].get(f"{one:x}", 0)] for one in hashes]

    def gather(self, answer: bool) -> bool:
        """Whether all ranks say yes, when all have come.

        Raises:
            RankError: A rank has not come in time, or failed.
        """
        self._put_own("answer", str(int(answer)))
        if self._count("answers") == self.size:
            self._post("full", {"all": all(text == "1" for text in self._read_all("answer"))})
        is_yes: bool = self._await("full", "come", "answer")["all"]
        return is_yes

    def cast(self, vote: Vote) -> None:
        """Votes in favour of the save."""
        self._has_voted = True
        self._put_own("vote", _VOTE.pack(*vote).hex())
        if self._count("votes") == self.size:
            self._post("full", {})

    # What the coordinator does.

    def post_begun(self, attempt_id: str) -> None:
        """Tells the others that the save has begun."""
        self._post("begun", {"id": attempt_id})

    def count_votes(self, own: Vote) -> list[Vote]:
        """Waits for the votes of all ranks, this one's included; returns them in order.

        Raises:
            RankError: A rank failed, or has not voted in time.
        """
        self.cast(own)
        self._await("full", "written its part", "vote")
        reason = self._look("reason")
        if reason is not None:
            raise self.error_of(reason)
        return [Vote(*_VOTE.unpack(bytes.fromhex(text))) for text in self._read_all("vote")]

    def post_outcome(self, outcome: dict[str, Any]) -> None:
        """Tells the others how it ended."""
        self._post("outcome", {"label": self.label, **outcome})

    def post_failed(self, error: BaseException, *, discard: bool) -> None:
        """Tells the others that it failed.

        Args:
            error: Why.
            discard: Whether nothing is committed for certain, so that all may remove their files.
        """
        self._has_failed = True
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

    def error_of(self, reason: dict[str, Any]) -> PenstockError:
        """The error that a rank described, as it is raised on this one."""
        name, message, rank = reason["error"], reason["message"], reason["rank"]
        if name == "RankError" or (rank == 0 and name in _SHARED_ERRORS):
            found: PenstockError = getattr(errors, name)(message, **reason["fields"])
            return found
        # Where a commit has begun its own error says what there is.
        result = ", so nothing was done" if reason.get("discard", True) else ""
        return RankError(f"rank {rank} failed{result}: {name}: {message}", rank=rank)

    # Inside.

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """An error as the others can be told of it."""
        fields = {}
        if isinstance(error, PenstockError):
            fields = {name: getattr(error, name) for name in error._fields}
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

    def _missing(self, deed: str, by: str | None) -> RankError:
        """The error for ranks that have not done something in time."""
        missing = [0]
        if by is not None:
            # A rank that came last, and died before it said so, is among those who came.
            ranks = range(self.size)
            missing = [rank for rank in ranks if not self._has(f"{by}/{rank}")] or [self.rank]
        further = ", ".join(map(str, missing[1 : _LISTED_MAX + 1]))
        more = ", …" if len(missing) > _LISTED_MAX + 1 else ""
        others = f" (nor have ranks {further}{more})" if further else ""
        return RankError(
            f"{self.label}: rank {missing[0]} has not {deed} within {self.timeout_seconds:g} s of "
            f"rank {self.rank}{others}; it has died or hangs, or does not make the same call: "
            "every rank has to, unless no_dist=True is given; nothing was done",
            rank=missing[0],
        )

    def _turn(self) -> None:
        if self._is_cancelled.is_set():
            raise SaveCancelledError(f"{self.label} was cancelled")

    def _wait(self, names: Sequence[str], timeout_seconds: float) -> str | None:
        found = self._mailbox.wait([*map(self._name, names)], timeout_seconds, self._turn)
        return None if found is None else found.partition("/")[2]

    def _put_own(self, kind: str, text: str) -> None:
        self._own.append(f"{kind}/{self.rank}")
        self._mailbox.put(self._name(self._own[-1]), text)

    def _read_all(self, kind: str) -> list[str]:
        return self._read([f"{kind}/{rank}" for rank in range(self.size)])

    def _read(self, names: Sequence[str]) -> list[str]:
        return self._mailbox.read([*map(self._name, names)])

    def _get(self, name: str) -> dict[str, Any]:
        found = self._look(name)
        if found is None:
            raise AssertionError("what was waited for stays until all ranks have left")
        return found

    def _look(self, name: str) -> dict[str, Any] | None:
        return self._mailbox.look(self._name(name))

    def _has(self, name: str) -> bool:
        return self._mailbox.has(self._name(name))

    def _post(self, name: str, message: dict[str, Any]) -> None:
        self._mailbox.post(self._name(name), message)

    def _count(self, name: str) -> int:
        return self._mailbox.count(self._name(name))

    def _delete(self, names: Sequence[str]) -> None:
        self._mailbox.delete([*map(self._name, names)])

    def _name(self, name: str) -> str:
        return f"{self.number}/{name}"


def _groups(digests: Sequence[str]) -> list[list[int]]:
    """Ranks of the same digest, of those that have any plain tensor."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        if digest != _NOTHING:
            groups[digest].append(rank)
    return list(groups.values())


def _classes(groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many groups there are, and those of more than one rank: all ranks read this."""
    return {"count": len(groups), "larger": [group for group in groups if len(group) > 1]}


def _sums(groups: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, Any]:
    """For each hash in the sets of several groups, who has it: the number of a choice of ranks.

    Choices are counted from 1; what only one group has needs none.
    """
    having: defaultdict[int, list[int]] = defaultdict(list)
    for index, text in enumerate(texts):
        for (one,) in struct.iter_unpack("<Q", bytes.fromhex(text)):
            having[one].append(index)
    number_of: dict[tuple[int, ...], int] = {}
    of = {
        f"{one:x}": number_of.setdefault(tuple(indices), len(number_of) + 1)
        for one, indices in having.items()
        if len(indices) > 1
    }
    members = [[rank for index in indices for rank in groups[index]] for indices in number_of]
    return {"members": members, "of": of}


def _go_on() -> None:
    pass


@contextlib.contextmanager
def or_give_up(one: Round | None) -> Iterator[None]:
    """Gives a round up, if there is one, where what is done under this fails."""
    try:
        yield
    except BaseException as error:
        if one is not None:
            one.give_up(error)
        raise
