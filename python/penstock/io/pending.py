"""`Pending`: transfers whose outcome has not been reported yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.io.transfer import Transfer

_SWEPT_MIN = 1024


class Pending:
    """Transfers whose outcome has not been reported yet, in submission order.

    Any thread may add and sweep at any time: each step is a single operation on a `dict`, which is
    atomic. A lock could be held during a fork, so there is none.
    """

    def __init__(self) -> None:
        self._transfers: dict[Transfer, None] = {}
        self._sweep_at = _SWEPT_MIN

    def add(self, transfer: Transfer) -> None:
        """Adds a transfer, and now and then sweeps the others."""
        self._transfers[transfer] = None
        if len(self._transfers) > self._sweep_at:
            self.sweep()

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._transfers))

    def sweep(self) -> None:
        """Removes transfers whose outcome needs no report."""
        for transfer in self:
            if transfer.is_reported:
                self._transfers.pop(transfer, None)
        self._sweep_at = max(_SWEPT_MIN, 2 * len(self._transfers))

    def clear(self) -> None:
        """Removes all transfers."""
        self._transfers.clear()
