"""`MirroredSteps`: a store's steps and their copies at its mirror, if it has one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from penstock.checkpoint.mirroring.follower import Follower
from penstock.checkpoint.mirroring.mirror import Mirror
from penstock.checkpoint.mirroring.reader import TieredReader
from penstock.checkpoint.mirroring.tiers import Tiers
from penstock.checkpoint.saving.destination import warn
from penstock.checkpoint.saving.save_queue import BackgroundSaver
from penstock.checkpoint.steps.reader import Reader
from penstock.checkpoint.steps.stored import StoredSteps
from penstock.common.paths import of_bucket
from penstock.common.tracing import span
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.steps.retention import Retention
    from penstock.options import Options
    from penstock.reports import MirrorStatus


class MirroredSteps(StoredSteps, BackgroundSaver):
    """The steps of a store, and their copies in a bucket.

    Args:
        root: The store's directory.
        retention: The retention rules for local steps.
        options: How bytes move; None for ``Options()``.
        mirror: The mirror; None for none.
    """

    def __init__(
        self, root: str, retention: Retention, options: Options | None, mirror: Mirror | None
    ) -> None:
        super().__init__(root, retention, options)
        self._follower: Follower | None = None
        if mirror is None:
            return
        given: object = mirror
        if not isinstance(given, Mirror):
            raise TypeError(f"mirror={mirror!r}: must be a penstock.Mirror or None")
        if of_bucket(root):
            raise ValueError(
                f"mirror={mirror.url!r}: copies are made of steps on local storage, and {root} is "
                "in a bucket already"
            )
        self._follower = Follower(mirror, self._native, options)
        # The thread is not awaited: its successor sends the remaining steps.
        ends = weakref.finalize(self, Follower.close, self._follower, 0.0)
        ends.atexit = False

    def latest(self) -> int | None:
        """Returns the newest complete step that is not known to be damaged; None if there is none.

        With a mirror, the newest of both; if the mirror is unreachable, the newest local step.
        Damage is known if `load`, `verify` or `scrub` found it and no later verification succeeded.
        A `load` without a step ignores this knowledge: it reads the newest complete step, and its
        damage is an error each time, until ``fallback=True`` or a new save sets the step aside.
        """
        if self._follower is None:
            return super().latest()
        tiers = Tiers(self._native, self._follower.remote, warn=lambda _: None, needs=False)
        return tiers.newest_complete()

    def mirror_status(self) -> MirrorStatus:
        """Returns the state of copying steps to the mirror, in this process.

        Among many ranks, rank 0 copies.

        Raises:
            PenstockError: The store has no mirror.
        """
        return self._mirroring().status()

    def wait_for_mirror(self, timeout_seconds: float | None = None) -> bool:
        """Waits until all complete steps that are due are at the mirror.

        Also copies steps that an earlier process left. Steps that cannot be copied
        (`MirrorStatus.refused`) are not waited for.

        Args:
            timeout_seconds: Longest wait, in seconds; None for no limit.

        Returns:
            Whether all due steps are mirrored or refused.

        Raises:
            PenstockError: The store has no mirror.
        """
        return self._mirroring().wait(timeout_seconds)

    def close(self) -> None:
        """Waits for the last `save_async`, releases its memory, and stops copying to the mirror.

        The store stays usable. Steps that are not mirrored yet are sent when copying starts again,
        in any process: `wait_for_mirror` waits for all of them.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        try:
            super().close()
        finally:
            if self._follower is not None:
                self._follower.close()

    def _after_save(self, step: int, stacklevel: int) -> None:
        """Deletes steps by the retention rules, and starts the copy of the new step."""
        with span("retire"):
            self._retire(step, stacklevel)
        self._mirror(step)

    def _mirroring(self) -> Follower:
        if self._follower is None:
            raise PenstockError(
                f"{self._root} has no mirror: give CheckpointStore(…, mirror=penstock.Mirror(url))"
            )
        return self._follower

    def _mirror(self, step: int) -> None:
        """Starts the copy of a new step, and waits for it if the mirror's settings say so."""
        follower = self._follower
        if follower is None or not follower.mirror.is_due(step):
            return
        # Errors of earlier steps: also those that a background save could not raise.
        if (unreported := follower.take_unreported()) is not None:
            warn(f"steps of {self._root} are not at {follower.mirror.url} yet: {unreported}")
        if follower.mirror.wait == "commit":
            follower.wait_for(step)
        else:
            follower.follow()

    def _reader_of(self, ranks: Ranks | None, *, fallback: bool) -> Reader:
        """Returns the reader that loads steps, for these ranks."""
        follower = self._follower
        if follower is None:
            return Reader(self._native, self._root, self._options, ranks)
        return TieredReader(
            self._native,
            follower.remote,
            self._root,
            follower.mirror.url,
            self._options,
            ranks,
            # A load that falls back to older steps can also use local ones.
            needs=not fallback,
        )
