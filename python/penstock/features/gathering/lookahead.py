"""`Lookahead`: takes the batches of a stream; `HintedRows`: rows announced to the cache."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.features.gathering.pending import PendingRows

_Begun = TypeVar("_Begun")

_NO_MORE = object()


class Lookahead:
    """Takes batches from an iterable, and keeps the error that ends it."""

    def __init__(self, batches: Iterable[Any]) -> None:
        if not isinstance(batches, Iterable):
            raise TypeError(f"batches={batches!r:.80}: must be an iterable of ids")
        self._source = iter(batches)
        self._count = 0
        self._error: Exception | None = None

    def next(self, begin: Callable[[Any], _Begun]) -> tuple[Any, _Begun] | None:
        """The ids of the next batch, and the result of ``begin`` for them; None at the end."""
        if self._error is not None:
            return None
        try:
            taken: Any = next(self._source, _NO_MORE)
            if taken is _NO_MORE:
                return None
            # A copy, as the producer of batches may fill the same memory again.
            ids = copy.deepcopy(taken) if isinstance(taken, (np.ndarray, list)) else taken
            if dtypes.is_tensor(taken):
                ids = taken.detach().clone()
            found = ids, begin(ids)
        except Exception as error:
            error.add_note(f"batch {self._count} of the stream, counted from 0")
            self._error = error
            return None
        self._count += 1
        return found

    def end(self) -> None:
        """Raises the error that ended the batches early, if any."""
        if self._error is not None:
            raise self._error


class HintedRows:
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
            raise ValueError("these rows are hinted no more: hint them again, or gather them")
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
