"""`Steps`: what a load asks of a store, whatever that is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock import _native


class Steps(Protocol):
    """What a load asks of a store."""

    def newest(
        self, *, last: int | None = None
    ) -> tuple[list[tuple[int, str, str | None]], _native.Checkpoint | None]:
        """The steps up to one down to the first that can be loaded, with states and reasons.

        That first one comes opened where it was on the way to find it, and nobody is kept from
        removing its files by that: what was asked of a bucket need not be asked again.
        """

    def state(self, step: int) -> str | None:
        """What is at a step."""

    def step_path(self, step: int) -> str:
        """Where a step is or would be."""

    def identity(self, step: int) -> str | None:
        """Identity of what is at a step."""

    def newest_complete(self, *, below: int | None = None) -> int | None:
        """The newest complete step that is not known to be damaged."""

    def is_left_behind(self, step: int) -> bool | None:
        """Whether a step without a manifest has files that no save is at work on."""

    def mark_verified(self, step: int, checkpoint_id: str) -> None:
        """Remembers that a checkpoint was found good."""

    def mark_damaged(self, step: int, checkpoint_id: str) -> None:
        """Remembers that a checkpoint was found damaged."""

    def set_aside(self, step: int) -> str | None:
        """Sets a damaged step aside; tells where it is then."""

    def aside(self) -> list[tuple[int, str]]:
        """What was set aside."""
