"""`Negatives`: ends of links that are taken for none."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.sampler import NegativeSampling


class Negatives(NegativeSampling):  # type: ignore[misc]
    """PyG's `NegativeSampling`, which draws from a generator of its own.

    PyG's draws from the random numbers of the process, which training uses too, while batches are
    sampled ahead or by other processes.
    """

    def __init__(self, given: NegativeSampling, generator: torch.Generator) -> None:
        super().__init__(given.mode, given.amount, given.src_weight, given.dst_weight)
        self._generator = generator

    def sample(self, num_samples: int, endpoint: str, num_nodes: Any = None) -> torch.Tensor:
        """So many nodes, as likely as their weights say.

        Raises:
            ValueError: There are other weights than nodes.
        """
        weight: Any = self.src_weight if endpoint == "src" else self.dst_weight
        if weight is None:
            return torch.randint(num_nodes, (num_samples,), generator=self._generator, device="cpu")
        if len(weight) != num_nodes:
            raise ValueError(
                f"{endpoint}_weight: {len(weight)} weights: each of the {num_nodes} nodes needs one"
            )
        return torch.multinomial(weight, num_samples, replacement=True, generator=self._generator)
