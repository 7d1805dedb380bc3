"""`Loader`: torchdata's `StatefulDataLoader`, the place of which is where its iterator is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.training.component import Component

if TYPE_CHECKING:
    from collections.abc import Iterator


class Loader(Component):
    """A loader that goes to its place when it is restored, not when it is first iterated over.

    To begin an iterator draws a number from PyTorch's generator. The run that was saved had drawn
    it by then, so a resumed one may not draw it after the random states are restored.
    """

    @staticmethod
    def is_one(value: Any) -> bool:
        """Whether a value is such a loader."""
        module = sys.modules.get("torchdata.stateful_dataloader")
        return module is not None and isinstance(value, module.StatefulDataLoader)

    def mismatches(self, state: Any, *, is_partial: bool) -> Iterator[str]:
        """Why it cannot go to a place; nothing is changed."""
        yield from super().mismatches(state, is_partial=is_partial)
        saved, here = _workers(state), self.value.num_workers
        if saved is not None and saved != here:
            yield (
                f"{saved} workers in the checkpoint, {here} in the training: each has a place of "
                f"its own, so it takes num_workers={saved}"
            )

    def restore(self, state: Any, *, is_partial: bool) -> None:
        """Goes to its place."""
        super().restore(state, is_partial=is_partial)
        # This begins the iterator, which ``iter(loader)`` then gives out.
        self.value.state_dict()


def _workers(state: Any) -> int | None:
    """How many workers a loader had; None where its state does not say."""
    try:
        if "_snapshot" in state:
            return int(state["_snapshot"]["_main_snapshot"]["_num_workers"])
        return 0 if "_num_yielded" in state else None
    except (TypeError, KeyError):
        return None
