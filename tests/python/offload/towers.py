"""A model of no library, to be streamed."""

from __future__ import annotations

import torch


class Tower(torch.nn.Module):
    """A model of no library: blocks of several sizes, one called twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [8, 200, 16, 120, 8]
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(32, size), torch.nn.Linear(size, 32))
            for size in sizes
        )
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.register_buffer("shift", torch.randn(32))
        self.head = torch.nn.Linear(32, 5, bias=False)

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 1, 4)) -> torch.Tensor:
        for index in order:
            x = x + self.blocks[index](x)
        return self.head(x * self.scale + self.shift)


def copy_of(model: Tower) -> Tower:
    other = Tower()
    other.load_state_dict(model.state_dict())
    return other
