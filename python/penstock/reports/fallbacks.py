"""`Fallback`: the reason why a preferred method was not used."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

FallbackKind: TypeAlias = Literal[
    "engine",
    "buffered",
    "eager",
    "unreserved",
    "unlinked",
    "leftover",
    "unindexed",
    "untied",
    "renamed",
    "copy",
    "unpinned",
]
"""Kinds of `Fallback`."""


class Fallback(str):
    """The reason why a preferred method was not used: a text with a ``kind``.

    Attributes:
        kind: ``"engine"`` (threads move the bytes instead of io_uring), ``"buffered"`` (bytes go
            through the page cache although this was not requested), ``"eager"`` (a lazy save copied
            the state at its call), ``"unreserved"`` (space is not reserved before writing),
            ``"unlinked"`` (a file of tensors could not be hard-linked: its blocks are shared, or it
            is copied), ``"leftover"`` (replaced files are not removed yet), ``"unindexed"`` (a
            group has no index for readers of models), ``"untied"`` (tensors that share a part of
            their memory come back independent of each other), ``"renamed"`` (readers of models find
            tensors of a group under other names than in the state), ``"copy"`` (damaged chunks were
            read from another copy of the checkpoint) or ``"unpinned"`` (memory that a GPU copies to
            or from could not be pinned).
    """

    __slots__ = ("kind",)
    kind: FallbackKind

    def __new__(cls, reason: str, kind: FallbackKind) -> Self:
        """Creates a reason of this kind."""
        self = super().__new__(cls, reason)
        self.kind = kind
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        # Reports are copied and cross process boundaries.
        return str(self), self.kind
