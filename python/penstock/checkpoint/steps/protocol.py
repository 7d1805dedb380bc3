"""`StepSource`: the interface of stores that a load uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock import _native


class StepSource(Protocol):
    """The interface of a store that a load uses."""

    def newest(
        self, *, last: int | None = None
    ) -> tuple[list[tuple[int, str, str | None]], _native.Checkpoint | None]:
        """Returns the steps from a limit down to the first loadable one, with states and reasons.

        That step is also returned open if it was opened on the way. Its files may still be removed;
        this only saves repeated requests to a bucket.
        """

    def state(self, step: int) -> str | None:
        """Returns the state of a step."""

    def step_path(self, step: int) -> str:
        """Returns the path of a step, whether it exists or not."""

    def identity(self, step: int) -> str | None:
        """Returns the id of the checkpoint at a step."""

    def newest_complete(self, *, below: int | None = None) -> int | None:
        """Returns the newest complete step that is not known to be damaged."""

    def is_left_behind(self, step: int) -> bool | None:
        """Whether a step without a manifest has files that no running save owns."""

    def mark_verified(self, step: int, checkpoint_id: str) -> None:
        """Records that a checkpoint was found good."""

    def mark_damaged(self, step: int, checkpoint_id: str) -> None:
        """Records that a checkpoint was found damaged."""

    def quarantine(self, step: int) -> str | None:
        """Sets a damaged step aside; returns its new path."""

    def quarantined(self) -> list[tuple[int, str]]:
        """Returns the steps that were set aside."""
