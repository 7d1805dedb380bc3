"""`SGD` with its momentum in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.offload.optim.optimizer import MEMORY_BYTES, StoredOptimizer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from penstock.offload.optim.shares import ParameterShares
    from penstock.sealing.identities import Identities
    from penstock.sealing.passphrase import Key
    from penstock.sealing.sealing import Sealing


class SGD(StoredOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with its momentum on storage: the bits of ``fused=True`` on the CPU.

    Otherwise it works as `penstock.offload.AdamW`.

    Args:
        params: As for `torch.optim.SGD`: contiguous, on any device.
        lr: The learning rate.
        momentum: The momentum factor, more than 0: without momentum there is no state to keep.
        dampening: Dampening of the momentum.
        weight_decay: Added to the gradient, times the parameter.
        nesterov: Whether to use Nesterov momentum.
        directory: Directory of the files; each rank uses a subdirectory.
        memory_bytes: Most bytes of momentum in memory at a time.
        masters: Whether float16 and bfloat16 parameters have float32 momentum and float32 copies.
        maximize: Whether to maximize the objective.
        sealing: For whom the files are sealed; None for clear ones. Only sealed checkpoints can
            link sealed files, for the same recipients or others.
        identities: Keys that open a generation for `recover`; None for the file that
            ``PENSTOCK_IDENTITIES`` names. A run that only steps, saves and loads needs none.

    Raises:
        KeyFileError: An identity is no secret key.
        UnsupportedStateError: A parameter is not contiguous, or of an unsupported type.
        StorageError: Another process uses the directory, its file system has no hard links, or the
            system refuses it.
        ValueError: There is no momentum, the memory is too small, or a number is out of range.
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
        sealing: Sealing | None = None,
        identities: Identities | Key | Iterable[Key] | None = None,
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
        self._open(directory, memory_bytes, masters, sealing, identities)

    # PyTorch's SGD does not count steps.
    _NEEDS_COUNT = False

    def _moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        if not group.get("momentum"):
            raise ValueError(
                "momentum=0: there is no state to keep on storage: use torch.optim.SGD"
            )
        return ("momentum_buffer",)

    def _update(self, group: dict[str, Any], shares: ParameterShares, scale: Any) -> None:
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
