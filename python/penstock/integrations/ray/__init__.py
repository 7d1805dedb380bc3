"""Ray Train (version 2), with checkpoints that Penstock writes directly where Ray keeps them.

`report` saves directly below the run's storage path, with all workers together, and registers the
checkpoint with Ray: nothing is written to a temporary directory and uploaded. `resume` restores the
newest complete checkpoint.

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

from penstock.integrations.ray import fitting
from penstock.integrations.versions import check_version

check_version("ray", "2.50", "2.60")
fitting.check()

from penstock.integrations.ray.reporting import report  # noqa: E402
from penstock.integrations.ray.resuming import resume  # noqa: E402
from penstock.integrations.ray.snapshot import repair  # noqa: E402

__all__ = ["repair", "report", "resume"]
