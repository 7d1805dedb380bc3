"""Ray Train (its version 2), whose checkpoints Penstock writes where Ray keeps them.

`report` saves straight below the run's storage path, by all workers together, and has Ray register
what is there: nothing is written to a temporary directory and uploaded. `resume` restores the
newest complete one.

Example:
    >>> import tempfile, penstock, ray.train
    >>> from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    >>> from penstock.integrations.ray import report, resume
    >>> root = tempfile.mkdtemp()
    >>> def train() -> None:
    ...     training = penstock.Training(losses=[])
    ...     step = resume(training, storage_path=root) or 0
    ...     for step in range(step + 1, step + 3):
    ...         training.losses.append(1 / step)
    ...         report({"loss": 1 / step}, training, step=step, storage_path=root)
    >>> scaling = ray.train.ScalingConfig(num_workers=0)
    >>> run = ray.train.RunConfig(name="run", storage_path=root)
    >>> result = DataParallelTrainer(train, scaling_config=scaling, run_config=run).fit()
    >>> penstock.load(result.checkpoint.path)["losses"]
    [1.0, 0.5]
"""

from typing import Any

from penstock.integrations.versions import Probe, check_version

check_version("ray", "2.50", "2.60")


def _probe() -> None:
    """Looks whether Ray has what is called.

    Raises:
        MissingDependencyError: It has not.
    """
    probe = Probe("ray", "penstock.integrations.ray")
    is_enabled: Any = probe.attribute("ray.train.v2._internal.constants", "is_v2_enabled")
    if is_enabled is not None and not is_enabled():
        # As in Ray 2.50, unless it is asked for; all else would seem to be missing.
        probe.note("Ray Train is its version 1 here: set RAY_TRAIN_V2_ENABLED=1 in the environment")
        probe.check()
    probe.signature(
        probe.attribute("ray.train", "report"),
        "metrics",
        "checkpoint",
        "checkpoint_upload_mode",
        "checkpoint_upload_fn",
        "delete_local_checkpoint_after_upload",
    )
    modes = probe.attribute("ray.train", "CheckpointUploadMode")
    for mode in ("NO_UPLOAD", "ASYNC"):
        probe.attribute(modes, mode)
    for name in ("get_checkpoint", "get_all_reported_checkpoints", "get_context"):
        probe.attribute("ray.train", name)
    probe.signature(probe.attribute("ray.train", "Checkpoint"), "path", "filesystem")
    internal = "ray.train.v2._internal"
    probe.attribute(f"{internal}.constants", "CHECKPOINT_MANAGER_SNAPSHOT_FILENAME")
    for name in ("get_storage", "get_world_rank", "get_world_size", "get_experiment_name"):
        context = probe.attribute("ray.train.v2.api.context", "TrainContext")
        probe.attribute(context, name)
    probe.check()


_probe()

from penstock.integrations.ray.reporting import report  # noqa: E402
from penstock.integrations.ray.resuming import resume  # noqa: E402
from penstock.integrations.ray.snapshot import repair  # noqa: E402

__all__ = ["repair", "report", "resume"]
