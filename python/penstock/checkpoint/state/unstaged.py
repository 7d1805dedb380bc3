"""Lazy saves whose state is not copied yet, for code that is about to change it."""

from __future__ import annotations

from typing import Protocol


class Unstaged(Protocol):
    """A lazy save whose state must not change yet."""

    @property
    def is_ours(self) -> bool:
        """Whether this process runs the save, and is not a fork of the one that does."""

    is_on_device: bool
    """Whether a device initially had some of the state to copy."""

    def hold(self) -> None:
        """Orders the copy before anything that this thread does or queues from now on."""


unstaged: set[Unstaged] = set()
"""All lazy saves whose state is not copied yet."""


def hold_all() -> None:
    """Orders the copies of all lazy saves of this process before later changes."""
    for pending in list(unstaged):
        if pending.is_ours:
            pending.hold()


def hold_devices() -> None:
    """Orders the copies of those lazy saves that have device tensors before later changes."""
    for pending in list(unstaged):
        if pending.is_ours and pending.is_on_device:
            pending.hold()
