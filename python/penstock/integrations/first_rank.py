"""`from_first`: lets the first rank decide for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def from_first(find: Callable[[], T]) -> T:
    """Returns the first rank's result of a function on every rank, or raises its error there.

    Ranks that look by themselves may each see another newest checkpoint, as shared storage may show
    changes to them at different times. All ranks call it.
    """
    if not dist.is_available() or not dist.is_initialized():
        return find()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = find()
        except Exception as error:
            # Sent, as the others would otherwise wait for ever.
            told[1] = error
    dist.broadcast_object_list(told)
    found, failed = told
    if failed is not None:
        raise failed
    return found  # type: ignore[no-any-return]
