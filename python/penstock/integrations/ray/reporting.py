"""`report`: a checkpoint where Ray keeps it, registered once it is durable."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import ray.train
from ray.train import CheckpointUploadMode

from penstock.errors import UnsupportedStateError
from penstock.integrations.ray import fitting
from penstock.integrations.ray.run import NOTE, current

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from penstock import PendingSave
    from penstock.integrations.ray.run import Run


def report(
    metrics: Mapping[str, Any],
    state: Any = None,
    *,
    step: int | None = None,
    wait: bool = True,
    lazy: bool = False,
    storage_path: str | os.PathLike[str] | None = None,
) -> None:
    """Saves a state and reports it to Ray Train, in the place of `ray.train.report`.

    All workers call this equally often, and save together (`torch.distributed`): each writes what
    it holds, straight into the run's directory. Ray hears of the checkpoint when it is durable, and
    deletes old ones (``CheckpointConfig(num_to_keep=…)``) after that.

    Args:
        metrics: As for `ray.train.report`: numbers, NaN and infinity too, text, and lists and
            dictionaries of these, which are kept as JSON.
        state: What to save: a `penstock.Training`, or any state; None for a report without a
            checkpoint.
        step: The training step, by which `resume` knows the newest. Given with a state, and another
            one each time.
        wait: Whether to wait until the checkpoint is durable. If not, Ray registers it when it is,
            and an error ends the run's workers as Ray's own asynchronous uploads do: with
            ``FailureConfig(max_failures=…)`` they are started anew, from the newest complete one.
            In local mode it is always waited for.
        lazy: Without ``wait``, whether to copy the state while training goes on; see
            `CheckpointStore.save_async`.
        storage_path: Of the run, in local mode, where Ray does not tell it; None for Ray's default.

    Raises:
        UnsupportedStateError: A leaf of the state, or a metric, cannot be stored.
        UnsupportedPathError: The run's storage is no file system.
        CheckpointExistsError: The step was saved before by these workers.
        RankError: Another worker failed, or they have no process group.
        StorageError: The operating system failed an operation. Nothing is reported, older
            checkpoints stay, and training may go on where all workers catch the error.
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
    note = {NOTE: {"metrics": _to_json(metrics)}}
    if wait or run.is_local:
        run.saver.save(path, state, step=step, metadata=note)
        register(run, path, metrics)
    else:
        pending = run.saver.save_async(path, state, step=step, metadata=note, lazy=lazy)
        _register_later(run, path, metrics, pending)


def register(run: Run, path: str, metrics: dict[str, Any]) -> None:
    """Has Ray register what is complete and durable."""
    ray.train.report(
        metrics,
        checkpoint=run.checkpoint(path),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def _register_later(run: Run, path: str, metrics: dict[str, Any], pending: PendingSave) -> None:
    """Has Ray's thread for uploads wait for the save, which is all that there is to upload.

    It keeps the order of reports, and is waited for at the end of training.
    """

    def durable(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        pending.result()
        return checkpoint

    ray.train.report(
        metrics,
        checkpoint=run.checkpoint(path),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=durable,
        # What Ray would delete as the local copy is the checkpoint.
        delete_local_checkpoint_after_upload=False,
    )


def _to_json(metrics: dict[str, Any]) -> str:
    """Metrics as they are kept beside the state, for a `resume` that has to report them again.

    As text, since a checkpoint's metadata has no place for a loss that is NaN.
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
    """What JSON has for a number of NumPy."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no number")
