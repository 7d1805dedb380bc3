"""`LightningCLI`: the hyper-parameters of a checkpoint that is a directory.

It builds the model of ``test --ckpt_path=…`` with those that the checkpoint was saved with, and
looks for them in files only. For a directory it would build the model with its defaults, and fill
that one.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from typing import Any

import lightning.pytorch.cli
import torch

import penstock
from penstock.checkpoint.loading.foreign import is_checkpoint
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.integrations.lightning import checkpoint_io, loading

_PATTERN = "hyper_parameters*"
"""Their key in a checkpoint, and those beside it that describe them."""

_cli: Any = lightning.pytorch.cli.LightningCLI
_parse: Any = getattr(_cli, "_parse_ckpt_path", None)


def install() -> None:
    """Has `LightningCLI` read them; before Lightning 2.5.6 it reads none of files either."""
    if _parse is not None:
        _cli._parse_ckpt_path = _parse_ckpt_path


def _parse_ckpt_path(cli: Any) -> None:
    command = cli.config.get("subcommand")
    path = cli.config[command].get("ckpt_path") if command else None
    if not path or not os.path.isdir(path):
        _parse(cli)
        return
    checkpoint_io.wait_for_all()
    if not is_checkpoint(path):
        # Of another kind; the load says what it is, where it is none.
        return
    try:
        # Without a dot: they may be one value, as of a registered class.
        state = penstock.load(path, keys=_PATTERN)
    except StateMismatchError as error:
        if error.key != _PATTERN:
            raise
        # The module was saved without any.
        return
    state = loading.unpacked(state, str(path), None, trust=False)
    with tempfile.TemporaryDirectory() as directory:
        # Lightning's own code goes on with it, as it differs by version.
        file = os.path.join(directory, "hyper-parameters.ckpt")
        torch.save(state, file)
        cli.config[command]["ckpt_path"] = file
        try:
            _parse(cli)
        except pickle.UnpicklingError as error:
            raise UnsupportedStateError(
                f"{path}: its hyper-parameters hold objects of other libraries, which LightningCLI "
                "takes from no checkpoint: save plain values, as save_hyperparameters(dict(…))",
                key="hyper_parameters",
            ) from error
        finally:
            cli.config[command]["ckpt_path"] = path
