"""`Tiers`: presents the steps of a store and of its mirror as one store.

If both have a step, the local copy comes first. Verification marks belong to local copies, and only
local copies are quarantined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock import _native

_PASSED_OVER = frozenset({"incomplete", "damaged", "partial"})
"""States of steps that a load skips."""

_T = TypeVar("_T")

_Row = tuple[int, str, str | None]


class Tiers:
    """The store interface of a load, over a store and its mirror.

    Args:
        local: The local store.
        remote: The mirror.
        warn: Receives a message for the user if the mirror is unreachable.
        needs: Whether an unreachable mirror is an error, as it may have newer steps.
    """

    def __init__(
        self,
        local: _native.Store,
        remote: _native.Store,
        *,
        warn: Callable[[str], object],
        needs: bool,
    ) -> None:
        self.local = local
        self.remote = remote
        self._warn = warn
        self._needs = needs
        self._refusal: PenstockError | None = None

    def newest(self, *, last: int | None = None) -> tuple[list[_Row], None]:
        """Returns steps as a store does; of a step in both, a loadable copy, preferably local."""
        here, _ = self.local.newest(last=last)
        nothing: list[_Row] = []
        there = self._ask(lambda: self.remote.newest(last=last)[0], nothing)
        if self._refusal is not None and all(row[1] in _PASSED_OVER for row in here):
            # Not reported as "not found": callers take that as a reason to start from scratch.
            raise self._refusal
        rows = {row[0]: row for row in there if row[1] not in _PASSED_OVER}
        rows |= {row[0]: row for row in here if row[1] not in _PASSED_OVER or row[0] not in rows}
        merged = sorted(rows.values(), reverse=True)
        for number, row in enumerate(merged):
            if row[1] not in _PASSED_OVER:
                return merged[: number + 1], None
        return merged, None

    def state(self, step: int) -> str | None:
        """Returns the state of a step."""
        state = self.local.state(step)
        if state is not None and state not in _PASSED_OVER:
            return state
        there = self._ask(lambda: self.remote.state(step), None)
        return state if there is None or there in _PASSED_OVER else there

    def is_local(self, step: int) -> bool:
        """Whether a step is loaded from here: loadable here, or not loadable at the mirror."""
        state = self.local.state(step)
        if state is not None and state not in _PASSED_OVER:
            return True
        there = self._ask(lambda: self.remote.state(step), None)
        return there is None or there in _PASSED_OVER

    def step_path(self, step: int) -> str:
        """Returns the path of a step's local copy, whether it exists or not."""
        return self.local.step_path(step)

    def identity(self, step: int) -> str | None:
        """Returns the identity of a step's local copy."""
        return self.local.identity(step)

    def newest_complete(self, *, below: int | None = None) -> int | None:
        """Returns the newest complete step, optionally below a limit."""
        here = self.local.newest_complete(below=below)
        there = self._ask(lambda: self.remote.newest_complete(below=below), None)
        return max((step for step in (here, there) if step is not None), default=None)

    def is_left_behind(self, step: int) -> bool | None:
        """Whether a local step without a manifest has files that no running save owns."""
        return self.local.is_left_behind(step)

    def mark_verified(self, step: int, checkpoint_id: str) -> None:
        """Records that the local copy was found good."""
        self.local.mark_verified(step, checkpoint_id)

    def mark_damaged(self, step: int, checkpoint_id: str) -> None:
        """Records that the local copy was found damaged."""
        self.local.mark_damaged(step, checkpoint_id)

    def quarantine(self, step: int) -> str | None:
        """Quarantines the local copy of a damaged step."""
        return self.local.quarantine(step)

    def quarantined(self) -> list[tuple[int, str]]:
        """Returns the local steps that were quarantined."""
        return self.local.quarantined()

    def _ask(self, ask: Callable[[], _T], otherwise: _T) -> _T:
        """Returns the mirror's answer; an unreachable mirror is asked only once."""
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
            self._warn(f"the mirror cannot be asked, so only steps that are here count: {error}")
            return otherwise
