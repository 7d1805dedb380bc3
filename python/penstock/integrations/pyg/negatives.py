"""`Negatives`: draws the ends of negative links."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.sampler import NegativeSampling


class Negatives(NegativeSampling):  # type: ignore[misc]
    """PyG's `NegativeSampling`, drawing from a generator of its own.

    PyG's draws from the process's random numbers, which training uses, too, while batches are
    sampled ahead or by other processes.
    """

    def __init__(self, given: NegativeSampling, generator: torch.Generator) -> None:
        super().__init__(given.mode, given.amount, given.src_weight, given.dst_weight)
        self._generator = generator

    def sample(self, num_samples: int, endpoint: str, num_nodes: Any = None) -> torch.Tensor:
        """Draws nodes with probabilities proportional to their weights.

        Raises:
            ValueError: The number of weights is not that of nodes.
        """
        weight: Any = self.src_weight if endpoint == "src" else self.dst_weight
        if weight is None:
            return torch.randint(num_nodes, (num_samples,), generator=self._generator, device="cpu")
        if len(weight) != num_nodes:
            raise ValueError(
                f"{endpoint}_weight: {len(weight)} weights: each of the {num_nodes} nodes needs one"
            )
        return torch.multinomial(weight, num_samples, replacement=True, generator=self._generator)
