"""`Tiers`: the steps of a store and those of its mirror, as one.

Local storage comes first, where both have a step. What is remembered of steps that were read back
is of the local copies, and so is what is set aside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock import _native

_PASSED_OVER = frozenset({"incomplete", "damaged", "partial"})
"""States of steps that a load goes past."""

_T = TypeVar("_T")

_Row = tuple[int, str, str | None]


class Tiers:
    """What a load asks of a store, of both.

    Args:
        local: The store here.
        remote: The mirror.
        tell: Told what the user should know, where the mirror cannot be asked.
        needs: Whether that is an error, as the mirror may have newer steps.
    """

    def __init__(
        self,
        local: _native.Store,
        remote: _native.Store,
        *,
        tell: Callable[[str], object],
        needs: bool,
    ) -> None:
        self.local = local
        self.remote = remote
        self._tell = tell
        self._needs = needs
        self._refusal: PenstockError | None = None

    def newest(self, *, last: int | None = None) -> tuple[list[_Row], None]:
        """As of one store; of a step that both have, what can be loaded, and first what is here."""
        here, _ = self.local.newest(last=last)
        nothing: list[_Row] = []
        there = self._ask(lambda: self.remote.newest(last=last)[0], nothing)
        if self._refusal is not None and all(row[1] in _PASSED_OVER for row in here):
            # Not "there is nothing": who hears that starts from scratch.
            raise self._refusal
        rows = {row[0]: row for row in there if row[1] not in _PASSED_OVER}
        rows |= {row[0]: row for row in here if row[1] not in _PASSED_OVER or row[0] not in rows}
        merged = sorted(rows.values(), reverse=True)
        for number, row in enumerate(merged):
            if row[1] not in _PASSED_OVER:
                return merged[: number + 1], None
        return merged, None

    def state(self, step: int) -> str | None:
        """What is at a step."""
        state = self.local.state(step)
        if state is not None and state not in _PASSED_OVER:
            return state
        there = self._ask(lambda: self.remote.state(step), None)
        return state if there is None or there in _PASSED_OVER else there

    def is_local(self, step: int) -> bool:
        """Whether a step is loaded from here: what is here can be, or nothing there."""
        state = self.local.state(step)
        if state is not None and state not in _PASSED_OVER:
            return True
        there = self._ask(lambda: self.remote.state(step), None)
        return there is None or there in _PASSED_OVER

    def step_path(self, step: int) -> str:
        """Where the local copy of a step is or would be."""
        return self.local.step_path(step)

    def identity(self, step: int) -> str | None:
        """Identity of the local copy of a step."""
        return self.local.identity(step)

    def newest_complete(self, *, below: int | None = None) -> int | None:
        """The newest complete step, of those below one."""
        here = self.local.newest_complete(below=below)
        there = self._ask(lambda: self.remote.newest_complete(below=below), None)
        return max((step for step in (here, there) if step is not None), default=None)

    def is_left_behind(self, step: int) -> bool | None:
        """Whether a step without a manifest here has files that no save is at work on."""
        return self.local.is_left_behind(step)

    def mark_verified(self, step: int, checkpoint_id: str) -> None:
        """Remembers that the local copy was found good."""
        self.local.mark_verified(step, checkpoint_id)

    def mark_damaged(self, step: int, checkpoint_id: str) -> None:
        """Remembers that the local copy was found damaged."""
        self.local.mark_damaged(step, checkpoint_id)

    def set_aside(self, step: int) -> str | None:
        """Sets the local copy of a damaged step aside."""
        return self.local.set_aside(step)

    def aside(self) -> list[tuple[int, str]]:
        """What was set aside here."""
        return self.local.aside()

    def _ask(self, ask: Callable[[], _T], otherwise: _T) -> _T:
        """What the mirror answers; asked once where it cannot be."""
        if self._refusal is not None:
            return otherwise
        try:
            return ask()
        except PenstockError as error:
            if self._needs:
                error.add_note(
                    "the mirror may have newer steps: fallback=True goes on with what is here"
                )
                raise
            self._refusal = error
            self._tell(f"the mirror cannot be asked, so only steps that are here count: {error}")
            return otherwise
