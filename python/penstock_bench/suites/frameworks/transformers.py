"""How long the Trainer of transformers waits for a save: its own, and Penstock's.

    python -m penstock_bench.suites.frameworks.transformers

One trainer trains a GPT-2 of 57 million parameters on the CPU. After each step one of the ways
saves, in turn, so all see the same machine. What goes on in the background is waited for before the
next step, outside of what is measured. The Trainer's own save leaves its bytes in the page cache;
Penstock's are durable, on return or in the background.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import click
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from penstock.integrations.transformers import PenstockTrainerMixin, Settings
from penstock_bench.suites.frameworks.waits import WAIT, Found, command

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH = 16


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(_LENGTH) + index % 64
        return {"input_ids": tokens, "labels": tokens}


class _Waiting(PenstockTrainerMixin, Trainer):
    """Saves, and waits until that is durable."""


class _Asynchronous(PenstockTrainerMixin, Trainer):
    """Saves in the background."""

    penstock_settings = Settings(background=True)


class _InTurn(TrainerCallback):
    """Saves in one of the ways after each step, and measures how long that takes."""

    def __init__(self, trainer: Trainer, directory: str) -> None:
        self._trainer = trainer
        self._directory = directory
        # Each way has its own state from save to save.
        self._kept: dict[type[Trainer], dict[str, Any]] = {}
        self.found: Found = {}
        self.bytes = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """One save."""
        ways: list[tuple[str, type[Trainer]]] = [
            ("the Trainer's own", Trainer),
            ("penstock, waiting", _Waiting),
            ("penstock, asynchronous", _Asynchronous),
        ]
        name, kind = ways[state.global_step % len(ways)]
        trainer: Any = self._trainer
        trainer.__class__ = kind
        trainer.penstock_saves = self._kept.get(kind)
        began = time.perf_counter()
        trainer._save_checkpoint(trainer.model, None)
        seconds = time.perf_counter() - began
        if kind is not Trainer:
            trainer.penstock_saves.wait()
            self._kept[kind] = trainer.penstock_saves
        trainer.__class__ = Trainer
        path = os.path.join(self._directory, f"checkpoint-{state.global_step}")
        self.bytes = sum(entry.stat().st_size for entry in os.scandir(path))
        shutil.rmtree(path)
        self.found.setdefault(name, []).append({WAIT: seconds})


def _measure(directory: str, rounds: int, width: int) -> _InTurn:
    arguments = TrainingArguments(
        directory,
        # The first save of each way makes what the others find.
        max_steps=3 * (rounds + 1),
        per_device_train_batch_size=1,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    config = GPT2Config(
        n_layer=6,
        n_head=8,
        n_embd=width,
        n_positions=_LENGTH,
        vocab_size=18_000,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=_Rows())
    turns = _InTurn(trainer, directory)
    trainer.add_callback(turns)
    trainer.train()
    return turns


@command("the Trainer's own")
@click.option("--width", default=768, show_default=True, type=click.IntRange(min=64), help="Model.")
def main(place: Path, rounds: int, width: int) -> tuple[str, Found]:
    """Save after each step of a Trainer of transformers, its own way and with Penstock."""
    turns = _measure(str(place), rounds, width)
    found = {name: each[1:] for name, each in sorted(turns.found.items(), reverse=True)}
    return f"{turns.bytes / 1e9:.2f} GB a checkpoint", found


if __name__ == "__main__":
    main()
