"""A training loop that saves without stopping, and resumes after a crash exactly where it was.

    python examples/lazy_saves.py

Kill it at any moment and start it again: it resumes from the newest complete step, and ends with
the digest of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import penstock

VOCABULARY = 256
LENGTH = 16
SAMPLES = 4096
BATCH = 4


class Model(nn.Module):
    """A small transformer with dropout that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the scores of each next token: (batch, length, vocabulary)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        scores: torch.Tensor = self.head(self.layers(self.embed(tokens), mask, is_causal=True))
        return scores


class Batches:
    """Endless shuffled batches. The position is two numbers, so a resume repeats no sample."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        begin, stride = torch.randint(0, VOCABULARY, (2, SAMPLES, 1), generator=generator)
        self._samples = (begin + stride * torch.arange(LENGTH)) % VOCABULARY
        self._epoch = self._position = 0

    def __next__(self) -> torch.Tensor:
        # The order of an epoch depends on its number alone.
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._epoch))
        batch = self._samples[order[self._position : self._position + BATCH]]
        self._position += BATCH
        if self._position >= SAMPLES:
            self._epoch, self._position = self._epoch + 1, 0
        return batch

    def state_dict(self) -> dict[str, int]:
        """Returns the position."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Moves to a position."""
        self._epoch, self._position = state["epoch"], state["position"]


def main() -> None:
    """Trains, from the newest step if there is one."""
    arguments = parse()
    # These settings make a run repeatable to the last bit. Saving needs none of them.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)

    model, batches = Model(), Batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

    # Once per optimizer: it waits before it changes tensors that a lazy save has not copied yet.
    penstock.guard(optimizer)

    with penstock.CheckpointStore(arguments.directory, keep_last=3) as store:
        first = 0
        if store.latest() is not None:
            state = store.load()  # the newest complete step, every byte checked
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            batches.load_state_dict(state["batches"])
            torch.set_rng_state(state["random"])
            first = state["step"]
            tell(f"resumed from step {first}")

        for step in range(first + 1, arguments.steps + 1):
            scores = model(tokens := next(batches))
            loss = functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            tell(f"step {step}: loss {loss.item():.4f}")

            if step % arguments.every == 0 and step < arguments.steps:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "batches": batches.state_dict(),
                    "random": torch.get_rng_state(),
                    "step": step,
                }
                # Returns at once. The next forward and backward pass run during the copy.
                pending = store.save_async(step, state, lazy=True)
                tell(f"saving step {step}: training waited {pending.stall_seconds * 1e3:.1f} ms")
        # Leaving the block waits for the last save and raises its error, if it failed.
    tell(f"digest {digest([model.state_dict(), optimizer.state_dict()])}")


def digest(value: Any) -> str:
    """SHA-256 over all tensors and numbers of a state."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                add(str(key))
                add(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                add(item)
        else:
            found.update(repr(part).encode())

    add(value)
    return found.hexdigest()


def tell(text: str) -> None:
    """Prints a line without buffering."""
    print(text, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "lazy-saves"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
