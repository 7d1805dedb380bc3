"""`Exchange`: messages and waits of ranks about one round."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock.common.warn import warn
from penstock.errors import RankError, SaveCancelledError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.ranks.mailbox import Mailbox

_LISTED_MAX = 8
"""Largest number of further missing ranks that a message lists."""

REMIND_SECONDS = 5
"""Wait after which a rank warns which ranks are missing."""

POLLS_PER_SECOND = 20_000
"""Most polls of all ranks together that a store has to answer: it is one process. Pauses between
polls are longer from 10,000 ranks on.
"""


class Exchange:
    """Messages of a round, seen from one rank; `penstock.checkpoint.ranks.round.Round` lists them.

    Args:
        mailbox: The store of the messages.
        number: The number of the round; each rank counts for itself.
        label: The subject of the round.
        rank: Number of this rank.
        size: Number of ranks.
        timeout_seconds: Longest wait for another rank, in seconds.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        number: int,
        label: str,
        rank: int,
        size: int,
        timeout_seconds: float,
    ) -> None:
        self.number = number
        self.label = label
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._mailbox = mailbox
        self._own: list[str] = []
        self._is_cancelled = threading.Event()
        self._has_reminded = False

    def cancel(self) -> None:
        """Ends this rank's wait, from another thread."""
        self._is_cancelled.set()

    # Waits.

    def _missing(self, deed: str, by: str | None) -> RankError:
        """Returns the error for ranks that have not done something in time."""
        # A rank that came last and died before its message counts as having come.
        missing = [0] if by is None else self._without(by) or [self.rank]
        further = ", ".join(map(str, missing[1 : _LISTED_MAX + 1]))
        more = ", …" if len(missing) > _LISTED_MAX + 1 else ""
        others = f" (nor have ranks {further}{more})" if further else ""
        return RankError(
            f"{self.label}: rank {missing[0]} has not {deed} within {self.timeout_seconds:g} s of "
            f"rank {self.rank}{others}; it has died or hangs, or does not make the same call: "
            "every rank has to, unless no_dist=True is given; nothing was done",
            rank=missing[0],
        )

    def _without(self, kind: str) -> list[int]:
        """Returns the ranks without a message of a kind."""
        return [rank for rank in range(self.size) if not self._has(f"{kind}/{rank}")]

    def _wait(self, names: Sequence[str], timeout_seconds: float) -> str | None:
        found = self._wait_for([*map(self._name, names)], timeout_seconds)
        return None if found is None else found.partition("/")[2]

    def _wait_for(self, keys: Sequence[str], timeout_seconds: float) -> str | None:
        remind_at = time.monotonic() + REMIND_SECONDS

        def turn() -> None:
            if self._is_cancelled.is_set():
                raise SaveCancelledError(f"{self.label} was cancelled")
            if not self._has_reminded and time.monotonic() >= remind_at:
                self._has_reminded = True
                self._remind(keys)

        return self._mailbox.wait(keys, timeout_seconds, turn, self.size / POLLS_PER_SECOND)

    def _remind(self, keys: Sequence[str]) -> None:
        """Warns which ranks have not come, if any, and if no rank has warned yet.

        The coordinator checks the other ranks, and they check the coordinator: checks of all ranks
        by all would be too many.
        """
        if self.rank and self._has("round"):
            return
        missing = [rank for rank in self._without("come") if rank != self.rank]
        # A rank that has left took its messages along, but only after the awaited message existed.
        if not missing or any(map(self._mailbox.has, keys)) or self._count("reminded") > 1:
            return
        remind(self.label, self.rank, missing, self.timeout_seconds)

    def _put_own(self, kind: str, text: str) -> None:
        self._own.append(f"{kind}/{self.rank}")
        self._mailbox.put(self._name(self._own[-1]), text)

    def _read_all(self, kind: str) -> list[str]:
        return self._read([f"{kind}/{rank}" for rank in range(self.size)])

    def _read(self, names: Sequence[str]) -> list[str]:
        return self._mailbox.read([*map(self._name, names)])

    def _get(self, name: str) -> dict[str, Any]:
        """Reads a message that was waited for: it stays until all ranks have left."""
        found: dict[str, Any] = json.loads(self._read([name])[0])
        return found

    def _message(self, name: str) -> dict[str, Any] | None:
        return self._mailbox.read_message(self._name(name))

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


_LISTED_MAX = 8


def remind(label: str, rank: int, missing: Sequence[int], timeout_seconds: float) -> None:
    """Warns that a rank waits for others, and how to save without them."""
    listed = ", ".join(map(str, missing[:_LISTED_MAX])) + ", …" * (len(missing) > _LISTED_MAX)
    ranks = f"rank {listed}" if len(missing) == 1 else f"ranks {listed}"
    message = (
        f"{label}: rank {rank} waits for {ranks} to come to it, {timeout_seconds:g} s at most: "
        "every rank has to make this call, not only one (`if rank == 0:`); where one is meant to "
        "be alone, no_dist=True says so, to penstock.save and to CheckpointStore"
    )
    warn(message)
