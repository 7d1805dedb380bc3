"""The text that the demo trains on: Python's own language reference.

It ships with every Python as the topics of `help()`, so that the demo needs no download
and two runs on one machine see the same bytes.
"""

from pydoc_data.topics import topics
from typing import Any

import torch


def reference_text() -> torch.Tensor:
    """The topics of `help()` in alphabetical order as one uint8 tensor of bytes."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Windows:
    """Batches of text windows in shuffled order, epoch after epoch.

    A resumed training run has to continue with the very window that it would have drawn next. All
    later batches follow from the order of the current epoch, the position in it and the generator
    that draws the next order: `state_dict` holds just these. A sample holds one byte more than the
    window, the last target.
    """

    def __init__(self, text: torch.Tensor, window: int, batch: int, seed: int) -> None:
        self._samples = text[: len(text) - len(text) % (window + 1)].view(-1, window + 1)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)
        self._order = self._shuffled()
        self._position = 0
        self._epoch = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both int64 of shape (batch, window)."""
        if self._position + self._batch > len(self._order):
            self._order, self._position = self._shuffled(), 0
            self._epoch += 1
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        samples = self._samples[chosen].long()
        return samples[:, :-1], samples[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """The state that determines all later batches."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "order": self._order,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position of a `state_dict`."""
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = state["order"]
        self._generator.set_state(state["generator"])

    def _shuffled(self) -> torch.Tensor:
        return torch.randperm(len(self._samples), generator=self._generator)
