"""The processes that run a benchmark together: how they meet and exchange values."""

from __future__ import annotations

import os
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common.process import placement
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for another one: longer than any operation takes."""

_WRITERS_TIMEOUT = timedelta(minutes=10)
"""For collectives of a writer: a rank that has failed reports to the team and does not join."""

_HEAD_START_SECONDS = 0.05
"""Between the word that goes round and the moment at which all begin."""


class LaunchError(PenstockError):
    """A launcher says too little, or what contradicts itself."""


@dataclass(frozen=True, slots=True)
class Launched:
    """The place of this process among all, as its launcher says.

    Rank 0 listens at the address. Where nobody says how many ranks this machine has, it is 1.
    """

    rank: int
    ranks: int
    ranks_here: int
    address: str
    port: int


def launched(environment: Mapping[str, str] | None = None) -> Launched | None:
    """This process as torchrun, mpirun or srun started it; None where it is alone."""
    given = os.environ if environment is None else environment
    found = placement(given)
    if found is None:
        return None
    ranks_here = found.ranks_here or 1
    address = given.get("MASTER_ADDR")
    if address is None:
        if ranks_here < found.ranks:
            raise LaunchError(
                f"{found.variable} says that there are {found.ranks} ranks on several machines, "
                "and nothing where the first one is: set MASTER_ADDR and MASTER_PORT for all"
            )
        address = "127.0.0.1"
    port = given.get("MASTER_PORT", "29500")
    if not port.isdecimal():
        raise LaunchError(f"MASTER_PORT={port!r} is no number")
    return Launched(found.rank, found.ranks, ranks_here, address, int(port))


class Team:
    """The processes of a benchmark, of which this is one; alone it needs nobody."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank = rank
        self.ranks = ranks
        self._store: Any = None
        self._dist: Any = None
        self._group: Any = None
        self._groups_made = 0
        self._has_one_clock = True

    @property
    def has_one_clock(self) -> bool:
        """Whether all begin at one moment of one clock; on several machines after a barrier."""
        return self._has_one_clock

    def join(self, store: Any) -> None:
        """Brings all together: `torch.distributed` for the writers, and a group of our own.

        With a group of its own, a writer that fails on some ranks only does not mix up what
        is said about it. All have the store, a `torch.distributed.TCPStore`.
        """
        self._store = store
        self._make_groups()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        self._has_one_clock = len(set(self.gather((socket.gethostname(), boot)))) == 1

    def renew(self) -> None:
        """Makes the groups anew, on all ranks: when one has failed, they are out of step."""
        if self._group is not None:
            self._dist.destroy_process_group()
            self._make_groups()

    def _make_groups(self) -> None:
        from torch import distributed

        self._dist = distributed
        self._groups_made += 1
        store = self._dist.PrefixStore(f"groups-{self._groups_made}", self._store)
        with _explained():
            self._dist.init_process_group(
                "gloo",
                store=store,
                rank=self.rank,
                world_size=self.ranks,
                timeout=_WRITERS_TIMEOUT,
            )
            self._group = self._dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def leave(self) -> None:
        """Ends it, where there is an end in order."""
        if self._group is not None:
            self.meet()
            self._dist.destroy_process_group()
            self._group = None

    def meet(self) -> None:
        """Waits for all."""
        if self._group is not None:
            with _explained():
                self._dist.barrier(self._group)

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value of each rank on all ranks, by rank."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.ranks
        with _explained():
            self._dist.all_gather_object(found, value, group=self._group)
        return found

    def share(self, value: Any) -> Any:
        """Broadcasts the value of the first rank; those of the others are ignored."""
        if self._group is None:
            return value
        shared = [value]
        with _explained():
            self._dist.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]

    def begin(self) -> float:
        """Waits for the moment at which all begin; returns it, by the monotonic clock."""
        self.meet()
        if not self._has_one_clock:
            return time.monotonic()
        start_at: float = self.share(time.monotonic() + _HEAD_START_SECONDS)
        while (left := start_at - time.monotonic()) > 0:
            time.sleep(left)
        return start_at


@contextmanager
def _explained() -> Iterator[None]:
    """Explains the error when other ranks cannot be reached."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises this for any failure.
        raise LaunchError(
            f"another rank has ended, or cannot be reached; it says why itself ({error})"
        ) from error


def hosted_store(ranks: int) -> Any:
    """A store for processes of this machine to meet in, at its ``port``; they may come later."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, ranks, True, timeout=_TIMEOUT, wait_for_workers=False)


def store_at(address: str, port: int, rank: int, ranks: int) -> Any:
    """The store of the first rank; it hosts it, unless torchrun does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # torchrun sets this where ranks have to use its own store.
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(address, port, ranks, not rank and not is_there, timeout=_TIMEOUT)
