"""A small decoder-only transformer over bytes, as plain as PyTorch allows.

Real enough to be a fair test of a checkpoint: tied weights, layer norms, and dropout,
which makes every loss depend on the state of the random number generator.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; the defaults give 1.9 million parameters."""

    vocabulary: int = 256
    window: int = 128
    width: int = 192
    heads: int = 6
    layers: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    """Causal self-attention, then a feed-forward network, each on a normalised residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.feed = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, window, width) to the same shape."""
        x = x + self.dropout(self.projection(self._attend(self.attention_norm(x))))
        fed: torch.Tensor = self.dropout(self.feed(self.feed_norm(x)))
        return x + fed

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, window, width = x.shape
        split = self.query_key_value(x).view(batch, window, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed: torch.Tensor = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return mixed.transpose(1, 2).reshape(batch, window, width)


class Transformer(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(torch.zeros(shape.window, shape.width))
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        # One tensor under two names: a checkpoint stores it once, and a load ties it again.
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps int64 tokens (batch, window) to logits (batch, window, vocabulary)."""
        x = self.dropout(self.embedding(tokens) + self.position[: tokens.shape[1]])
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits
