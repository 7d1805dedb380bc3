"""Makes Lightning's loggers upload checkpoints that are directories.

The loggers look for files only, so ``log_model=True`` would silently upload nothing. A checkpoint
is uploaded once it is complete: a logger waits for the save in progress.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch.loggers
import lightning.pytorch.loggers.mlflow
import lightning.pytorch.loggers.utilities
import lightning.pytorch.loggers.wandb
from lightning.pytorch.loggers import WandbLogger

from penstock.errors import PenstockWarning
from penstock.integrations.lightning import checkpoint_io
from penstock.integrations.lightning.enable import on_enable
from penstock.plugin import MANIFEST, is_checkpoint

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Checkpoint

_SETTINGS = (
    "monitor",
    "mode",
    "save_last",
    "save_top_k",
    "save_weights_only",
    "_every_n_train_steps",
)
"""Settings of a callback that Lightning records with an uploaded model."""

_Found = tuple[float, str, Any, str]
"""A checkpoint to upload: seconds since 1970 of its save, path, score, and a word for it."""

_scan_files = lightning.pytorch.loggers.utilities._scan_checkpoints
_upload_files = WandbLogger._scan_and_log_checkpoints


@on_enable
def replace() -> None:
    """Makes Lightning's loggers upload checkpoints that are directories."""
    loggers: Any = lightning.pytorch.loggers
    # MLflow's logger and LitLogger upload directories as they upload files.
    for name in ("utilities", "mlflow", "litlogger"):
        if hasattr(loggers, name):
            getattr(loggers, name)._scan_checkpoints = _scan
    loggers.WandbLogger._scan_and_log_checkpoints = _upload
    if hasattr(loggers, "neptune"):
        _replace_neptune(loggers.neptune.NeptuneLogger)


def _scan(callback: Checkpoint, logged: dict[str, float]) -> list[_Found]:
    """Checkpoints of a callback that a logger has not uploaded yet, the oldest first."""
    checkpoint_io.wait_for_all()
    files: list[_Found] = _scan_files(callback, logged)
    return sorted([*files, *_directories(callback, logged)], key=lambda found: found[:2])


def _directories(callback: Any, logged: dict[str, float]) -> list[_Found]:
    named = {
        getattr(callback, "last_model_path", ""): (
            getattr(callback, "current_score", None),
            "latest",
        ),
        getattr(callback, "best_model_path", ""): (
            getattr(callback, "best_model_score", None),
            "best",
        ),
        **{
            path: (score, "best_k")
            for path, score in getattr(callback, "best_k_models", {}).items()
        },
    }
    found = []
    for path, (score, word) in named.items():
        if path and os.path.isdir(path) and is_checkpoint(path):
            saved = os.stat(os.path.join(path, MANIFEST)).st_mtime
            if logged.get(path, -1.0) < saved:
                found.append((saved, path, score, word))
    return sorted(found, key=lambda one: one[:2])


def _upload(logger: WandbLogger, callback: Any) -> None:
    """Uploads an artifact for each checkpoint, file or directory, after a save."""
    import wandb

    checkpoint_io.wait_for_all()
    _upload_files(logger, callback)
    for saved, path, score, _ in _directories(callback, logger._logged_model_time):
        settings = {name: getattr(callback, name) for name in _SETTINGS if hasattr(callback, name)}
        metadata = {
            "score": score.item() if hasattr(score, "item") else score,
            "original_filename": Path(path).name,
            type(callback).__name__: settings,
        }
        if not logger._checkpoint_name:
            logger._checkpoint_name = f"model-{logger.experiment.id}"
        artifact = wandb.Artifact(name=logger._checkpoint_name, type="model", metadata=metadata)
        # Named as Lightning names a file.
        artifact.add_dir(
            path, name="model.ckpt", policy=getattr(logger, "add_file_policy", "mutable")
        )
        is_best = path == callback.best_model_path
        logger.experiment.log_artifact(
            artifact, aliases=["latest", "best"] if is_best else ["latest"]
        )
        logger._logged_model_time[path] = saved


def _replace_neptune(kind: Any) -> None:
    upload = kind.after_save_checkpoint

    def after_save_checkpoint(logger: Any, callback: Any) -> None:
        """Uploads files; warns of directories, which Neptune's `upload` does not take."""
        checkpoint_io.wait_for_all()
        if logger._log_model_checkpoints and _directories(callback, {}):
            warnings.warn(
                "NeptuneLogger(log_model_checkpoints=True) uploads files, and checkpoints of "
                "PenstockIO are directories: none is uploaded; set it to False and call "
                "logger.run[…].upload_files(path) for those that are to be kept there",
                PenstockWarning,
                stacklevel=2,
            )
            return
        upload(logger, callback)

    if not hasattr(upload, "penstock"):
        after_save_checkpoint.penstock = True  # type: ignore[attr-defined]
        kind.after_save_checkpoint = after_save_checkpoint
