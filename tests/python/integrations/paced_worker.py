"""One rank of a run that saves when a save is due; rank 1 is slower, and its clock is its own.

    python paced_worker.py lightning|transformers DIRECTORY STEPS

Prints the steps after which this rank saved.
"""

from __future__ import annotations

import os
import sys
import time

SECONDS = 0.002
PACE = {"save_every": "auto", "failures_per_hour": 36_000.0}


def lightning_steps(directory, steps):
    """Trains with Lightning; returns the steps saved."""
    import lightning
    import lightnings

    from penstock.integrations.lightning import PacedCheckpoint, PenstockIO

    saved = []

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer, *_):
            time.sleep(SECONDS * (1 + 4 * trainer.global_rank))

        def on_save_checkpoint(self, trainer, *_):
            saved.append(trainer.global_step)

    callbacks = [PacedCheckpoint(dirpath=directory, **PACE), Watch()]
    options = {"devices": int(os.environ["WORLD_SIZE"]), "callbacks": callbacks}
    plugins = [PenstockIO(background=True)]
    one = lightnings.trainer(
        directory, *plugins, epochs=-1, max_steps=steps, strategy="ddp", **options
    )
    lightnings.fit(one)
    return saved


def trainer_steps(directory, steps):
    """Trains with the Trainer; returns the steps saved."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from penstock.integrations.transformers import attach

    saved = []
    rank = int(os.environ["RANK"])

    class Watch(TrainerCallback):
        def on_step_begin(self, *_, **__):
            time.sleep(SECONDS * (1 + 4 * rank))

        def on_save(self, arguments, state, *_, **__):
            saved.append(state.global_step)

    arguments = TrainingArguments(
        directory,
        max_steps=steps,
        save_strategy="no",
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 8, "vocab_size": 16}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    tokens = torch.arange(8) % 16
    rows = [{"input_ids": tokens, "labels": tokens}] * 64
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Watch()])
    attach(trainer, background=True, **PACE).train()
    return saved


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    framework, directory, steps = sys.argv[1:]
    train = lightning_steps if framework == "lightning" else trainer_steps
    found = train(directory, int(steps))
    sys.stdout.write(f"saved {' '.join(map(str, found))}\n")
