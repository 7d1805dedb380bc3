"""`report`: saves a checkpoint where Ray keeps it, and registers it once it is durable."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import ray.train
from ray.train import CheckpointUploadMode

from penstock.errors import UnsupportedStateError
from penstock.integrations.ray import fitting
from penstock.integrations.ray.run import NOTE, current
from penstock.plugin import SealingKeys

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from penstock import PendingSave
    from penstock.integrations.ray.run import RayRun
    from penstock.sealing import Sealing
    from penstock.signing import SignatureKey, SigningKeys


def report(
    metrics: Mapping[str, Any],
    state: Any = None,
    *,
    step: int | None = None,
    background: bool = False,
    lazy: bool = False,
    storage_path: str | os.PathLike[str] | None = None,
    sealing: Sealing | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
) -> None:
    """Saves a state and reports it to Ray Train; use it instead of `ray.train.report`.

    All workers call this equally often, and save together (`torch.distributed`): each writes its
    part directly into the run's directory. Ray registers the checkpoint once it is durable, and
    then deletes old ones (``CheckpointConfig(num_to_keep=…)``).

    Args:
        metrics: As for `ray.train.report`: numbers, including NaN and infinity, text, and lists and
            dictionaries of these, stored as JSON.
        state: The state to save: a `penstock.Training`, or any state; None for a report without a
            checkpoint.
        step: The training step, by which `resume` finds the newest. Required with a state, and a
            new one each time.
        background: Whether to return once the state is copied. Ray registers the checkpoint
            when it is durable, and an error ends the run's workers, as with Ray's own
            asynchronous uploads: with ``FailureConfig(max_failures=…)`` they start again from
            the newest complete checkpoint. Local mode always waits.
        lazy: Whether a save in the background also copies the state while training goes on; see
            `CheckpointStore.save_async`.
        storage_path: The run's storage path in local mode, where Ray does not provide it; None for
            Ray's default.
        sealing: For whom the checkpoint is sealed; see `penstock.save`. Make it in the function
            that trains, as it refuses to be sent to workers. Ray keeps the metrics in the clear.
        sign: Private keys that sign the checkpoint while it is saved; see `penstock.save`. All
            workers pass them.

    Raises:
        UnsupportedStateError: A leaf of the state, or a metric, cannot be stored.
        UnsupportedPathError: The run's storage is no file system.
        CheckpointExistsError: These workers have saved the step before.
        RankError: Another worker failed, or there is no process group.
        StorageError: The operating system failed an operation. Nothing is reported, older
            checkpoints stay, and training may go on if all workers catch the error.
        ValueError: There is a state and no step.
    """
    metrics = dict(metrics)
    if state is None:
        ray.train.report(metrics)
        return
    if step is None:
        raise ValueError("step=: a state needs the step it belongs to, as in report(…, step=step)")
    run = current(storage_path)
    fitting.try_out(run)
    path = run.path(step)
    keys = SealingKeys.of(sealing, sign=sign)
    run.saver.sealing, run.saver.signing = keys.sealing, keys.signing
    note = {NOTE: {"metrics": _to_json(metrics)}}
    if run.is_local or not background:
        run.saver.save(path, state, step=step, metadata=note)
        register(run, path, metrics)
    else:
        pending = run.saver.save_async(path, state, step=step, metadata=note, lazy=lazy)
        _register_later(run, path, metrics, pending)


def register(run: RayRun, path: str, metrics: dict[str, Any]) -> None:
    """Registers a complete and durable checkpoint with Ray."""
    ray.train.report(
        metrics,
        checkpoint=run.checkpoint(path),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def _register_later(run: RayRun, path: str, metrics: dict[str, Any], pending: PendingSave) -> None:
    """Makes Ray's upload thread wait for the save, instead of an upload.

    It keeps the order of reports, and Ray waits for it at the end of training.
    """

    def durable(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        pending.result()
        return checkpoint

    ray.train.report(
        metrics,
        checkpoint=run.checkpoint(path),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=durable,
        # The checkpoint is what Ray would delete as the local copy.
        delete_local_checkpoint_after_upload=False,
    )


def _to_json(metrics: dict[str, Any]) -> str:
    """Metrics as JSON, stored with the state, so that `resume` can report them again.

    Stored as text, since a checkpoint's metadata cannot hold NaN.
    """
    for name, value in metrics.items():
        try:
            json.dumps({name: value}, default=_number)
        except (TypeError, ValueError) as error:
            raise UnsupportedStateError(
                f"metrics: {name!r} is of type {type(value).__name__}, and metrics are kept as "
                f"JSON ({error}): report a number, as by .item()",
                key=str(name),
            ) from None
    return json.dumps(metrics, default=_number)


def _number(value: Any) -> Any:
    """A NumPy scalar as a Python number, for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no number")
