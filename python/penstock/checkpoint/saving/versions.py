"""`Versions`: whether PyTorch has changed what a device had not copied yet of a lazy save.

No kernel tells of writes to the memory of a device. PyTorch counts the changes in place of each
tensor, once they are queued. What it does not count is not seen: fused optimizers, which all call
`penstock.checkpoint.saving.guard` before they step, collectives, ``tensor.data``, replays of CUDA
graphs, kernels that are given addresses.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.tensors.memory import TensorSource


class Versions:
    """How often tensors on devices had been changed when a save began.

    Args:
        path: The checkpoint's directory.
        sources: The tensors of the save, each held by an owner that shares its count.
    """

    def __init__(self, path: str, sources: Sequence[TensorSource]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._error: StateMismatchError | None = None
        self._counted: list[tuple[int, str, Any, int]] = [
            (index, source[0], tensor, tensor._version)
            for index, source in enumerate(sources)
            if source[8] is not None
            for tensor in _tensors(source[6])
            if not tensor.is_inference()
        ]
        self.ordinals = {source[8][0] for source in sources if source[8] is not None}
        """Numbers of the devices."""

    def leave_out(self, copied: Sequence[int]) -> None:
        """Forgets tensors that are copied before anything can change them, by their indices."""
        skipped = set(copied)
        with self._lock:
            self._counted = [one for one in self._counted if one[0] not in skipped]

    def clear(self) -> None:
        """Forgets all of them: what becomes of the save is decided."""
        with self._lock:
            self._counted.clear()

    def settle(self) -> None:
        """Looks whether anything has changed, the first time; what changes later does no harm.

        To be called by whoever is about to be told that the state is free, and at the end of the
        write. Not when the last copy ends: an operation is counted after it is queued, and what has
        changed by then may be counted a moment later.

        Raises:
            StateMismatchError: Something has; the save has failed.
        """
        with self._lock:
            for _, name, tensor, version in self._counted:
                if tensor._version != version and self._error is None:
                    self._error = StateMismatchError(
                        f"{self._path}: {name} was changed before it was copied; call "
                        "pending.stage() before the change, or save with lazy=False, which copies "
                        "at the call; for an optimizer that no Training holds, "
                        "penstock.guard(optimizer) sees to it before each step",
                        key=name,
                        path=self._path,
                    )
            self._counted.clear()
            if self._error is not None:
                raise self._error


def _tensors(owner: Any) -> tuple[Any, ...]:
    # Of a `DTensor`, what it holds and itself.
    return owner if type(owner) is tuple else (owner,)
