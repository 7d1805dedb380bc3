"""`Ranks`: the processes that save together, and how they come to one verdict.

They talk through the key-value store with which `torch.distributed` brought them together, never
through its collectives: a wait there ends when its time is over, whoever has died, and it disturbs
neither the training's own communication nor needs its backend. Of a save, in this order:

1. the *coordinator* (rank 0) begins the attempt and posts its id;
2. every rank writes its files and casts its *vote*: 64 bytes, with the digest of its part;
3. the coordinator counts the votes, commits, and posts the *outcome*.

Who waited in vain, or learns that another rank failed, raises; nothing is committed then. A save
has a number, its *round*, which each rank counts for itself.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import errors
from penstock.errors import PenstockError, RankError
from penstock.sharding import Members

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_PAUSE_SECONDS_MIN = 0.0005
"""Between two questions whether a message has come."""

_PAUSE_SHARE = 0.05
"""The same, as a share of the time that was waited already."""

_VOTE = struct.Struct("<QQQQ")
"""Round, size and digest of the part, balance."""

_PLAIN = struct.Struct("<QQ")
"""Round and plain tensors."""

_MESSAGES = (
    *("begun", "busy", "count", "full", "outcome"),
    *("plains", "plains-full", "reason", "round"),
)
"""What is left behind in each round, beside one message of each kind by each rank."""

_SHARED_ERRORS = frozenset(
    {"CheckpointExistsError", "CheckpointNotFoundError", "ProtectedCheckpointError"}
)
"""What is as true for every rank as for the coordinator that found it."""


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


class Ranks:
    """The ranks of a process group.

    Args:
        store: Where they leave messages for each other.
        rank: The number of this one.
        global_ranks: Their numbers in the whole job, in the order of the group.
    """

    def __init__(self, store: Store | None, rank: int, global_ranks: Sequence[int]) -> None:
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        self._classes: dict[int, Members] = {}
        self._epoch = 0
        self._store = store
        self._lock = threading.Lock()
        self._next_round = 0
        self._missed = -2
        text = ",".join(map(str, self.global_ranks)).encode()
        self._prefix = f"penstock/{blake2b(text, digest_size=6).hexdigest()}"

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.global_ranks)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the one that begins and commits."""
        return self.rank == 0

    def enter(self, label: str) -> int:
        """The number of the next save; to be called in the same order on every rank.

        A rank that was away while others saved has fallen behind, and passes over what ended.

        Args:
            label: What is saved where; the same for all.

        Raises:
            RankError: The others have given up waiting for this rank, or save something else.
        """
        number = self._take()
        if self.size == 1:
            return number
        self._take_epoch()
        while not self._is_open(number, label):
            # Behind the others: what is not there any more was long ago.
            latest = self._look("latest")
            number = self._take(0 if latest is None else latest["number"])
        if self.is_coordinator:
            self._post(f"round/{number}", {"label": label})
            self._post("latest", {"number": number})
        return number

    def _is_open(self, number: int, label: str) -> bool:
        """Whether a round is the one to come to.

        Raises:
            RankError: It is, and it is over, or about something else.
        """
        found = self._look(f"round/{number}")
        reason = self._look(f"reason/{number}") or self._look(f"outcome/{number}")
        if reason is not None:
            # Who disagreed said so under its own label.
            if label not in (reason["label"], found and found["label"]):
                return False
            if self._missed == number - 1:
                # Late again: a call behind the others, rather, and it would stay so.
                return False
            self._missed = number
            raise self._failed(reason)
        if found is not None and found["label"] != label:
            error = self._other_label(found["label"], label)
            self.post_failure(number, label, error)
            raise error
        if found is None and not self.is_coordinator:
            latest = self._look("latest")
            return latest is None or latest["number"] <= number
        return True

    def _take(self, least: int = 0) -> int:
        with self._lock:
            number = max(self._next_round, least)
            self._next_round = number + 1
        return number

    def _other_label(self, theirs: str, own: str) -> RankError:
        return RankError(
            f"rank 0 saves {theirs} where rank {self.rank} saves {own}: every rank has to save "
            "the same steps in the same order; nothing was committed",
            rank=self.rank,
        )

    def agree(
        self, label: str, decide: Callable[[], dict[str, Any]], timeout_seconds: float
    ) -> dict[str, Any]:
        """What the coordinator decides, once every rank has come to hear of it.

        Args:
            label: What it is about; the same for all.
            decide: Called on the coordinator only.
            timeout_seconds: For how long to wait for the other ranks.

        Raises:
            RankError: A rank has not come in time.
            PenstockError: Whatever ``decide`` raised.
        """
        if self.size == 1:
            return decide()
        number = self.enter(label)
        try:
            # Nobody hears of what was decided before it came.
            self._exchange(number, label, 0, timeout_seconds)
            if not self.is_coordinator:
                return self._take_outcome(number, timeout_seconds)
            decision = decide()
        except BaseException as error:
            self.post_failure(number, label, error)
            if self.is_coordinator:
                self.post_outcome(number, self.describe(label, error))
            raise
        self.post_outcome(number, {"label": label, **decision})
        return decision

    def is_true_for_all(self, label: str, is_true: bool, timeout_seconds: float) -> bool:
        """Whether all ranks say so.

        Raises:
            RankError: A rank has not come in time.
        """
        if self.size == 1:
            return is_true
        number = self.enter(label)
        try:
            answers = self._exchange(number, label, int(is_true), timeout_seconds)
        except BaseException as error:
            self.post_failure(number, label, error)
            raise
        if self.is_coordinator:
            self.post_outcome(number, {"label": label})
        return all(answers)

    def _take_outcome(self, number: int, timeout_seconds: float) -> dict[str, Any]:
        outcome = self.wait_outcome(number, timeout_seconds)
        if "error" in outcome:
            raise self._failed(outcome)
        return outcome

    def class_of(self, number: int, label: str, plain: int, timeout_seconds: float) -> Members:
        """Who holds the same plain tensors as this rank.

        Asked once for all saves of the same tensors, and again after one that failed. Pipeline
        stages have different ones; everybody else the same.

        Args:
            number: The round.
            label: What is saved where.
            plain: Stands for the plain tensors; see `penstock.sharding.Balance`.
            timeout_seconds: For how long to wait for the other ranks.

        Raises:
            RankError: A rank has not come in time.
        """
        with self._lock:
            known = self._classes.get(plain)
        if known is None:
            found = [plain]
            if self.size > 1:
                found = self._exchange(number, label, plain, timeout_seconds)
            known = Members.of(rank for rank, other in enumerate(found) if other == plain)
            with self._lock:
                self._classes[plain] = known
        return known

    def forget_classes(self) -> None:
        """Has all ranks ask anew at the next save, if the coordinator says so."""
        if self.is_coordinator and self.size > 1:
            self._client.add(self._key("epoch"), 1)

    def _take_epoch(self) -> None:
        """Forgets what belongs to an earlier epoch: all ranks have to know it, or none."""
        epoch = self._client.add(self._key("epoch"), 0)
        with self._lock:
            if epoch != self._epoch:
                self._epoch = epoch
                self._classes.clear()

    def _exchange(self, number: int, label: str, plain: int, timeout_seconds: float) -> list[int]:
        """A number of each rank, when all have come."""
        self._client.set(self._key(f"plain/{self.rank}"), _PLAIN.pack(number, plain).hex())
        if self._client.add(self._key(f"plains/{number}"), 1) == self.size:
            self._client.set(self._key(f"plains-full/{number}"), "1")
        is_full = self._wait(f"plains-full/{number}", timeout_seconds)
        reason = self._look(f"reason/{number}")
        if reason is not None:
            raise self._failed(reason)
        if not is_full:
            missing = self._missing(number, "plain", _PLAIN)
            raise RankError(
                f"rank {missing[0]} has not come within {timeout_seconds:g} s"
                f"{_further(missing[1:])}; it has died or hangs, or does not make the same call: "
                "every rank has to, unless no_dist=True is given; nothing was done",
                rank=missing[0],
            )
        theirs = self._get(f"round/{number}")["label"]
        if theirs != label:
            raise self._other_label(theirs, label)
        keys = [self._key(f"plain/{rank}") for rank in range(self.size)]
        return [_unpack(_PLAIN, text)[1] for text in self._client.multi_get(keys)]

    # What the coordinator does.

    def post_begun(self, number: int, attempt_id: str) -> None:
        """Tells the others that a save has begun."""
        self._post(f"begun/{number}", {"id": attempt_id})

    def count_votes(self, number: int, own: Vote, timeout_seconds: float) -> list[Vote]:
        """Waits for the votes of all ranks, this one's included; returns them in order.

        Raises:
            RankError: A rank failed, or has not voted in time.
        """
        if self.size == 1:
            return [own]
        self.cast(number, own)
        is_full = self._wait(f"full/{number}", timeout_seconds)
        reason = self._look(f"reason/{number}")
        if reason is not None:
            raise self._failed(reason)
        if not is_full:
            missing = self._missing(number, "vote", _VOTE)
            raise RankError(
                f"rank {missing[0]} has not written its part within {timeout_seconds:g} s of rank "
                f"0{_further(missing[1:])}; it has died or hangs, or does not call save: every "
                "rank has to, unless no_dist=True is given; nothing was committed",
                rank=missing[0],
            )
        keys = [self._key(f"vote/{rank}") for rank in range(self.size)]
        votes = [_unpack(_VOTE, text) for text in self._client.multi_get(keys)]
        return [Vote(*fields) for _, *fields in votes]

    def post_outcome(self, number: int, outcome: dict[str, Any]) -> None:
        """Tells the others how a save ended, and forgets what was said two rounds ago."""
        self._post(f"outcome/{number}", outcome)
        if self.size > 1 and number >= 2:
            for what in _MESSAGES:
                self._client.delete_key(self._key(f"{what}/{number - 2}"))

    # What the others do.

    def wait_begun(self, number: int, label: str, timeout_seconds: float) -> str:
        """Waits for the coordinator to begin a save; returns the id of the attempt to join.

        Args:
            number: The round.
            label: What is saved where; the same for all.
            timeout_seconds: For how long to wait.

        Raises:
            RankError: It has not begun in time, or saves something else.
            PenstockError: Whatever kept it from beginning.
        """
        if not self._wait(f"begun/{number}", timeout_seconds):
            raise RankError(
                f"rank 0 has not begun the save of {label} within {timeout_seconds:g} s: it has "
                "died or hangs, or does not call save: every rank has to, unless no_dist=True is "
                "given",
                rank=0,
            )
        begun = self._get(f"begun/{number}")
        if "error" in begun:
            raise self._failed(begun)
        theirs = self._get(f"round/{number}")["label"]
        if theirs != label:
            raise self._other_label(theirs, label)
        attempt_id: str = begun["id"]
        return attempt_id

    def cast(self, number: int, vote: Vote) -> None:
        """Votes in favour."""
        self._client.set(self._key(f"vote/{self.rank}"), _VOTE.pack(number, *vote).hex())
        if self._client.add(self._key(f"count/{number}"), 1) == self.size:
            self._client.set(self._key(f"full/{number}"), "1")

    def wait_outcome(self, number: int, timeout_seconds: float) -> dict[str, Any]:
        """Waits for the coordinator's verdict.

        Raises:
            RankError: There was none in time. The save may be complete or not.
        """
        # The coordinator may have begun to wait for the votes as late as this rank.
        if not self._wait(f"outcome/{number}", 2 * timeout_seconds):
            raise RankError(
                f"rank 0 has not said within {2 * timeout_seconds:g} s whether the save is "
                "committed: it has died or hangs; look at what the store lists as complete",
                rank=0,
            )
        return self._get(f"outcome/{number}")

    # What any of them does.

    def post_failure(self, number: int, label: str, error: BaseException) -> None:
        """Tells the others that this rank cannot go on, and that nobody has to wait for it."""
        if self.size == 1:
            return
        text = json.dumps(self.describe(label, error))
        # The first reason stays. The coordinator, once it has heard of it, begins no more.
        for what in ("reason", "begun"):
            self._client.compare_set(self._key(f"{what}/{number}"), "", text)
        for what in ("plains-full", "full"):
            self._client.set(self._key(f"{what}/{number}"), "1")

    def post_not_begun(self, number: int, label: str, error: BaseException) -> None:
        """Tells the others that the save they wait for cannot begin."""
        self._post(f"begun/{number}", self.describe(label, error))
        self.post_failure(number, label, error)

    def describe(self, label: str, error: BaseException) -> dict[str, Any]:
        """An error as the others can be told of it."""
        fields = {}
        if isinstance(error, PenstockError):
            fields = {name: getattr(error, name) for name in error._fields}
        name = type(error).__name__
        reason = {"rank": self.rank, "error": name, "message": str(error), "fields": fields}
        return {"label": label, **reason}

    def agree_busy(self, number: int, is_busy: bool, timeout_seconds: float) -> bool:
        """Whether the coordinator still saves; the others' own answer counts for nothing.

        Raises:
            RankError: It has not answered in time.
        """
        if self.is_coordinator:
            self._post(f"busy/{number}", {"is_busy": is_busy})
            return is_busy
        if not self._wait(f"busy/{number}", timeout_seconds):
            raise RankError(
                f"rank 0 has not come to save within {timeout_seconds:g} s; every rank has to call "
                "save_async, unless no_dist=True is given",
                rank=0,
            )
        answer: bool = self._get(f"busy/{number}")["is_busy"]
        return answer

    def error_of(self, outcome: dict[str, Any]) -> PenstockError:
        """The error for an outcome that is none."""
        return self._failed(outcome)

    def _failed(self, reason: dict[str, Any]) -> PenstockError:
        name, message, rank = reason["error"], reason["message"], reason["rank"]
        if name == "RankError" or (rank == 0 and name in _SHARED_ERRORS):
            found: PenstockError = getattr(errors, name)(message, **reason["fields"])
            return found
        return RankError(
            f"rank {rank} failed and nothing was committed: {name}: {message}", rank=rank
        )

    def _missing(self, number: int, what: str, kind: struct.Struct) -> list[int]:
        """Who has left no message of a kind in a round; never empty."""
        missing = []
        for rank in range(self.size):
            key = self._key(f"{what}/{rank}")
            if not self._client.check([key]) or _unpack(kind, self._client.get(key))[0] != number:
                missing.append(rank)
        return missing or [self.rank]

    # Messages.

    @property
    def _client(self) -> Store:
        if self._store is None:
            raise AssertionError("a rank alone has nobody to talk to")
        return self._store

    def _key(self, what: str) -> str:
        return f"{self._prefix}/{what}"

    def _post(self, what: str, message: dict[str, Any]) -> None:
        if self.size > 1:
            self._client.set(self._key(what), json.dumps(message))

    def _get(self, what: str) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._client.get(self._key(what)))
        return message

    def _look(self, what: str) -> dict[str, Any] | None:
        return self._get(what) if self._is_there(self._key(what)) else None

    def _wait(self, what: str, timeout_seconds: float) -> bool:
        """Whether a message came in time.

        Asks, with growing pauses, so that thousands of ranks that wait for long ask seldom: what
        the store offers for waiting complains on standard error, and no Ctrl-C ends it.
        """
        key = self._key(what)
        began = time.monotonic()
        while not self._is_there(key):
            waited_seconds = time.monotonic() - began
            if waited_seconds >= timeout_seconds:
                return False
            pause_seconds = min(max(waited_seconds * _PAUSE_SHARE, _PAUSE_SECONDS_MIN), 0.5)
            time.sleep(min(pause_seconds, timeout_seconds - waited_seconds))
        return True

    def _is_there(self, key: str) -> bool:
        try:
            return self._client.check([key])
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RankError(
                f"the store through which the ranks talk is gone: {reason}; the process that holds "
                "it, rank 0 or its launcher, has died",
                rank=0,
            ) from None


def _unpack(kind: struct.Struct, text: bytes) -> tuple[int, ...]:
    return kind.unpack(bytes.fromhex(text.decode()))


def _further(ranks: list[int]) -> str:
    if not ranks:
        return ""
    listed = ", ".join(map(str, ranks[:8]))
    return f" (nor have ranks {listed}{', …' if len(ranks) > 8 else ''})"


_known: dict[int, tuple[Any, Ranks]] = {}
_known_lock = threading.Lock()


def find(process_group: ProcessGroup | None, *, no_dist: bool) -> Ranks | None:
    """The ranks that save together with this process; None where it saves alone.

    Args:
        process_group: Which of them; None for all of the job.
        no_dist: Whether this process saves alone whatever runs beside it.

    Raises:
        ValueError: This process is not in the group.
    """
    if no_dist and process_group is not None:
        raise ValueError("process_group= says who saves together, no_dist=True that nobody does")
    torch = sys.modules.get("torch")
    if no_dist or torch is None:
        return None
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = process_group or dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in process_group: call on the group's ranks only")
    with _known_lock:
        # Rounds are counted once for a group, whoever asks; a group made anew has a new store.
        known = _known.get(id(group))
        if known is None or known[0] is not group:
            store = None
            if dist.get_world_size(group) > 1:
                store = dist.distributed_c10d._get_default_store()
                # A connection of its own, where there is that: waiting must not hold up others.
                store = store.clone() if hasattr(store, "clone") else store
            ranks = Ranks(store, rank, dist.get_process_group_ranks(group))
            known = _known[id(group)] = (group, ranks)
        return known[1]
