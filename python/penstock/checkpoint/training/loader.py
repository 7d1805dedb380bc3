"""`LoaderComponent`: torchdata's `StatefulDataLoader`, whose position is that of its iterator."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.training.component import Component

if TYPE_CHECKING:
    from collections.abc import Iterator


class LoaderComponent(Component):
    """A loader that moves to its position when restored, not at its first iteration.

    Starting an iterator draws a number from PyTorch's generator. The saved run had already drawn
    it, so a resumed run must not draw it after the random states are restored.
    """

    @staticmethod
    def is_one(value: Any) -> bool:
        """Whether a value is such a loader."""
        module = sys.modules.get("torchdata.stateful_dataloader")
        return module is not None and isinstance(value, module.StatefulDataLoader)

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        """Yields the reasons why the loader cannot move to a position; changes nothing."""
        yield from super().mismatches(state, is_partial=is_partial)
        saved, here = _workers(state), self.value.num_workers
        if saved is not None and saved != here:
            yield (
                f"{saved} workers in the checkpoint, {here} in the training: each has a place of "
                f"its own, so it takes num_workers={saved}"
            )

    def restore(self, state: Any, *, is_partial: bool) -> None:
        """Moves to the stored position."""
        super().restore(state, is_partial=is_partial)
        # This starts the iterator, which ``iter(loader)`` then returns.
        self.value.state_dict()


def _workers(state: Any) -> int | None:
    """Returns the number of workers of the saved loader; None if its state does not contain it."""
    try:
        if "_snapshot" in state:
            return int(state["_snapshot"]["_main_snapshot"]["_num_workers"])
        return 0 if "_num_yielded" in state else None
    except (TypeError, KeyError):
        return None
