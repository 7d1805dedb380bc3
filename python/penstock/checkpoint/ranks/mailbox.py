"""`Mailbox`: messages that the ranks of a job leave for each other.

They lie in the key-value store with which `torch.distributed` brought the ranks together. Nothing
here is a collective: a wait ends when its time is over, whoever has died.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.common.tracing import span
from penstock.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.distributed_c10d import Store

_PAUSE_SECONDS_MIN = 0.0005
"""Between two questions whether a message has come."""

_PAUSE_SHARE = 0.05
"""The same, as a share of the time that was waited already."""

_PAUSE_SECONDS_MAX = 0.5


class Mailbox:
    """Messages under names that begin with a prefix.

    Every method raises `RankError` where the store is gone.

    Args:
        store: Where they lie.
        prefix: What their keys begin with.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, name: str, text: str) -> None:
        """Leaves a short text."""
        with _talking():
            self._store.set(self.key(name), text)

    def post(self, name: str, message: dict[str, Any]) -> None:
        """Leaves a message."""
        self.put(name, json.dumps(message))

    def post_first(self, name: str, message: dict[str, Any]) -> None:
        """Leaves a message where there is none yet."""
        with _talking():
            self._store.compare_set(self.key(name), "", json.dumps(message))

    def count(self, name: str, amount: int = 1) -> int:
        """Adds to a number, 0 at first; returns what it comes to."""
        with _talking():
            return self._store.add(self.key(name), amount)

    def has(self, name: str) -> bool:
        """Whether there is something of that name."""
        with _talking():
            return self._store.check([self.key(name)])

    def read(self, names: Sequence[str]) -> list[str]:
        """Texts that are there."""
        with _talking():
            texts: list[bytes] = self._store.multi_get([self.key(name) for name in names])
        return [text.decode() for text in texts]

    def look(self, name: str) -> dict[str, Any] | None:
        """A message, if it is there."""
        if not self.has(name):
            return None
        message: dict[str, Any] = json.loads(self.read([name])[0])
        return message

    def wait(
        self, names: Sequence[str], timeout_seconds: float, check: Callable[[], None]
    ) -> str | None:
        """Waits for any of some messages; returns the first that is there, None for none in time.

        Asks, with growing pauses, so that thousands of ranks that wait for long ask seldom: what
        the store offers for waiting complains on standard error, and no Ctrl-C ends it.

        Args:
            names: Of the messages, in order of preference.
            timeout_seconds: For how long to wait.
            check: Called before each look; what it raises ends the wait.
        """
        began = time.monotonic()
        with span("wait for ranks"):
            while True:
                check()
                for name in names:
                    if self.has(name):
                        return name
                waited_seconds = time.monotonic() - began
                if waited_seconds >= timeout_seconds:
                    return None
                pause_seconds = max(waited_seconds * _PAUSE_SHARE, _PAUSE_SECONDS_MIN)
                pause_seconds = min(pause_seconds, _PAUSE_SECONDS_MAX)
                time.sleep(min(pause_seconds, timeout_seconds - waited_seconds))

    def delete(self, names: Iterable[str]) -> None:
        """Takes messages away, if they are there."""
        with _talking():
            for name in names:
                self._store.delete_key(self.key(name))

    def key(self, name: str) -> str:
        """The key of a message in the store."""
        return f"{self._prefix}/{name}"


@contextmanager
def _talking() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RankError(
            f"the store through which the ranks talk is gone: {reason}; the process that holds it, "
            "rank 0 or its launcher, has died",
            rank=0,
        ) from None
