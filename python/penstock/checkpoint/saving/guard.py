"""`guard`: makes an optimizer wait for the copies of a lazy save."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.unstaged import hold_all, hold_devices, unstaged

if TYPE_CHECKING:
    from collections.abc import Iterable


class Guard:
    """Keeps an optimizer from changing tensors before a lazy save has copied them; see `guard`."""

    def __init__(self, optimizer: Any) -> None:
        try:
            self._handle = optimizer.register_step_pre_hook(self._before_step)
        except AttributeError:
            raise TypeError(
                f"a {type(optimizer).__name__} cannot be guarded: unlike a torch.optim.Optimizer "
                "it calls nobody before it steps (register_step_pre_hook): guard the one inside of "
                "it, if there is one, or call pending.stage() before each of its steps"
            ) from None
        self._optimizer = weakref.ref(optimizer)
        _guarded.add(optimizer)
        self.waited_seconds = 0.0
        """Total time that steps have waited."""

    def remove(self) -> None:
        """Removes the guard from the optimizer."""
        self._handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            _guarded.discard(optimizer)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if unstaged:
            began = time.perf_counter()
            hold_all()
            self.waited_seconds += time.perf_counter() - began


def hold_before_steps() -> None:
    """Makes every PyTorch optimizer wait for device copies, guarded or not.

    Fused optimizers change tensors without PyTorch's version count.
    """
    global _is_hooked
    if not _is_hooked:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_before_any_step)
        _is_hooked = True


_is_hooked = False


def _before_any_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    hold_devices()


_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that have a guard."""


def guard(optimizer: Any) -> Guard:
    """Makes ``optimizer.step()`` first copy all tensors that a lazy save has not copied yet.

    Call it once for each optimizer whose parameters or state are saved with ``save_async(…,
    lazy=True)``. The guard only avoids failed saves: any other change of the state before a lazy
    save has copied it, such as by an average of the weights or an optimizer without a guard, fails
    that save, unless `PendingSave.stage` is called first.

    Args:
        optimizer: A `torch.optim.Optimizer`. A step with a closure is guarded as well.

    Returns:
        The guard, which can be removed.

    Raises:
        TypeError: The optimizer has no ``register_step_pre_hook``.

    Example:
        >>> import penstock, tempfile, torch
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> guard = penstock.guard(optimizer)
        >>> store = penstock.CheckpointStore(tempfile.mkdtemp())
        >>> pending = store.save_async(1, model.state_dict(), lazy=True)
        >>> model(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> pending.result().step
        1
    """
    return Guard(optimizer)


def guard_all(optimizers: Iterable[Any]) -> None:
    """Adds a guard to each optimizer that has none."""
    for optimizer in optimizers:
        if optimizer not in _guarded:
            Guard(optimizer)
