"""`MirroredSteps`: what a store has to do with its mirror, if it has one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from penstock.checkpoint.mirroring.follower import Follower
from penstock.checkpoint.mirroring.mirror import Mirror
from penstock.checkpoint.mirroring.reader import TieredReader
from penstock.checkpoint.mirroring.tiers import Tiers
from penstock.checkpoint.saving.destination import warn
from penstock.checkpoint.saving.waiting import Waiting
from penstock.checkpoint.steps.reader import Reader
from penstock.checkpoint.steps.stored import StoredSteps
from penstock.common.paths import of_bucket
from penstock.common.tracing import span
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.checkpoint.mirroring.reports import MirrorStatus
    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.steps.retention import Retention
    from penstock.options import Options


class MirroredSteps(StoredSteps, Waiting):
    """The steps of a store, and the copies of them in a bucket.

    Args:
        root: The store's directory.
        retention: What is kept of the steps there.
        options: How bytes move; None for ``Options()``.
        mirror: Where the copies are; None for none.
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
        # Nobody waits for the thread: what it has not sent is sent by whoever comes next.
        ends = weakref.finalize(self, Follower.close, self._follower, 0.0)
        ends.atexit = False

    def latest(self) -> int | None:
        """The newest complete step that is not known to be damaged; None if there is none.

        Of a store with a mirror, the newest of both; where the mirror cannot be asked, of what is
        here. Known is what `load`, `verify` and `scrub` found and nobody has verified since. A
        `load` without a step does not go by that: it reads the newest complete step, and its damage
        is an error each time, until ``fallback=True`` or a new save has it set aside.
        """
        if self._follower is None:
            return super().latest()
        tiers = Tiers(self._native, self._follower.remote, tell=lambda _: None, needs=False)
        return tiers.newest_complete()

    def mirror_status(self) -> MirrorStatus:
        """How the copying of steps to the mirror stands, in this process.

        Of many ranks, rank 0 copies.

        Raises:
            PenstockError: The store has no mirror.
        """
        return self._mirroring().status()

    def wait_for_mirror(self, timeout_seconds: float | None = None) -> bool:
        """Waits until all complete steps that are due are at the mirror.

        Begins to copy what an earlier process has left, too. What cannot be copied as it is
        (`MirrorStatus.refused`) is not waited for.

        Args:
            timeout_seconds: For how long; None for as long as it takes.

        Returns:
            Whether all of them are there, or refused.

        Raises:
            PenstockError: The store has no mirror.
        """
        return self._mirroring().wait(timeout_seconds)

    def close(self) -> None:
        """Waits for the last `save_async`, gives its memory back, and stops copying to the mirror.

        This stays usable. What is not at the mirror yet is sent when copying begins again, in
        whatever process: `wait_for_mirror` waits until all is there.

        Raises:
            PenstockError: The error of that save, if nobody has seen it.
        """
        try:
            super().close()
        finally:
            if self._follower is not None:
                self._follower.close()

    def _after_save(self, step: int, stacklevel: int) -> None:
        """Deletes what the store no longer keeps, and has the step copied."""
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
        """Has a step copied that was saved just now, and waits for it if the mirror says so."""
        follower = self._follower
        if follower is None or not follower.mirror.is_due(step):
            return
        # Of earlier steps: also what a save in the background could not raise.
        if (untold := follower.take_untold()) is not None:
            warn(f"steps of {self._root} are not at {follower.mirror.url} yet: {untold}")
        if follower.mirror.wait == "commit":
            follower.wait_for(step)
        else:
            follower.follow()

    def _reader_of(self, ranks: Ranks | None, *, fallback: bool) -> Reader:
        """Who loads steps, for these ranks."""
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
            # Who goes back to older steps anyway does with what is here.
            needs=not fallback,
        )
