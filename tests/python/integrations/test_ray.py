"""Ray Train: checkpoints written to Ray's storage, registered once they are durable."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import types
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest
import ray.train
import torch
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import forks
import penstock
from conftest import mounted, run_child
from penstock.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    MissingDependencyError,
    PenstockWarning,
    RankError,
    StorageError,
    UnsupportedPathError,
    UnsupportedStateError,
)
from penstock.integrations import ray as pr
from penstock.integrations import versions
from penstock.integrations.ray import fitting
from penstock.integrations.ray import run as runs
from ranks import environments_of


def fit(function, root, name="run"):
    """Trains in local mode, in this process."""
    return DataParallelTrainer(
        function,
        scaling_config=ray.train.ScalingConfig(num_workers=0),
        run_config=ray.train.RunConfig(name=name, storage_path=str(root)),
    ).fit()


def steps_of(root):
    names = sorted(path.name for path in (root / "run").glob("penstock-*"))
    return [int(name.split("-")[1]) for name in names]


def trained(root, steps, **options):
    """Resumes a run that reports every step; returns Ray's result and the step it resumed from."""
    found = []

    def train():
        training = penstock.Training(w=np.zeros(3), losses=[])
        resumed = pr.resume(training, storage_path=root)
        found.append(resumed)
        for step in range((resumed or 0) + 1, steps + 1):
            training.w += 1
            training.losses.append(float(training.w.sum()))
            pr.report({"loss": 1 / step}, training, step=step, storage_path=root, **options)

    return fit(train, root), found[0]


def test_a_run_goes_on_from_what_was_reported_in_its_own_directory(tmp_path):
    result, resumed = trained(tmp_path, 3)
    assert resumed is None
    # Ray copied no file, and no other directory has remains.
    assert Path(result.checkpoint.path).parent == tmp_path / "run"
    assert penstock.load(result.checkpoint.path)["losses"] == [3, 6, 9]
    assert penstock.inspect(result.checkpoint.path).step == 3
    result, resumed = trained(tmp_path, 5, background=True, lazy=True)
    assert resumed == 3
    assert penstock.load(result.checkpoint.path)["losses"] == [3, 6, 9, 12, 15]
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    result, resumed = trained(tmp_path, 5)
    # Ray has the resumed checkpoint with its metrics, though nothing was saved since.
    assert (resumed, result.metrics) == (5, {"loss": 0.2})
    assert penstock.load(result.checkpoint.path)["losses"][-1] == 15


def test_a_damaged_one_is_passed_over_and_what_never_finished_is_removed(tmp_path):
    trained(tmp_path, 3)
    directories = sorted((tmp_path / "run").glob("penstock-*"))
    flip(directories[2])
    (directories[1] / "manifest.json").unlink()
    other = tmp_path / "run" / "mine"
    other.mkdir()
    with pytest.warns(PenstockWarning, match="passed over.*penstock-0000000003"):
        _, resumed = trained(tmp_path, 3)
    assert resumed == 1
    assert not directories[1].exists()
    # The damaged step can be salvaged, and the step is saved beside it.
    assert directories[2].exists()
    assert steps_of(tmp_path) == [1, 2, 3, 3]
    assert other.exists()


def test_a_run_whose_checkpoints_are_all_bad_does_not_begin_anew(tmp_path):
    trained(tmp_path, 2)
    for directory in (tmp_path / "run").glob("penstock-*"):
        flip(directory)
    with (
        pytest.warns(PenstockWarning),
        pytest.raises(CorruptCheckpointError, match="none of its checkpoints is good"),
    ):
        trained(tmp_path, 2)


def flip(directory):
    (shard,) = directory.glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[4100] ^= 1
    shard.write_bytes(data)


def test_what_cannot_be_reported_is_named(tmp_path):
    def train():
        state = {"w": np.ones(3)}
        with pytest.raises(ValueError, match="step="):
            pr.report({"loss": 1}, state, storage_path=tmp_path)
        with pytest.raises(UnsupportedStateError, match="'loss' is of type Tensor"):
            pr.report({"loss": torch.ones(1)}, state, step=1, storage_path=tmp_path)
        with pytest.raises(UnsupportedStateError, match="f: a value of type"):
            pr.report({"loss": 1}, {"f": print}, step=1, storage_path=tmp_path)
        pr.report({"loss": np.float32(1)}, state, step=1, storage_path=tmp_path)
        with pytest.raises(CheckpointExistsError):
            pr.report({"loss": 1}, state, step=1, storage_path=tmp_path)
        # Nobody would look for a checkpoint there.
        with pytest.raises(ValueError, match="storage_path"):
            pr.resume(state, storage_path=tmp_path / "other")
        pr.report({"loss": 2.0})

    assert fit(train, tmp_path).metrics == {"loss": 2.0}
    assert steps_of(tmp_path) == [1]


def test_metrics_that_ray_takes_are_kept_and_reported_again(tmp_path):
    metrics = {"loss": float("nan"), "best": float("inf"), "of": {"rank": [np.float32(0.5)]}}

    def train():
        pr.report(metrics, {"w": np.ones(3)}, step=1, storage_path=tmp_path)

    fit(train, tmp_path)
    again = fit(lambda: pr.resume({"w": np.ones(3)}, storage_path=tmp_path), tmp_path).metrics
    assert np.isnan(again.pop("loss"))
    assert again == {"best": float("inf"), "of": {"rank": [0.5]}}


@pytest.mark.parametrize("has_step", [True, False])
def test_a_checkpoint_that_somebody_else_has_reported_is_resumed_by_its_step(tmp_path, has_step):
    found = []

    def train():
        path = tmp_path / "run" / "mine"
        penstock.save(path, {"w": np.full(3, 5.0)}, step=7 if has_step else None)
        ray.train.report({"loss": 1}, checkpoint=ray.train.Checkpoint(str(path)))
        state = {"w": np.zeros(3)}
        try:
            found.append(pr.resume(state, storage_path=tmp_path))
        except CorruptCheckpointError as error:
            found.append(str(error))
        found.append(state["w"].tolist())

    fit(train, tmp_path)
    if has_step:
        assert found == [7, [5.0] * 3]
    else:
        # Restoring it and returning "new run" would train its steps twice.
        assert "it has no step" in found[0]
        assert found[1] == [0.0] * 3


def test_a_full_disk_leaves_the_last_one_and_training_may_go_on(tmp_path, need_root):
    def train():
        root = tmp_path / "small"
        state = {"w": np.full(1 << 20, 1, np.uint32)}
        pr.report({"step": 1}, state, step=1, storage_path=root)
        with pytest.raises(StorageError, match="space"):
            pr.report({"step": 2}, state, step=2, storage_path=root)
        pr.report({"step": 2})

    with mounted("tmpfs", tmp_path / "small", 6 << 20):
        result = fit(train, tmp_path / "small")
        assert result.metrics == {"step": 2}
        (path,) = (tmp_path / "small" / "run").glob("penstock-*1-*")
        assert penstock.load(path)["w"][0] == 1


def test_a_storage_that_is_no_file_system_and_workers_without_a_group_are_refused(monkeypatch):
    def context(size, filesystem):
        storage = types.SimpleNamespace(experiment_fs_path="b/run", storage_filesystem=filesystem)
        return types.SimpleNamespace(
            get_world_rank=lambda: 0, get_world_size=lambda: size, get_storage=lambda: storage
        )

    remote = pyarrow.fs._MockFileSystem()
    monkeypatch.setattr(ray.train, "get_context", lambda: context(1, remote))
    with pytest.raises(UnsupportedPathError, match="storage of type mock"):
        runs.RayRun(None)
    monkeypatch.setattr(ray.train, "get_context", lambda: context(2, pyarrow.fs.LocalFileSystem()))
    with pytest.raises(RankError, match="one of 2 workers"):
        runs.RayRun(None)


def test_a_list_that_keeps_a_run_from_starting_is_set_aside(tmp_path):
    assert pr.repair(tmp_path) is None
    listed = tmp_path / "checkpoint_manager_snapshot.json"
    (tmp_path / "here").mkdir()
    listed.write_text(json.dumps({"checkpoint_results": [{"checkpoint_dir_name": "here"}]}))
    assert pr.repair(tmp_path) is None
    assert listed.exists()
    both = [{"checkpoint_dir_name": name} for name in ("here", "gone")]
    listed.write_text(json.dumps({"checkpoint_results": both}))
    assert "names gone, which is gone" in pr.repair(tmp_path)
    listed.write_text('{"checkpoint_res')
    assert "makes no sense" in pr.repair(tmp_path)
    assert not listed.exists()
    names = sorted(os.listdir(tmp_path))
    assert names == ["checkpoint_manager_snapshot.json.aside-1", f"{listed.name}.aside-2", "here"]


TWO_RANKS = """
    import json, sys, warnings
    import ray.train, torch
    from ray.train.torch import TorchTrainer
    import torch.distributed as dist
    import penstock
    from penstock.integrations.ray import report, resume
    root = sys.argv[1]
    found = []
    def train():
        rank = dist.get_rank()
        training = penstock.Training(w=torch.zeros(3), own=[], rng=False)
        step = resume(training, storage_path=root) or 0
        found.append(step)
        for step in range(step + 1, 3):
            training.w += 1
            training.own.append(rank * 10 + step)
            report({"loss": 1.0}, training, step=step, storage_path=root)
        found.append([training.w.tolist(), training.own])
    trainer = lambda: TorchTrainer(
        train, scaling_config=ray.train.ScalingConfig(num_workers=0),
        run_config=ray.train.RunConfig(name="run", storage_path=root))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer().fit()
    print(json.dumps(found), flush=True)
"""


def two_ranks(root):
    processes = [
        forks.RayPopen(
            ["-c", textwrap.dedent(TWO_RANKS), str(root)],
            stdout=-1,
            stderr=-1,
            text=True,
            env=os.environ | environment | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank, environment in enumerate(environments_of(2))
    ]
    ended = [process.communicate(timeout=120) for process in processes]
    assert [one.returncode for one in processes] == [0, 0], (
        ended[0][1][-3000:] + ended[1][1][-3000:]
    )
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.slow
def test_two_ranks_save_together_and_pass_over_what_one_of_them_cannot_read(tmp_path):
    found = two_ranks(tmp_path)
    assert found == [[0, [[2.0] * 3, [1, 2]]], [0, [[2.0] * 3, [11, 12]]]]
    newest = max((tmp_path / "run").glob("penstock-*"))
    assert penstock.inspect(newest).world_size == 2
    # Only the second worker reads this file.
    (part,) = newest.glob("part-00001*")
    part.write_bytes(part.read_bytes()[:-1])
    assert two_ranks(tmp_path) == [[1, found[0][1]], [1, found[1][1]]]


WORKERS = """
    import json, os, signal, sys, threading, time
    # A busy machine starts it slowly.
    os.environ["RAY_raylet_start_wait_time_s"] = "300"
    import ray, ray.train, torch
    import torch.distributed as dist
    from ray.train.torch import TorchTrainer
    import penstock
    from penstock.integrations.ray import repair, report, resume
    root, kills, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[4])

    def train(config):
        import random
        rank = dist.get_rank()
        torch.manual_seed(0)
        training = penstock.Training(
            model=torch.nn.Linear(64, 64), own=[], rng=False)
        step = resume(training) or 0
        if rank == 0:
            with open(config["log"], "a") as log:
                log.write(f"{step}\\n")
        dist.barrier()
        chooser = random.Random(f"{time.time()} {rank}")
        life = len(open(config["log"]).readlines())
        # A random rank each time, at any moment of any step.
        doomed = life <= config["kills"] and rank == life % 2
        last = step + chooser.randrange(1, 4)
        if doomed:
            def end():
                time.sleep(chooser.uniform(0, 0.3))
                os.kill(os.getpid(), signal.SIGKILL)
        for step in range(step + 1, config["steps"] + 1):
            with torch.no_grad():
                training.model.weight += step
            training.own.append(rank * 100 + step)
            if doomed and step == last:
                threading.Thread(target=end).start()
            report({"step": step}, training, step=step, background=step % 3 != 0)
            dist.barrier()
            if doomed and step >= last + 1:
                time.sleep(1)

    def fit(steps, kills):
        config = {"log": root + "/log", "kills": kills, "steps": steps}
        open(config["log"], "w").close()
        result = TorchTrainer(
            train, train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(
                num_workers=2, resources_per_worker={"CPU": 0.5}),
            run_config=ray.train.RunConfig(
                name="run", storage_path=root,
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
                failure_config=ray.train.FailureConfig(max_failures=kills + 1)),
        ).fit()
        return result, [int(line) for line in open(config["log"])]

    fewest, complete, is_over = [], 0, False
    def watch():
        # The number of complete checkpoints, up to the two that Ray keeps, never falls.
        global complete
        while not is_over:
            try:
                names = [n for n in os.listdir(root + "/run") if n.startswith("penstock-")]
                now = sum(os.path.exists(f"{root}/run/{n}/manifest.json") for n in names)
            except FileNotFoundError:
                continue
            if now < min(complete, 2):
                fewest.append((complete, now))
            complete = max(complete, now)
            time.sleep(0.002)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, _temp_dir=sys.argv[3],
             object_store_memory=100 << 20)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        first, lives = fit(steps, kills)
        found = [first.metrics, lives, len(first.best_checkpoints)]
        snapshot = root + "/run/checkpoint_manager_snapshot.json"
        text = open(snapshot).read()
        with open(snapshot, "w") as file:
            file.write(text[:20])
        found.append(repair(root + "/run") is not None)
        second, lives = fit(steps + 2, 0)
        state = [penstock.load(second.checkpoint.path, rank=rank) for rank in (0, 1)]
        found += [second.metrics, lives, [one["own"] for one in state],
                  float(state[0]["model"]["weight"].sum())]
    finally:
        is_over = True
        watcher.join()
        ray.shutdown()
    found += [fewest, sorted(int(n.split("-")[1]) for n in os.listdir(root + "/run")
                             if n.startswith("penstock-"))]
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(7200)
def test_workers_of_ray_that_are_killed_go_on_bit_for_bit(tmp_path, tmp_path_factory):
    """Two of them with gloo, in a cluster of their own that ends with the test."""
    kills = int(os.environ.get("PENSTOCK_TORTURE_RAY_WORKER_KILLS", "0"))
    if kills == 0:
        pytest.skip("it takes minutes alone on the machine: make torture WHAT=frameworks runs it")
    steps = 4 * (kills + 1)  # at most this many in each run
    # Names of Ray's sockets have at most 107 bytes.
    session = Path("/tmp") / f"penstock-ray-{os.getpid()}"
    try:
        found = run_child(
            WORKERS,
            tmp_path,
            kills,
            session,
            steps,
            is_fresh=True,
            timeout_seconds=600 + 60 * kills,
        )
    finally:
        shutil.rmtree(session, ignore_errors=True)
    first, lives, kept, is_repaired, second, resumed, own, total, fewest, kept_steps = found
    assert first == {"step": steps}
    assert lives[0] == 0
    assert len(lives) == kills + 1
    assert kept == 2
    assert is_repaired
    assert second == {"step": steps + 2}
    assert resumed == [steps]
    assert own == [list(range(first, first + steps + 2)) for first in (1, 101)]
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        for step in range(1, steps + 3):
            model.weight += step
    assert total == float(model.weight.sum())
    assert fewest == []
    assert kept_steps[-2:] == [steps + 1, steps + 2]


@pytest.fixture
def newer(monkeypatch):
    """Pretends that a newer, untested Ray is installed."""
    found = versions.version
    monkeypatch.setattr(versions, "version", lambda name: "99.0" if name == "ray" else found(name))
    monkeypatch.setattr(versions, "_self_checked", set())


@pytest.mark.slow
def test_a_newer_version_is_taken_after_a_tiny_run_was_resumed(tmp_path, newer):
    result, _ = trained(tmp_path, 2)
    assert versions._self_checked == {"ray"}
    assert penstock.load(result.checkpoint.path)["losses"] == [3, 6]
    assert steps_of(tmp_path) == [1, 2]


def test_a_newer_version_whose_tiny_run_is_not_resumed_saves_nothing(tmp_path, monkeypatch, newer):
    trial = tmp_path / "trial.py"
    trial.write_text("import sys; sys.exit('[(2, [])] was resumed')")
    monkeypatch.setattr(fitting, "_TRIAL", "trial")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = r"99\.0.*not resumed: \[\(2, \[\]\)\] was resumed"
    with pytest.raises(MissingDependencyError, match=message):
        trained(tmp_path / "root", 2)
    assert steps_of(tmp_path / "root") == []
