"""Python's cyclic garbage collector, paused while a state is walked or built."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses collections inside the block.

    Walking a state makes hundreds of thousands of containers, none of them garbage. The collector
    would traverse all of them, and everything else in the process, again and again: measured, half
    of the time of flattening 200,000 tensors. Threads that pause at the same time leave it as the
    first one found it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
