"""`Ranks`: the processes that save together, and what they do in step.

They talk through the key-value store with which `torch.distributed` brought them together, never
through its collectives: that disturbs neither the training's own communication nor needs its
backend, and no rank that died can hold up the others for ever. Whatever they do together is a
`penstock.checkpoint.ranks.round.Round`, which each rank counts for itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.ranks.entering import entered
from penstock.checkpoint.ranks.mailbox import Mailbox
from penstock.checkpoint.ranks.node_ranks import Neighbours
from penstock.checkpoint.ranks.round import Misfit, Round
from penstock.common.process import job, placement
from penstock.errors import PenstockError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


class Ranks:
    """The ranks of a process group.

    Args:
        open_mailbox: Called when they first have something to say to each other.
        rank: The number of this one.
        global_ranks: Their numbers in the whole job, in the order of the group.
        job_size: How many ranks the whole job has; None for as many as there are here.
        is_fork: Whether this process is a fork of the rank.
    """

    def __init__(
        self,
        open_mailbox: Callable[[], Mailbox],
        rank: int,
        global_ranks: Sequence[int],
        *,
        job_size: int | None = None,
        is_fork: bool = False,
    ) -> None:
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        self._neighbours = Neighbours(rank, self.size, job_size or self.size)
        self._open_mailbox = open_mailbox
        self._mailbox: Mailbox | None = None
        self._process = None if is_fork else os.getpid()
        self._lock = threading.Lock()
        self._next_round = 0
        self._last: Round | None = None

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.global_ranks)

    @property
    def has_failed(self) -> bool:
        """Whether the last round has failed on this rank, which the others know then."""
        return self._last is not None and self._last.has_failed

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the one that begins and commits."""
        return self.rank == 0

    @property
    def mailbox(self) -> Mailbox:
        """Where they leave messages for each other."""
        with self._lock:
            return self._opened_mailbox()

    def enter(self, label: str, timeout_seconds: float, order: int | None = None) -> Round:
        """The next round; to be called in the same order on every rank, and left in any case.

        A rank that was away while others saved has fallen behind, and passes over what ended; one
        that left a save out is ahead, and passes over that. Where nothing but the order of calls
        tells one save from the next, neither can be told from a rank that is late, and whose call
        must not meet the next one of others: such a rank raises until it is in step again.

        Args:
            label: What it is about; the same for all.
            timeout_seconds: For how long to wait for another rank in it.
            order: The training step, if it is about one.

        Raises:
            RankError: The others have given up waiting for this rank, or save something else.
            PenstockError: This process is a fork of the rank.
        """
        if self._process != os.getpid():
            raise PenstockError(
                f"{label}: this process is a fork of rank {self.rank} and cannot speak for it: "
                "pass no_dist=True to save alone"
            )
        # Who was not in step waits for the coordinator, to see where that is.
        is_lost = self._go_back()
        while True:
            one = self._next(label, timeout_seconds, order)
            is_entered = False
            try:
                if is_lost:
                    one.wait_opened()
                if self._is_open(one):
                    one.open()
                    is_entered = True
                    return one
            except PenstockError:
                # The others know, or know better.
                one.has_failed = True
                raise
            except BaseException as error:
                # A Ctrl-C: the others need not wait for this rank.
                one.give_up(error)
                raise
            finally:
                if not is_entered and one.misfit is not Misfit.BEHIND:
                    one.leave()

    def agree(
        self, label: str, timeout_seconds: float, decide: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """What the coordinator decides, once every rank has come to hear of it.

        Args:
            label: What it is about; the same for all.
            timeout_seconds: For how long to wait for the other ranks.
            decide: Called on the coordinator only.

        Raises:
            RankError: A rank has not come in time.
            PenstockError: Whatever ``decide`` raised.
        """
        with self._taking_part(label, timeout_seconds) as one:
            # Nobody hears of what was decided before it came.
            one.is_true_for_all(True)
            if not one.is_coordinator:
                return one.wait_decision()
            try:
                decision = decide()
            except BaseException as error:
                one.post_failed(error, discard=False)
                raise
            one.post_outcome(decision)
            return decision

    def is_true_for_all(self, label: str, timeout_seconds: float, is_true: bool) -> bool:
        """Whether all ranks say so.

        Raises:
            RankError: A rank has not come in time.
        """
        with self._taking_part(label, timeout_seconds) as one:
            return one.is_true_for_all(is_true)

    def refuse(self, label: str, timeout_seconds: float, error: BaseException) -> None:
        """Tells those who ask `is_true_for_all` that this rank has no answer, but an error."""
        with suppress(PenstockError):
            self.enter(label, timeout_seconds).give_up(error)

    @contextmanager
    def _taking_part(self, label: str, timeout_seconds: float) -> Iterator[Round]:
        """A round that is left at the end; the others learn of it if something fails here."""
        with entered(lambda: self.enter(label, timeout_seconds)) as one:
            yield one
            one.leave()

    def _next(self, label: str, timeout_seconds: float, order: int | None) -> Round:
        with self._lock:
            self._last = Round(
                self._opened_mailbox(),
                self._next_round,
                label,
                order=order,
                rank=self.rank,
                global_ranks=self.global_ranks,
                timeout_seconds=timeout_seconds,
                neighbours=self._neighbours,
            )
            self._next_round += 1
            return self._last

    def _opened_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = self._open_mailbox()
        return self._mailbox

    def _go_back(self) -> bool:
        """Has the next round be the last one again, if this rank was behind in that.

        Returns:
            Whether it was not in step.
        """
        with self._lock:
            last = self._last
            if last is None or last.misfit is None:
                return False
            # What all have left is not there any more.
            is_next = self._next_round == last.number + 1
            if last.misfit is Misfit.BEHIND and is_next and not last.has_left:
                self._next_round = last.number
            return True

    def _is_open(self, one: Round) -> bool:
        """Whether a round is the one to come to.

        Raises:
            RankError: It is, and it has failed, or it is about something else.
        """
        if not one.concerns():
            if one.misfit is Misfit.AHEAD:
                # The coordinator has still to come to this.
                one.fail(one.mismatch())
                one.misfit = None
            if one.misfit is not None:
                error = one.mismatch()
                if one.misfit is Misfit.UNKNOWN:
                    one.fail(error)
                raise error
            return False
        over = one.over()
        if over is None or "error" not in over:
            return True
        raise one.error_of(over)


class _Known:
    """The ranks of the groups of this process: whoever asks, rounds are counted once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weakly: a group that was destroyed ends, and its threads with it.
        self._latest: dict[
            tuple[str, tuple[int, ...]], tuple[weakref.ref[ProcessGroup], int, Ranks]
        ] = {}
        self._inherited: Any = None
        self.size_max = 0
        """Of how many ranks this process has been one, at some time."""

    def of(self, group: ProcessGroup, dist: Any) -> Ranks:
        """The ranks of a group.

        A group that is made anew after its job ended may have the name and the ranks of the old
        one, and a store that still has its messages: each rank counts such groups.
        """
        members = tuple(dist.get_process_group_ranks(group))
        key = (group.group_name, members)
        with self._lock:
            generation = 0
            if key in self._latest:
                known, latest, ranks = self._latest[key]
                if known() is group:
                    return ranks
                generation = latest + 1
            text = f"{group.group_name}\0{','.join(map(str, members))}\0{generation}"
            prefix = f"penstock/{blake2b(text.encode(), digest_size=6).hexdigest()}"
            ranks = Ranks(
                lambda: Mailbox(_store_of(dist, members), prefix),
                dist.get_rank(group),
                members,
                job_size=dist.get_world_size(),
                is_fork=dist.group.WORLD is self._inherited,
            )
            self.size_max = max(self.size_max, len(members))
            self._latest[key] = (weakref.ref(group), generation, ranks)
            return ranks

    def after_fork(self) -> None:
        """Goes on in a child: the job is the parent's, and a lock may be held for ever."""
        self._lock = threading.Lock()
        dist = job()
        self._inherited = None if dist is None else dist.group.WORLD


_known = _Known()

os.register_at_fork(after_in_child=_known.after_fork)


def _store_of(dist: Any, members: Sequence[int]) -> Store:
    store: Store
    if len(members) == 1:
        # Who is alone need not ask anybody.
        store = dist.HashStore()
        return store
    store = dist.distributed_c10d._get_default_store()
    # A connection of its own, where there is that: waiting must not hold up others.
    return store.clone() if hasattr(store, "clone") else store


def find(
    process_group: ProcessGroup | None, *, no_dist: bool, to_save: bool = False
) -> Ranks | None:
    """The ranks that do something together with this process; None where it is alone.

    Args:
        process_group: Which of them; None for all of the job.
        no_dist: Whether this process is alone whatever runs beside it.
        to_save: Whether it is about to save: what ranks that know nothing of each other save, each
            saves over that of the others.

    Raises:
        ValueError: This process is not in the group.
        RankError: It is one of several ranks, which have not come together yet, or not any more.
    """
    if no_dist and process_group is not None:
        raise ValueError("process_group= says who saves together, no_dist=True that nobody does")
    if no_dist:
        return None
    dist = job()
    if dist is None:
        if to_save:
            check_alone(process_group)
        return None
    group = process_group or dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in process_group: call on the group's ranks only")
    return _known.of(group, dist)


def check_alone(process_group: ProcessGroup | None = None) -> None:
    """Refuses a rank that has no process group, and would save as if there were no other ranks.

    Args:
        process_group: With whom it is meant to save, if that is said.

    Raises:
        RankError: This process is such a rank.
    """
    placed = placement()
    rank = 0
    if placed is not None:
        rank = placed.rank
        why = f"{placed.variable} says that this process is rank {rank} of {placed.ranks}"
    elif process_group is not None:
        why = "process_group= says that this process is one of several ranks"
    elif _known.size_max > 1:
        why = f"this process was one of {_known.size_max} ranks"
    else:
        return
    raise RankError(
        f"{why}, but torch.distributed has no process group now, and each rank would save over the "
        "others: save after torch.distributed.init_process_group() and before "
        "destroy_process_group(), or pass no_dist=True to save alone, to a path of its own",
        rank=rank,
    )
