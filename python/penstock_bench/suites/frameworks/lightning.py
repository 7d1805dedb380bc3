"""How long training waits for a save of Lightning's Trainer: by its own plug-ins, and by Penstock.

    python -m penstock_bench.suites.frameworks.lightning --megabytes 768 --rounds 7

One training, of one model with AdamW. After each of its steps the same state is saved by each
plug-in in turn, which begins with another one each time, and the time of ``save_checkpoint`` is
taken. What goes on in the background ends before the next one begins. Lightning's own plug-ins do
not make a save durable; Penstock's do.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from typing import TYPE_CHECKING, Any

import click
import lightning
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from penstock.integrations.lightning import PenstockIO
from penstock_bench.harness.running import rotated
from penstock_bench.suites.frameworks.waits import WAIT, Found, command

if TYPE_CHECKING:
    from pathlib import Path

_LAYERS = 8
_BYTES_PER_PARAMETER = 12  # the weight and two moments, of 4 bytes each


class _Model(lightning.LightningModule):
    """Layers of one size, trained on one row."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        width = int((megabytes * 1e6 / _BYTES_PER_PARAMETER / _LAYERS) ** 0.5)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
        self.net = torch.nn.Sequential(*layers)
        self.width = width

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6, foreach=False)


class _Saves(lightning.Callback):
    """Saves after each step with every plug-in."""

    def __init__(self, plugins: dict[str, CheckpointIO], directory: Path) -> None:
        self.found: Found = {name: [] for name in plugins}
        self.saved_bytes = 0
        self._plugins = plugins
        self._directory = directory

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name in rotated(list(self._plugins), trainer.global_step):
            path = self._directory / f"{name.replace(' ', '-')}.ckpt"
            trainer.strategy.checkpoint_io = plugin = self._plugins[name]
            began = time.perf_counter()
            trainer.save_checkpoint(path)
            seconds = time.perf_counter() - began
            # The first step is there to have the memory that later ones have.
            if trainer.global_step > 1:
                self.found[name].append({WAIT: seconds})
            if isinstance(plugin, PenstockIO):
                plugin.wait()
            else:
                plugin.teardown()
            self.saved_bytes = _size(path)
            os.sync()
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


@command("lightning")
@click.option("--megabytes", default=768, show_default=True, help="Of the state, 10**6 bytes each.")
def main(place: Path, rounds: int, megabytes: int) -> tuple[str, Found]:
    """Save a training of Lightning's Trainer after each step, with every plug-in."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    plugins: dict[str, CheckpointIO] = {
        "lightning": TorchCheckpointIO(),
        "lightning async": AsyncCheckpointIO(TorchCheckpointIO()),
        "penstock": PenstockIO(),
        "penstock async": PenstockIO(background=True),
    }
    model = _Model(megabytes)
    saves = _Saves(plugins, place)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=rounds + 1,
        callbacks=[saves],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = [torch.ones(model.width)] * (rounds + 1)
    trainer.fit(model, torch.utils.data.DataLoader(data))
    return f"{saves.saved_bytes / 1e6:.0f} MB", saves.found


if __name__ == "__main__":
    main()
