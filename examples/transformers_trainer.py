"""The Trainer of transformers, with checkpoints that are always complete.

    python examples/transformers_trainer.py
    torchrun --nproc-per-node 2 examples/transformers_trainer.py     # DDP

`attach` is the only line about Penstock. Kill the program at any moment and start it again: it
resumes from the newest complete checkpoint, and ends with the bits of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from penstock.integrations.transformers import attach, newest_checkpoint

TOKENS = 64
LENGTH = 16
SAMPLES = 128


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens computed from their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * (1 + index % 7) + index) % TOKENS
        return {"input_ids": tokens, "labels": tokens}


class Tell(TrainerCallback):
    """Prints the run's progress; no line here is about saving."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Prints where the run begins."""
        step = state.global_step
        if state.is_world_process_zero:
            print(f"resumed from step {step}" if step else "a new run", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Prints a finished step."""
        if state.is_world_process_zero:
            print(f"step {state.global_step}: epoch {state.epoch:.3f}", flush=True)


def begin(directory: str, steps: int, every: int) -> Trainer:
    """Builds a new run; it is the same whether or not the run then resumes an old one."""
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        save_steps=every,
        save_total_limit=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    set_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_positions=LENGTH,
        vocab_size=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    set_seed(1 + arguments.process_index)  # each rank draws its own dropout
    trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=[Tell()])
    return attach(trainer, background=True)


def main() -> None:
    """Trains to the end."""
    arguments = parse()
    # These settings make a run repeatable to the last bit. Saving needs none of them.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    trainer = begin(arguments.directory, arguments.steps, arguments.every)
    trainer.train(resume_from_checkpoint=newest_checkpoint(arguments.directory))
    if trainer.is_world_process_zero():
        print(f"digest {digest(trainer)}", flush=True)
    if dist.is_initialized():
        # gloo's threads release a collective's tensors shortly after it returns (pytorch#190489).
        time.sleep(0.1)
        dist.destroy_process_group()


def digest(trainer: Trainer) -> str:
    """SHA-256 over the model, the optimizer and the scheduler."""
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

    parts = (trainer.model, trainer.optimizer, trainer.lr_scheduler)
    add([part.state_dict() for part in parts])
    return found.hexdigest()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "transformers_trainer"))
    parser.add_argument("--steps", type=int, default=200, help="steps to train in all")
    parser.add_argument("--every", type=int, default=20, help="steps from save to save")
    return parser.parse_args()


if __name__ == "__main__":
    main()
