"""Replaces functions of Lightning that no plug-in can reach; each calls the original."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch.core.saving
import lightning.pytorch.trainer.trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.integrations.lightning import checkpoint_io, loading
from penstock.integrations.lightning.connector import Connector, io_of
from penstock.integrations.lightning.enable import on_enable
from penstock.integrations.lightning.requeue import SignalConnector

_saving: Any = lightning.pytorch.core.saving
_trainer: Any = lightning.pytorch.trainer.trainer

_load = _saving.pl_load
_link_checkpoint = ModelCheckpoint._link_checkpoint


@on_enable
def replace() -> None:
    """Replaces the functions and classes of Lightning's trainer."""
    _trainer._CheckpointConnector = Connector
    _trainer._SignalConnector = SignalConnector
    _saving.pl_load = _load_for_module
    ModelCheckpoint._link_checkpoint = staticmethod(_link)  # type: ignore[method-assign]


def _load_for_module(
    path: Any, map_location: Any = None, weights_only: bool | None = None, **further: Any
) -> Any:
    """Replaces the loader of `LightningModule.load_from_checkpoint`."""
    if isinstance(path, str | os.PathLike) and os.path.isdir(path):
        checkpoint_io.wait_for_all()
        return loading.read(path, map_location, weights_only)
    further |= loading.weights_only_of(weights_only)
    return _load(path, map_location=map_location, **further)


def _link(trainer: Any, filepath: str, linkpath: str) -> None:
    """Links for `ModelCheckpoint(save_last="link")`; Lightning removes the old link first."""
    io = io_of(trainer)
    if io is None:
        _link_checkpoint(trainer, filepath, linkpath)
        return
    if trainer.is_global_zero:
        io.link_checkpoint(filepath, linkpath)
    trainer.strategy.barrier()
