"""Lazy saves whose state is not copied yet, for whoever is about to change it."""

from __future__ import annotations

from typing import Protocol


class Unstaged(Protocol):
    """A lazy save whose state must not change yet."""

    @property
    def is_ours(self) -> bool:
        """Whether this process saves, and not the one that it is a fork of."""

    is_on_device: bool
    """Whether a device had some of it to copy at first."""

    def hold(self) -> None:
        """Has it copied before anything that this thread does or queues from now on."""


unstaged: set[Unstaged] = set()
"""All of them."""


def hold_all() -> None:
    """Has copied what any lazy save of this process has not, before it is changed."""
    for pending in list(unstaged):
        if pending.is_ours:
            pending.hold()


def hold_devices() -> None:
    """The same of saves whose state a device has some of."""
    for pending in list(unstaged):
        if pending.is_ours and pending.is_on_device:
            pending.hold()
