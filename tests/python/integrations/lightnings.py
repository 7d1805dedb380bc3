"""A small run of Lightning's Trainer; every step shows in its losses."""

from __future__ import annotations

import logging
import random
import warnings

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8
BATCHES = 5  # an epoch

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """Draws random numbers of all kinds: PyTorch's dropout, noise of NumPy and Python."""

    def __init__(self, width=16, config=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, width), torch.nn.Dropout(0.3), torch.nn.Linear(width, WIDTH)
        )
        self.losses = {}

    def training_step(self, batch, index):
        (inputs,) = batch
        noise = random.random() + np.random.rand()
        loss = (self.net(inputs) - inputs * noise).square().mean()
        self.losses[self.trainer.global_step] = loss.item()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", (self.net(batch[0]) - batch[0]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


def dataset():
    values = torch.randn(BATCHES * 4, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(values)


def loader(kind=DataLoader, **options):
    return kind(dataset(), batch_size=4, shuffle=True, **options)


def trainer(directory, *plugins, epochs=3, callbacks=None, **options):
    """Returns a quiet trainer that saves each epoch by default."""
    if callbacks is None:
        callbacks = [ModelCheckpoint(dirpath=directory, save_top_k=-1)]
    options = {"accelerator": "cpu", "devices": 1, "logger": False} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(
            max_epochs=epochs,
            default_root_dir=directory,
            callbacks=callbacks,
            plugins=list(plugins),
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )


def fit(one, module=None, data=None, validation=None, ckpt_path=None, **options):
    """Trains from the same initial state each time; returns the module."""
    lightning.seed_everything(1, verbose=False)
    module = module or Module()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", module="torchdata")
        warnings.filterwarnings("ignore", message=".*num_workers.*|.*not empty.*|.*logging int.*")
        data = loader() if data is None else data
        one.fit(module, data, validation, ckpt_path=ckpt_path, **options)
    return module


def equal(left, right):
    """Whether two modules hold the same bits."""
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)
