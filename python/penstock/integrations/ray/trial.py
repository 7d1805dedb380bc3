"""A program that reports a tiny run in Ray's local mode, and resumes it in a second run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import penstock
from penstock.integrations.ray import report, resume
from penstock.integrations.versions import skip_self_check

if TYPE_CHECKING:
    from collections.abc import Callable

_LOSSES = [0.5, 0.25]


def main(root: str) -> None:
    """Reports and resumes a tiny state."""
    skip_self_check("ray")
    resumed = []

    def first() -> None:
        report({"loss": 0.25}, penstock.Training(losses=_LOSSES), step=2, storage_path=root)

    def second() -> None:
        training = penstock.Training(losses=[])
        step = resume(training, storage_path=root)
        resumed.append((step, training.losses))

    path = _fit(first, root)
    if penstock.load(path)["losses"] != _LOSSES:
        sys.exit(f"{path}, which Ray has registered, holds another state")
    _fit(second, root)
    if resumed != [(2, _LOSSES)]:
        sys.exit(f"{resumed} was resumed")


def _fit(train: Callable[[], None], root: str) -> str:
    """Runs a training function; returns the path of the checkpoint that Ray has then."""
    result: Any = DataParallelTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=0),
        run_config=ray.train.RunConfig(name="run", storage_path=root),
    ).fit()
    return str(result.checkpoint.path)


if __name__ == "__main__":
    main(sys.argv[1])
