"""`Frozen`: a state that nobody changes any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """Marks a whole state of which nothing changes, and whose memory stays while it is referred to.

    Arrays of JAX are like that. A lazy save of such a state copies nothing at the call and has
    nothing watched.

    Attributes:
        value: The state.
    """

    value: Any
