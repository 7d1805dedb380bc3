"""How long training under Ray waits for a report with a checkpoint: Penstock against Ray alone.

    .venv/bin/python -m penstock_bench.suites.frameworks.ray --directory DIR

One worker of Ray, one state of a model with Adam on the CPU. In each round each way reports it
once, in an order that turns: Ray's own, which is `torch.save` to a temporary directory on the same
file system and an upload that is waited for, or done in the background (`CheckpointUploadMode`);
and Penstock's, waited for, or in the background. What is measured is the call. Between two of them
the worker waits until the last one is registered.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import click

from penstock_bench.suites.frameworks.waits import WAIT, Found, by_turns, command

if TYPE_CHECKING:
    from pathlib import Path

GB = 10**9
_LAYERS = 12
WAYS = ("ray", "ray async", "penstock", "penstock async")


def train(config: dict[str, Any]) -> None:
    """Runs in the worker, and writes the seconds of each report to a file."""
    import torch

    import penstock

    width = int((config["nbytes"] / 3 / 4 / _LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(_LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(width)).sum().backward()
    optimizer.step()
    training = penstock.Training(model=model, optimizer=optimizer)
    steps = itertools.count(1)

    def measured(way: str, _: int) -> dict[str, float]:
        began = time.perf_counter()
        _report(way, next(steps), training, config["scratch"])
        seconds = time.perf_counter() - began
        _await_registered()
        return {WAIT: seconds}

    found = by_turns(WAYS, config["rounds"], measured)
    with open(config["result"], "w", encoding="utf-8") as file:
        json.dump(found, file)


def _report(way: str, step: int, training: Any, scratch: str) -> None:
    import ray.train
    import torch
    from ray.train import CheckpointUploadMode

    from penstock.integrations.ray import report

    metrics = {"step": step}
    if way.startswith("penstock"):
        report(metrics, training, step=step, background=way != "penstock")
        return
    directory = tempfile.mkdtemp(dir=scratch)
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
    }
    torch.save(state, os.path.join(directory, "state.pt"))
    is_async = way == "ray async"
    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint.from_directory(directory),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC
        if is_async
        else CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload=True,
    )


def _await_registered() -> None:
    import ray.train

    ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)


@command("ray", "ray async", rounds_usual=5)
@click.option("--gigabytes", type=click.FloatRange(min=0.001), default=0.6, show_default=True)
def main(place: Path, rounds: int, gigabytes: float) -> tuple[str, Found]:
    """Report a checkpoint under Ray Train, with Ray's own means and with Penstock."""
    import ray
    import ray.train
    import ray.train.torch

    # A busy machine starts Ray slowly.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        config = {
            "nbytes": int(gigabytes * GB),
            "rounds": rounds,
            "scratch": str(place),
            "result": str(place / "result.json"),
        }
        ray.train.torch.TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            run_config=ray.train.RunConfig(
                name="run",
                storage_path=str(place),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
        found: Found = json.loads((place / "result.json").read_text())
    finally:
        ray.shutdown()
    return f"{gigabytes:g} GB", found


if __name__ == "__main__":
    main()
