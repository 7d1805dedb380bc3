"""`AdamW`, with its moments in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw

from penstock.offload.optim.optimizer import MEMORY_BYTES, StoredOptimizer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from penstock.offload.optim.shares import ParameterShares
    from penstock.sealing.identities import Identities
    from penstock.sealing.passphrase import Key
    from penstock.sealing.sealing import Sealing


class AdamW(StoredOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` with its moments on storage: the bits of ``fused=True`` on the CPU.

    A step streams the moments through a bounded amount of memory, reading ahead and writing behind,
    into a new generation of files; it returns once that is on stable storage. A checkpoint by
    `penstock.save` links these files, so it writes almost no bytes for them. The directory takes
    twice the size of the moments, and the same again for each checkpoint.

    Args:
        params: As for `torch.optim.AdamW`: contiguous, on any device.
        lr: The learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad: Whether to use the maximum of the second moment, which is stored as a third moment.
        directory: Directory of the files; each rank uses a subdirectory. Files of an earlier run
            are kept until the first step or `load_state_dict`.
        memory_bytes: Most bytes of moments in memory at a time.
        masters: Whether float16 and bfloat16 parameters have float32 moments, and float32 copies
            (masters) that are updated and kept in files, too.
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
        ValueError: The memory is too small, or a number is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Any = 1e-3,
        betas: tuple[float | Any, float | Any] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            fused=True,
        )
        self._open(directory, memory_bytes, masters, sealing, identities)

    def _moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        extra = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
        return ("exp_avg", "exp_avg_sq", *extra)

    def _update(self, group: dict[str, Any], shares: ParameterShares, scale: Any) -> None:
        beta1, beta2 = group["betas"]
        # Own counts: a parameter cut into windows is updated several times in a step.
        steps = torch.tensor(shares.counts, dtype=torch.float32, device="cpu").unbind()
        adamw(
            shares.values,
            shares.gradients,
            shares.moments["exp_avg"],
            shares.moments["exp_avg_sq"],
            shares.moments["max_exp_avg_sq"] if group["amsgrad"] else [],
            list(steps),
            fused=True,
            grad_scale=scale,
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
