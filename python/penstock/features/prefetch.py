"""`ForeseenRows`: rows announced to the cache, to be gathered later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.features.pending import PendingRows


class ForeseenRows:
    """Rows announced to the cache: it keeps them before others, and knows when they are needed.

    Gather announced rows once each, in the order of their announcements. Dropping the object
    withdraws the announcement.
    """

    __slots__ = ("__weakref__", "_begin", "_forget")

    def __init__(
        self, begin: Callable[[Any, Any], PendingRows], forget: Callable[[], None]
    ) -> None:
        self._begin: Callable[[Any, Any], PendingRows] | None = begin
        self._forget = forget

    def gather_async(self, out: Any = None, *, device: Any = None) -> PendingRows:
        """Starts to gather the rows; see `Features.gather_async`.

        Raises:
            ValueError: ``out`` does not fit, the table is closed, or they were gathered or
                forgotten before.
        """
        begin, self._begin = self._begin, None
        if begin is None:
            raise ValueError("these rows are foreseen no more: foresee them again, or gather them")
        try:
            return begin(out, device)
        except BaseException:
            self._forget()
            raise

    def forget(self) -> None:
        """Withdraws the announcement. May be called at any time, also repeatedly."""
        if self._begin is not None:
            self._begin = None
            self._forget()

    def __del__(self) -> None:
        if hasattr(self, "_forget"):
            self.forget()
