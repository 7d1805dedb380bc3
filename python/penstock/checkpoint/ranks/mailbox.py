"""`Mailbox`: messages between the ranks of a job.

They are stored in the key-value store of `torch.distributed`. No operation is a collective: a wait
ends in time, even if ranks have died.
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
"""Shortest pause between two checks for a message."""

_PAUSE_SHARE = 0.05
"""Pause as a fraction of the time already waited."""

_PAUSE_SECONDS_MAX = 0.5


class Mailbox:
    """Messages under names with a common prefix.

    Every method raises `RankError` if the store is gone.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, name: str, text: str) -> None:
        """Stores a short text."""
        with _talking():
            self._store.set(self.key(name), text)

    def post(self, name: str, message: dict[str, Any]) -> None:
        """Stores a message."""
        self.put(name, json.dumps(message))

    def post_first(self, name: str, message: dict[str, Any]) -> None:
        """Stores a message unless one exists."""
        with _talking():
            self._store.compare_set(self.key(name), "", json.dumps(message))

    def count(self, name: str, amount: int = 1) -> int:
        """Adds to a counter, initially 0; returns its new value."""
        with _talking():
            return self._store.add(self.key(name), amount)

    def has(self, name: str) -> bool:
        """Whether a message exists."""
        with _talking():
            return self._store.check([self.key(name)])

    def read(self, names: Sequence[str]) -> list[str]:
        """Returns existing texts."""
        with _talking():
            texts: list[bytes] = self._store.multi_get([self.key(name) for name in names])
        return [text.decode() for text in texts]

    def read_message(self, name: str) -> dict[str, Any] | None:
        """Returns a message; None if it does not exist."""
        if not self.has(name):
            return None
        message: dict[str, Any] = json.loads(self.read([name])[0])
        return message

    def wait(
        self,
        names: Sequence[str],
        timeout_seconds: float,
        check: Callable[[], None],
        pause_seconds: float = 0.0,
    ) -> str | None:
        """Waits for any of some messages; returns the first that exists, or None after the timeout.

        It polls with growing pauses, so that thousands of ranks in long waits poll rarely: the
        store's own wait prints to standard error, and a Ctrl-C does not end it.

        Args:
            names: The messages, in order of preference.
            timeout_seconds: Longest wait, in seconds.
            check: Called before each poll; its exceptions end the wait.
            pause_seconds: Longest pause, if more than half a second.
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
                pause = max(waited_seconds * _PAUSE_SHARE, _PAUSE_SECONDS_MIN)
                pause = min(pause, max(_PAUSE_SECONDS_MAX, pause_seconds))
                time.sleep(min(pause, timeout_seconds - waited_seconds))

    def delete(self, names: Iterable[str]) -> None:
        """Deletes messages, if they exist."""
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
