"""What was handed over, as long as somebody has to hear of its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.io.transfer import Transfer

_SWEPT_MIN = 1024


class Pending:
    """Transfers of whose end somebody has to hear, in the order in which they were handed over.

    Any thread adds and sweeps at any time: each step is one of a `dict`, which no thread sees half
    done. There is no lock, which a fork could find taken.
    """

    def __init__(self) -> None:
        self._transfers: dict[Transfer, None] = {}
        self._sweep_at = _SWEPT_MIN

    def add(self, transfer: Transfer) -> None:
        """Has it remembered, and the others forgotten now and then."""
        self._transfers[transfer] = None
        if len(self._transfers) > self._sweep_at:
            self.sweep()

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._transfers))

    def sweep(self) -> None:
        """Forgets those of which nobody has to hear any more."""
        for transfer in self:
            if transfer.is_settled:
                self._transfers.pop(transfer, None)
        self._sweep_at = max(_SWEPT_MIN, 2 * len(self._transfers))

    def clear(self) -> None:
        """Forgets all."""
        self._transfers.clear()
