"""The messages of one save, of all ranks in one process, and the coordinator's commit.

Each rank's part of a save is the real code of `penstock.checkpoint.ranks`, called in turn on a
store in memory: without a wait, as if each message had arrived. The seconds are those of the
processors; a network adds its own. Parts are real files in one directory.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore, TCPStore

from penstock import _native
from penstock.checkpoint.ranks.mailbox import Mailbox
from penstock.checkpoint.ranks.node_ranks import Neighbours
from penstock.checkpoint.ranks.round import Round, Vote
from penstock.common.found import first_without_bytes
from penstock.common.machine.quiesce import quiesce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.distributed_c10d import Store

WORLDS = (16, 256, 4096, 16_384, 100_000)
"""Numbers of ranks; no job of the last one has been measured anywhere."""

_PART = b"{}"
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Task:
    """A number of ranks.

    Attributes:
        ranks: Number of them.
        directory: A directory for their parts.
    """

    ranks: int
    directory: str


class _Counted(Mailbox):
    """Counts the requests of one rank."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "penstock/" + "0" * 12)
        self.requests = 0

    def key(self, name: str) -> str:
        """Each request asks for its key once."""
        self.requests += 1
        return super().key(name)


def run(task: Task) -> dict[str, Any]:
    """Saves twice: the ranks exchange the names of their machines at the first save."""
    mailbox = _Counted(HashStore())
    everyone = tuple(range(task.ranks))
    neighbours = [Neighbours(rank, task.ranks, task.ranks) for rank in everyone]
    quiesce(Path(task.directory))
    for number in range(2):
        found = _save(task, mailbox, number, everyone, neighbours)
    return found


def _save(
    task: Task,
    mailbox: _Counted,
    number: int,
    everyone: tuple[int, ...],
    neighbours: list[Neighbours],
) -> dict[str, Any]:
    rounds = [
        Round(
            mailbox,
            number,
            f"step {number}",
            order=number,
            rank=rank,
            global_ranks=everyone,
            timeout_seconds=_TIMEOUT_SECONDS,
            neighbours=neighbours[rank],
        )
        for rank in everyone
    ]
    coordinator, members = rounds[0], rounds[1:]
    path = Path(task.directory) / f"step-{number:010}"
    attempt = _native.Attempt.begin(str(path), overwrite=False)
    for rank in everyone:
        (path / _native.part_file(rank, attempt.id)).write_bytes(_PART)
    vote = Vote(len(_PART), 1, 0, written_bytes=len(_PART), has_pieces=False)
    mailbox.requests = 0
    clock = _Clock()
    for one in rounds:
        with clock.of(one):
            one.concerns()
            one.over()
            one.open()
    with clock.of(coordinator):
        coordinator.post_begun(attempt.id)
    for one in members:
        with clock.of(one):
            one.wait_begun()
            one.cast(vote)
    with clock.of(coordinator):
        votes = coordinator.count_votes(vote)
    began = time.perf_counter()
    parts = _check(path, votes, attempt.id)
    check_seconds = time.perf_counter() - began
    began += check_seconds
    committed = attempt.commit(
        parts, step=number, metadata="{}", overwrite=False, files=[], index=None
    )
    commit_seconds = time.perf_counter() - began
    with clock.of(coordinator):
        coordinator.post_outcome({"id": attempt.id, "number": None})
    for one in members:
        with clock.of(one):
            one.wait_outcome()
    for one in rounds:
        with clock.of(one):
            one.leave()
    return {
        "member_seconds": clock.members / max(1, len(members)),
        "coordinator_seconds": clock.coordinator,
        "check_seconds": check_seconds,
        "commit_seconds": commit_seconds,
        "manifest_bytes": committed["manifest_bytes"],
        "requests": mailbox.requests / task.ranks,
    }


def _check(path: Path, votes: list[Vote], attempt_id: str) -> list[tuple[int, str, int, int]]:
    """The parts of all votes, as the coordinator checks and commits them."""
    parts = [
        (rank, _native.part_file(rank, attempt_id), vote.part_bytes, vote.part_digest)
        for rank, vote in enumerate(votes)
    ]
    files = [(str(path / file), nbytes) for _, file, nbytes, _ in parts]
    if first_without_bytes(files) is not None:
        raise AssertionError("a part is not there")
    return parts


class _Clock:
    """Seconds of the coordinator and of all members together."""

    def __init__(self) -> None:
        self.coordinator = self.members = 0.0

    @contextmanager
    def of(self, one: Round) -> Iterator[None]:
        """Adds the seconds of the block to those of a rank."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        if one.is_coordinator:
            self.coordinator += seconds
        else:
            self.members += seconds


def seconds_of_request(clients: int, requests: int) -> float:
    """Seconds that a real `TCPStore` needs for one request, with some clients at a time.

    Args:
        clients: Threads with a connection each.
        requests: Requests of each client.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = [
        TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        for _ in range(clients)
    ]

    def ask(index: int) -> None:
        for number in range(requests // 2):
            own[index].set(f"{index}/{number % 8}", "0" * 50)
            own[index].check([f"{index}/{number % 8}"])

    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        list(pool.map(ask, range(clients)))
        return (time.perf_counter() - began) / (clients * requests)
