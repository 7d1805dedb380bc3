"""Pauses Python's cyclic garbage collector while a state is walked, and during a load."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection inside the block.

    Walking a state creates hundreds of thousands of containers, none of them garbage. The collector
    would traverse them, and all other objects, repeatedly: measured, half of the time of flattening
    200,000 tensors, and a third of that of loading them. A load pauses collection from beginning to
    end, reading included, because each resumption would cost a whole pass. Garbage without cycles
    is still freed. Threads that pause at the same time restore the state that the first one found.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
