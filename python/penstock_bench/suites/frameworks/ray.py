"""How long training under Ray waits for a report with a checkpoint: Penstock against Ray alone.

    .venv/bin/python -m penstock_bench.suites.frameworks.ray --directory DIR

One worker of Ray, one state of a model with Adam on the CPU. In each round each way reports it
once, in an order that turns: Ray's own, which is `torch.save` to a temporary directory on the same
file system and an upload that is waited for, or done in the background (`CheckpointUploadMode`);
and Penstock's, waited for, or in the background. What is measured is the call. Between two of them
the worker waits until the last one is registered.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

GB = 10**9
_LAYERS = 12
WAYS = ("ray", "ray async", "penstock", "penstock async")


def train(config: dict[str, Any]) -> None:
    """What the worker runs; writes the seconds of each report to a file."""
    import torch

    import penstock

    width = int((config["nbytes"] / 3 / 4 / _LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(_LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(width)).sum().backward()
    optimizer.step()
    training = penstock.Training(model=model, optimizer=optimizer)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    step = 0
    for number in range(config["rounds"] + 1):
        for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
            step += 1
            began = time.perf_counter()
            _report(way, step, training, config["scratch"])
            if number:
                # The first round fills caches and memory that later ones find.
                seconds[way].append(time.perf_counter() - began)
            _await_registered()
    with open(config["result"], "w", encoding="utf-8") as file:
        json.dump(seconds, file)


def _report(way: str, step: int, training: Any, scratch: str) -> None:
    import ray.train
    import torch
    from ray.train import CheckpointUploadMode

    from penstock.integrations.ray import report

    metrics = {"step": step}
    if way.startswith("penstock"):
        report(metrics, training, step=step, wait=way == "penstock")
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


def main() -> None:
    """Measures and prints a table."""
    import ray
    import ray.train
    import ray.train.torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on the storage to measure; default: a temporary one")
    arguments = parser.parse_args()
    root = tempfile.mkdtemp(prefix="penstock-ray-", dir=arguments.directory)
    # A machine that is busy starts it slowly.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        config = {
            "nbytes": int(arguments.gigabytes * GB),
            "rounds": arguments.rounds,
            "scratch": root,
            "result": os.path.join(root, "result.json"),
        }
        ray.train.torch.TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            run_config=ray.train.RunConfig(
                name="run",
                storage_path=root,
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
        with open(config["result"], encoding="utf-8") as file:
            found: dict[str, list[float]] = json.load(file)
    finally:
        ray.shutdown()
        shutil.rmtree(root, ignore_errors=True)
    out = sys.stdout
    out.write(
        f"{arguments.gigabytes} GB, {arguments.rounds} rounds, milliseconds: median (range)\n"
    )
    for way, seconds in found.items():
        low, high = min(seconds) * 1e3, max(seconds) * 1e3
        out.write(f"{way:16}{statistics.median(seconds) * 1e3:8.1f} ({low:.1f} to {high:.1f})\n")
    middle = {way: statistics.median(seconds) for way, seconds in found.items()}
    out.write(f"waited for: {middle['penstock'] / middle['ray']:.3f} of Ray's\n")
    out.write(f"in the background: {middle['penstock async'] / middle['ray async']:.3f} of Ray's\n")


if __name__ == "__main__":
    main()
