"""`Ranks`: the processes that save together, and their rounds.

They communicate through the key-value store of `torch.distributed`, never through its collectives.
This neither disturbs the training's communication nor needs its backend, and a rank that died
cannot block the others for ever. Each common operation is a
`penstock.checkpoint.ranks.round.Round`, which each rank counts for itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.ranks.mailbox import Mailbox
from penstock.checkpoint.ranks.node_ranks import Neighbours
from penstock.checkpoint.ranks.round import Round, RoundMismatch
from penstock.common.process import job, placement
from penstock.errors import PenstockError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


class Ranks:
    """The ranks of a process group.

    Args:
        open_mailbox: Called when the ranks first communicate.
        rank: The number of this rank.
        global_ranks: Numbers of the ranks in the whole job, in the group's order.
        job_size: Number of ranks of the whole job; None for that of the group.
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
        """Number of ranks."""
        return len(self.global_ranks)

    @property
    def has_failed(self) -> bool:
        """Whether the last round failed on this rank, and the others know it."""
        return self._last is not None and self._last.has_failed

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank begins attempts and commits them."""
        return self.rank == 0

    @property
    def mailbox(self) -> Mailbox:
        """The mailbox of the ranks."""
        with self._lock:
            return self._opened_mailbox()

    def enter(self, label: str, timeout_seconds: float, order: int | None = None) -> Round:
        """Enters the next round; call it in the same order on every rank, and leave every round.

        A rank that was absent while others saved is behind, and skips the rounds that have ended; a
        rank that skipped a save is ahead, and skips that round. If only the order of calls
        distinguishes one save from the next, neither can be told from a late rank, whose call must
        not meet the next call of the others: such a rank raises until it is in step again.

        Args:
            label: The subject of the round; the same on all ranks.
            timeout_seconds: Longest wait for another rank, in seconds.
            order: The training step, if the round is about one.
        """
        if self._process != os.getpid():
            raise PenstockError(
                f"{label}: this process is a fork of rank {self.rank} and cannot speak for it: "
                "pass no_dist=True to save alone"
            )
        # A rank that was out of step waits for the coordinator, to learn its position.
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
                # The other ranks know the error, or know a better one.
                one.has_failed = True
                raise
            except BaseException as error:
                # After a Ctrl-C the other ranks need not wait for this one.
                one.abort(error)
                raise
            finally:
                if not is_entered and one.misfit is not RoundMismatch.BEHIND:
                    one.leave()

    def agree(
        self, label: str, timeout_seconds: float, decide: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns the coordinator's decision, once every rank has come.

        Args:
            label: The subject; the same on all ranks.
            timeout_seconds: Longest wait for the other ranks, in seconds.
            decide: Called on the coordinator only.
        """
        with self._taking_part(label, timeout_seconds) as one:
            # No rank gets the decision before it has come.
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
        """Returns whether the answer is True on all ranks."""
        with self._taking_part(label, timeout_seconds) as one:
            return one.is_true_for_all(is_true)

    def refuse(self, label: str, timeout_seconds: float, error: BaseException) -> None:
        """Answers the other ranks' `is_true_for_all` with an error."""
        with suppress(PenstockError):
            self.enter(label, timeout_seconds).abort(error)

    @contextmanager
    def _taking_part(self, label: str, timeout_seconds: float) -> Iterator[Round]:
        """Yields a round that is left at the end, and fails on all ranks if the block raises."""
        with entered_round(lambda: self.enter(label, timeout_seconds)) as one:
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
        """Makes the last round the next one again, if this rank was behind in it.

        Returns:
            Whether the rank was out of step.
        """
        with self._lock:
            last = self._last
            if last is None or last.misfit is None:
                return False
            # A round that all ranks have left no longer exists.
            is_next = self._next_round == last.number + 1
            if last.misfit is RoundMismatch.BEHIND and is_next and not last.has_left:
                self._next_round = last.number
            return True

    def _is_open(self, one: Round) -> bool:
        """Whether a round is the one to take part in."""
        if not one.concerns():
            if one.misfit is RoundMismatch.AHEAD:
                # The coordinator has not come to this round yet.
                one.fail(one.mismatch())
                one.misfit = None
            if one.misfit is not None:
                error = one.mismatch()
                if one.misfit is RoundMismatch.UNKNOWN:
                    one.fail(error)
                raise error
            return False
        over = one.over()
        if over is None or "error" not in over:
            return True
        raise one.error_of(over)


@contextmanager
def entered_round(enter: Callable[[], Round]) -> Iterator[Round]:
    """Enters a round, and fails it on all ranks if the block raises.

    No code may run between entering and the block: a Ctrl-C there would leave the other ranks
    waiting.
    """
    one = None
    try:
        one = enter()
        yield one
    except BaseException as error:
        if one is not None:
            one.abort(error)
        raise


class _Known:
    """Caches the ranks of this process's groups, so that all callers count the same rounds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak references: a destroyed group ends, with its threads.
        self._latest: dict[
            tuple[str, tuple[int, ...]], tuple[weakref.ref[ProcessGroup], int, Ranks]
        ] = {}
        self._inherited: Any = None
        self.size_max = 0
        """The largest number of ranks that this process has ever been part of."""

    def of(self, group: ProcessGroup, dist: Any) -> Ranks:
        """Returns the ranks of a group.

        A group that is created again after its job ended may have the old name and ranks, and a
        store that still has the old messages. Each rank therefore numbers such groups.
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
        """Resets the cache in a child: the job is the parent's, and its lock may stay held."""
        self._lock = threading.Lock()
        dist = job()
        self._inherited = None if dist is None else dist.group.WORLD


_known = _Known()

os.register_at_fork(after_in_child=_known.after_fork)


def _store_of(dist: Any, members: Sequence[int]) -> Store:
    store: Store
    if len(members) == 1:
        # A single rank needs no communication.
        store = dist.HashStore()
        return store
    store = dist.distributed_c10d._get_default_store()
    # A separate connection, where available: a wait must not block others.
    return store.clone() if hasattr(store, "clone") else store


def find(
    process_group: ProcessGroup | None, *, no_dist: bool, to_save: bool = False
) -> Ranks | None:
    """Returns the ranks that act together with this process; None if it acts alone.

    Args:
        process_group: The group; None for all ranks of the job.
        no_dist: Whether this process acts alone, even within a job.
        to_save: Whether the purpose is a save: ranks without a group would overwrite each other's
            files.
    """
    if no_dist and process_group is not None:
        raise ValueError("process_group= says who saves together, no_dist=True that nobody does")
    if no_dist:
        return None
    dist = job()
    if dist is None:
        if to_save:
            check_single_rank(process_group)
        return None
    group = process_group or dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in process_group: call on the group's ranks only")
    return _known.of(group, dist)


def check_single_rank(process_group: ProcessGroup | None = None) -> None:
    """Refuses a rank that has no process group and would save as if it were alone."""
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
