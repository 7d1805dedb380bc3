"""Retention: the steps of a store that are kept, and the deletion of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.checkpoint.loading.dcp_files import drop_mark
from penstock.checkpoint.state.tree import tree
from penstock.reports import RetentionReport

if TYPE_CHECKING:
    from penstock import _native

Keep: TypeAlias = Callable[[int, dict[str, Any]], bool]
"""A function of a step and its metadata that returns whether to keep the step."""


class Retention:
    """The retention rules of a store.

    Args:
        keep_last: Number of newest complete steps to keep; None keeps all.
        keep_every: Multiples of this are kept as well.
        keep: Called for each step that would be deleted.
    """

    def __init__(self, keep_last: int | None, keep_every: int | None, keep: Keep | None) -> None:
        self._keep_last = _check_count("keep_last", keep_last)
        self._keep_every = _check_count("keep_every", keep_every)
        if keep is not None and not callable(keep):
            raise TypeError(f"keep={keep!r}: must be a function of a step and its metadata")
        self._keep = keep
        for name, value in (("keep_every", keep_every), ("keep", keep)):
            if value is not None and keep_last is None:
                raise ValueError(f"{name}= says what keep_last= does not delete: give keep_last=")

    @property
    def keeps_all(self) -> bool:
        """Whether no step is ever deleted."""
        return self._keep_last is None

    def apply(self, store: _native.Store, saved: int | None, *, dry_run: bool) -> RetentionReport:
        """Deletes the steps that are not kept, or only reports them.

        All decisions, including the user's function, come before the first deletion.

        Args:
            store: The store.
            saved: The step just saved; steps above it neither count nor are deleted. None counts
                all.
            dry_run: Whether to delete nothing.
        """
        rows = store.plan_retention(self._keep_last, self._keep_every, saved)
        kept, doomed = {}, []
        for step, reason, checkpoint_id, metadata in rows:
            if reason is not None:
                kept[step] = reason
            elif self._wants(step, metadata, store.step_path(step)):
                kept[step] = "keep() says so"
            elif checkpoint_id is not None:
                doomed.append((step, checkpoint_id))
        deleted = [step for step, _ in doomed]
        if not dry_run:
            try:
                deleted = store.retire(doomed)
            finally:
                # Also for steps deleted before an error.
                for step, _ in doomed:
                    drop_mark(store.step_path(step))
            passed_over = {step for step, _ in doomed}.difference(deleted)
            reason = "protected, replaced or in use since this began"
            kept = dict(sorted({**kept, **dict.fromkeys(passed_over, reason)}.items()))
        return RetentionReport(dry_run=dry_run, deleted=tuple(deleted), kept=kept)

    def _wants(self, step: int, metadata: str | None, path: str) -> bool:
        if self._keep is None:
            return False
        with tree.reading(path, None):
            note = tree.parse_metadata(metadata or "{}")
        answer: Any = self._keep(step, note)
        if not isinstance(answer, bool | np.bool_):
            # A function without a return statement would delete everything.
            raise TypeError(f"keep({step}, …) returned {answer!r}: must be True or False")
        return bool(answer)


def _check_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise TypeError(f"{name}={value!r}: must be an int or None")
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1")
    return value
