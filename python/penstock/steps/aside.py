"""Damaged steps that were set aside: in nobody's way, and kept for salvage.

A step that is known to be damaged is renamed within its store, to ``damaged-N-M``, when a load has
gone back to an older one, or when the step is saved again. `penstock.explain`, `penstock.salvage`
and `penstock.verify` take its new path.
"""

from __future__ import annotations

from typing import NamedTuple


class SetAside(NamedTuple):
    """A damaged step that was set aside.

    Attributes:
        step: The training step that it was.
        path: Where it is now.
    """

    step: int
    path: str


def told_aside(path: str) -> str:
    """Where a step is now, in words that follow its damage."""
    return f"it is set aside as {path}, from where `penstock salvage` takes what is intact"
