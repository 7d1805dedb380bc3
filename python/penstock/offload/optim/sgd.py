"""`SGD` with momentum, which is in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.offload.optim.optimizer import MEMORY_BYTES, StoredOptimizer

if TYPE_CHECKING:
    import os

    from penstock.offload.optim.shares import Shares


class SGD(StoredOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with its momentum on storage: the bits of ``fused=True`` on the CPU.

    All else is as with `penstock.offload.AdamW`.

    Args:
        params: As for `torch.optim.SGD`: contiguous, on any device.
        lr: The rate.
        momentum: Its factor, more than 0: without there is no state to keep.
        dampening: Of the momentum.
        weight_decay: Added to the gradient.
        nesterov: Whether the momentum is Nesterov's.
        directory: For the files; each rank takes a directory in it.
        memory_bytes: What of the momentum is in memory at a time.
        masters: Whether parameters of float16 and bfloat16 have momentum and copies in float32.
        maximize: Whether the objective is to grow.

    Raises:
        UnsupportedStateError: A parameter is not contiguous, or of another type.
        StorageError: Another process uses the directory, its file system has no hard links, or the
            system refuses it.
        ValueError: There is no momentum, the memory is too little, or a number out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Any = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0,
        weight_decay: float | Any = 0,
        nesterov: bool = False,
        *,
        directory: str | os.PathLike[str],
        memory_bytes: int = MEMORY_BYTES,
        masters: bool = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            fused=True,
        )
        self._open(directory, memory_bytes, masters)

    # PyTorch's does not count steps.
    _NEEDS_COUNT = False

    def _moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        if not group.get("momentum"):
            raise ValueError(
                "momentum=0: there is no state to keep on storage: use torch.optim.SGD"
            )
        return ("momentum_buffer",)

    def _update(self, group: dict[str, Any], shares: Shares, scale: Any) -> None:
        torch._fused_sgd_(
            shares.values,
            shares.gradients,
            shares.moments["momentum_buffer"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=shares.is_first,
            grad_scale=scale,
            found_inf=None,
        )
