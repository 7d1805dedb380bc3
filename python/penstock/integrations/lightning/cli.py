"""`LightningCLI`: reads the hyper-parameters of a checkpoint that is a directory.

For ``test --ckpt_path=…`` the CLI builds the model with the hyper-parameters stored in the
checkpoint, but reads them from files only. For a directory it would build the model with its
defaults, and fill that one.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import lightning.pytorch.cli
import torch

import penstock
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.integrations.lightning import checkpoint_io, loading
from penstock.integrations.private_directory import private_directory
from penstock.plugin import is_checkpoint

_PATTERN = "hyper_parameters*"
"""Their key in a checkpoint, and the keys that describe them."""

_cli: Any = lightning.pytorch.cli.LightningCLI
_parse: Any = getattr(_cli, "_parse_ckpt_path", None)


def replace() -> None:
    """Makes `LightningCLI` read directories; before Lightning 2.5.6 it reads no files either.

    Called at import: the CLI reads hyper-parameters when it has imported the classes that its
    configuration names, and before it makes a `PenstockIO`.
    """
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
        # Another kind of directory: the load tells if it is no checkpoint.
        return
    try:
        # Without a dot: they may be a single value, as of a registered class.
        state = penstock.load(path, keys=_PATTERN)
    except StateMismatchError as error:
        if error.key != _PATTERN:
            raise
        # The module was saved without hyper-parameters.
        return
    state = loading.unpacked(state, str(path), None, trust=False)
    is_sealed = penstock.inspect(path).recipients is not None
    with private_directory(is_sealed=is_sealed) as directory:
        # Written to a file for Lightning's own code, which differs by version.
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
