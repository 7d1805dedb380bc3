"""`Barriers`: barriers within one operation of all ranks, which a rank that fails breaks for all.

A barrier of `torch.distributed` waits for a rank that raises before it until a timeout. These use
the key-value store, as every `penstock.checkpoint.ranks.round.Round` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checkpoint.ranks.group import find

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed import ProcessGroup


class Barriers:
    """The barriers of one operation, such as a load; a context manager around it.

    All ranks pass the same barriers in the same order. If the block raises on one rank, the next
    barrier raises on all others. So the last statement of the block is a barrier, or `close`: an
    error after it is no longer awaited.

    Args:
        label: The operation; the same on all ranks.
        process_group: The ranks that take part; None for all.
        timeout_seconds: Longest wait for another rank, in seconds.
    """

    def __init__(
        self, label: str, *, process_group: ProcessGroup | None = None, timeout_seconds: float
    ) -> None:
        self._ranks = find(process_group, no_dist=False)
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._is_closed = False

    def __enter__(self) -> Barriers:
        return self

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if error is not None and self._ranks is not None and not self._is_closed:
            self._ranks.refuse(self._label, self._timeout_seconds, error)

    def wait(self, is_true: bool = True) -> bool:
        """Waits for all ranks; returns whether the answer is True on all of them.

        Raises:
            RankError: Another rank has failed, or has not come in time.
        """
        if self._ranks is None:
            return is_true
        try:
            return self._ranks.is_true_for_all(self._label, self._timeout_seconds, is_true)
        except BaseException:
            # The other ranks know of it.
            self._is_closed = True
            raise

    def close(self) -> None:
        """Ends the barriers: errors from here on are reported to the other ranks otherwise."""
        self._is_closed = True
