"""What the first of all ranks finds out, for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def from_first(find: Callable[[], T]) -> T:
    """What the first rank finds, on every rank, or the error that it raises.

    Ranks that look for themselves may see another newest checkpoint each, on storage that tells
    them of changes at different times. All of them call it.

    Args:
        find: What to find out; called on the first rank only.
    """
    if not dist.is_available() or not dist.is_initialized():
        return find()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = find()
        except Exception as error:
            # The others would wait for what never comes.
            told[1] = error
    dist.broadcast_object_list(told)
    found, failed = told
    if failed is not None:
        raise failed
    return found  # type: ignore[no-any-return]
