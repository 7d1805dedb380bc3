"""`Coming`: the batches of a stream, as they are taken ahead."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.features.batches import on_host
from penstock.features.ids import Ids, ids_of
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.features.prefetch import ForeseenRows

_NO_MORE = object()


class Coming:
    """Batches as they are taken, and what ends them."""

    def __init__(self, batches: Iterable[Any]) -> None:
        if not isinstance(batches, Iterable):
            raise TypeError(f"batches={batches!r:.80}: must be an iterable of ids")
        self._source = iter(batches)
        self._count = 0
        self._error: Exception | None = None

    def next(
        self, foreseen: Callable[[Ids, torch.device | None], ForeseenRows]
    ) -> tuple[Any, ForeseenRows, int] | None:
        """The next one, as the cache knows of it; None where there is none, or an error."""
        if self._error is not None:
            return None
        try:
            taken: Any = next(self._source, _NO_MORE)
            if taken is _NO_MORE:
                return None
            # Whoever makes batches may fill the same memory again.
            ids = copy.deepcopy(taken) if isinstance(taken, (np.ndarray, list)) else taken
            if dtypes.is_tensor(taken):
                ids = taken.detach().clone()
            values, where = on_host(ids)
            numbers = ids_of(values)
            found = ids, foreseen(numbers, where), max(1, math.prod(numbers.shape))
        except Exception as error:
            error.add_note(f"batch {self._count} of the stream, counted from 0")
            self._error = error
            return None
        self._count += 1
        return found

    def end(self) -> None:
        """Raises what has ended them before their end."""
        if self._error is not None:
            raise self._error
