"""`MirroredSteps`: a store's steps and their copies at its mirror, if it has one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from penstock.checkpoint.mirroring.follower import Follower
from penstock.checkpoint.mirroring.mirror import Mirror
from penstock.checkpoint.mirroring.reader import TieredReader
from penstock.checkpoint.mirroring.tiers import Tiers
from penstock.checkpoint.steps.reader import Reader
from penstock.common.paths import of_bucket
from penstock.common.warn import warn
from penstock.errors import CannotSealError, PenstockError

if TYPE_CHECKING:
    from penstock import _native
    from penstock.checkpoint.ranks.group import Ranks
    from penstock.options import Options


class MirroredSteps:
    """The steps of a store, and their copies in a bucket."""

    def __init__(
        self,
        native: _native.Store,
        root: str,
        options: Options | None,
        mirror: Mirror | None,
        *,
        is_sealed: bool = False,
        is_signed: bool = False,
    ) -> None:
        self._native = native
        self._root = root
        self._options = options
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
        if mirror.sealing is not None and is_sealed:
            raise ValueError(
                f"mirror={mirror.url!r}: Mirror(sealing=) seals copies of clear steps, and "
                "sealing= or identities= of the store demand sealed steps, which are copied as "
                "they are: leave one of them out; keys of sealed copies go to Mirror(identities=)"
            )
        if mirror.sealing is not None and is_signed:
            raise ValueError(
                f"mirror={mirror.url!r}: Mirror(sealing=) makes copies without signatures, and "
                "signed_by= refuses those: leave one of them out"
            )
        self._follower = Follower(mirror, native, options)
        # The thread is not awaited: its successor sends the remaining steps.
        ends = weakref.finalize(self, Follower.close, self._follower, 0.0)
        ends.atexit = False

    @property
    def follower(self) -> Follower:
        """The thread that copies steps."""
        if self._follower is None:
            raise PenstockError(
                f"{self._root} has no mirror: give CheckpointStore(…, mirror=penstock.Mirror(url))"
            )
        return self._follower

    def check_sealable(self, step: int, *, has_groups: bool, has_files: bool) -> None:
        """Refuses a step that could not be copied sealed, before it is saved.

        Raises:
            CannotSealError: The mirror seals copies, and the step has groups or small files.
        """
        if self._follower is None or not (has_groups or has_files):
            return
        mirror = self._follower.mirror
        if mirror.sealing is not None and mirror.is_due(step):
            what = "groups=" if has_groups else "files="
            raise CannotSealError(
                f"{mirror.url}: {what} is for readers of models, and would stay clear at the "
                "mirror; leave that out, or mirror without sealing=",
                path=mirror.url,
            )

    def newest_complete(self) -> int | None:
        """Returns the newest complete step of both that is not known to be damaged."""
        if self._follower is None:
            return self._native.newest_complete()
        tiers = Tiers(self._native, self._follower.remote, warn=lambda _: None, needs=False)
        return tiers.newest_complete()

    def close(self) -> None:
        """Stops copying, until the next save or wait."""
        if self._follower is not None:
            self._follower.close()

    def saved(self, step: int) -> None:
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

    def reader(self, ranks: Ranks | None, *, fallback: bool) -> Reader:
        """Returns the reader that loads steps, for these ranks."""
        follower = self._follower
        if follower is None:
            return Reader(self._native, self._root, self._options, ranks)
        return TieredReader(
            self._native,
            follower.remote,
            self._root,
            follower.mirror,
            self._options,
            ranks,
            # A load that falls back to older steps can also use local ones.
            needs=not fallback,
        )
