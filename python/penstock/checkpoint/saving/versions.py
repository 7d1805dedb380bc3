"""`Versions`: detects changes by PyTorch to device tensors that a lazy save has not copied yet.

No kernel reports writes to the memory of a device. PyTorch counts in-place changes of each tensor
when they are queued. Uncounted changes are not detected: those of fused optimizers, which all call
`penstock.checkpoint.saving.guard` before they step, of collectives, ``tensor.data``, replays of
CUDA graphs, and kernels that get addresses.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.tensors.native_rows import TensorSource


class Versions:
    """The version counts of device tensors at the beginning of a save.

    Each tensor is held by an owner that shares its count.
    """

    def __init__(self, path: str, sources: Sequence[TensorSource]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._error: StateMismatchError | None = None
        self._counted: list[tuple[int, str, Any, int]] = [
            (index, source.name, tensor, tensor._version)
            for index, source in enumerate(sources)
            if source.device is not None
            for tensor in _tensors(source.owner)
            if not tensor.is_inference()
        ]
        self.ordinals = {source.device.ordinal for source in sources if source.device is not None}
        """Numbers of the devices."""

    def leave_out(self, copied: Sequence[int]) -> None:
        """Stops watching tensors that are copied before anything can change them, by index."""
        skipped = set(copied)
        with self._lock:
            self._counted = [one for one in self._counted if one[0] not in skipped]

    def clear(self) -> None:
        """Stops watching all tensors: the outcome of the save is decided."""
        with self._lock:
            self._counted.clear()

    def check_unchanged(self) -> None:
        """Checks once whether any tensor has changed; later changes do no harm.

        Call it before the caller is told that the state may change, and at the end of the write.
        The end of the last copy is too early: an operation is counted after it is queued, so a
        change before that moment may be counted slightly later.
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
    # The owner of a `DTensor`'s local part is a tuple of the local tensor and the `DTensor`.
    return owner if type(owner) is tuple else (owner,)
