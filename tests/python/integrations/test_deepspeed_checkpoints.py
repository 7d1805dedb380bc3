"""DeepSpeed with Penstock as its checkpoint engine: ZeRO 0 to 3 on two ranks, what is refused."""

from __future__ import annotations

import glob
import os

import killed_runs
import pytest
import torch
import torch.distributed as dist

import forks
import penstock

KILLS = int(os.environ.get("PENSTOCK_TORTURE_DEEPSPEED_KILLS", "3"))
SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", "32"))
WIDTH = 8
STEPS = 4


def deepspeed_here():
    """DeepSpeed in a rank of a job, as its launcher would have begun it."""
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    import deepspeed

    # An op of its own for collectives, which it would compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    return deepspeed


def build(stage, dtype="bf16"):
    """An engine with a model of its own."""
    deepspeed = deepspeed_here()
    torch.manual_seed(11)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Dropout(0.5), torch.nn.Linear(2 * WIDTH, WIDTH)
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    torch.manual_seed(20 + dist.get_rank())
    return engine


def train(engine, steps):
    """The loss of each step: of random batches and dropout, whose states have to come back."""
    losses = []
    for _ in range(steps):
        batch = torch.randn(2, WIDTH).to(next(engine.module.parameters()).dtype)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def attach(engine, **how):
    from penstock.integrations.deepspeed import checkpoint_engine

    checkpoint_engine.attach(engine, **how)


def saved(directory, stage, dtype, how):
    """Trains, saves on the way, and returns what the losses were from then on."""
    engine = build(stage, dtype)
    attach(engine, **how)
    train(engine, 2)
    engine.save_checkpoint(directory, client_state={"epoch": 7})
    losses = train(engine, STEPS)
    engine.destroy()
    return losses


def resumed(directory, stage, dtype, how):
    engine = build(stage, dtype)
    attach(engine, **how)
    path, client_state = engine.load_checkpoint(directory)
    assert (path is not None, client_state["epoch"]) == (True, 7)
    losses = train(engine, STEPS)
    engine.destroy()
    return losses


KINDS = [
    (0, "fp32", {}),
    (1, "bf16", {}),
    (2, "bf16", {"background": True, "lazy": True}),
    (3, "bf16", {"background": True}),
    (3, "fp32", {}),
]


@pytest.mark.parametrize(("stage", "dtype", "how"), KINDS)
def test_a_resumed_run_goes_on_bit_for_bit(jobs, tmp_path, stage, dtype, how):
    path = str(tmp_path / "run")
    wanted = jobs.of(2).call(saved, path, stage, dtype, how)
    assert (tmp_path / "run" / "latest").read_text() == "global_step2"
    found = penstock.inspect(tmp_path / "run" / "global_step2")
    assert (found.world_size, found.step) == (2, 2)
    assert jobs.of(2).call(resumed, path, stage, dtype, how) == wanted
    assert wanted[0] != wanted[1]


def converted(directory):
    """What DeepSpeed's own tool makes of a tag that was written back."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from penstock.integrations.deepspeed.checkpoint_engine import to_torch

    engine = build(2)
    attach(engine)
    train(engine, 2)
    engine.save_checkpoint(directory)
    if dist.get_rank() == 0:
        to_torch(directory, directory + "-torch")
        with pytest.raises(FileExistsError):
            to_torch(directory, directory + "-torch")
        found = get_fp32_state_dict_from_zero_checkpoint(directory + "-torch")
        live = engine.module.state_dict()
        assert found.keys() == live.keys()
        for name, value in found.items():
            assert torch.equal(value.to(torch.bfloat16), live[name])
    dist.barrier()
    # By DeepSpeed's own engine, and by ours, which leaves that to theirs.
    losses = train(engine, 2)
    for is_ours in (False, True):
        other = build(2)
        if is_ours:
            attach(other)
        other.load_checkpoint(directory + "-torch")
        # Its own engine restores no random states.
        torch.manual_seed(5)
        first = train(other, 2)
        other.destroy()
        again = build(2)
        attach(again)
        again.load_checkpoint(directory)
        torch.manual_seed(5)
        assert train(again, 2) == first
        if is_ours:
            with pytest.raises(penstock.CheckpointExistsError, match="saved by DeepSpeed itself"):
                again.save_checkpoint(directory + "-torch", tag="global_step2")
        again.destroy()
    engine.destroy()
    return losses


def test_a_tag_is_written_back_and_old_ones_are_loaded(jobs, tmp_path):
    jobs.of(2).call(converted, str(tmp_path / "run"), timeout_seconds=200)


def refused(directory):
    """What is no complete tag, or not storable."""
    engine = build(2)
    attach(engine)
    train(engine, 1)
    engine.save_checkpoint(directory, tag="good")
    engine.save_checkpoint(directory, tag="bad")
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(os.path.join(directory, "bad", "manifest.json"))
    dist.barrier()
    with pytest.raises(penstock.IncompleteCheckpointError, match="bad"):
        engine.load_checkpoint(directory, tag="bad")
    with pytest.raises(penstock.PenstockError) as error:
        engine.save_checkpoint(directory, tag="worse", client_state={"it": object})
    if dist.get_rank() == 0:
        assert error.value.key == "mp_rank_00_model_states.pt.it"
        assert "pickled=" in str(error.value)
        with open(os.path.join(directory, "latest")) as file:
            assert file.read() == "bad"
    dist.barrier()
    attach(engine, pickled=["*.it"])
    engine.save_checkpoint(directory, tag="raw", client_state={"it": object})
    with pytest.raises(penstock.UnsupportedStateError, match="trust=True"):
        engine.load_checkpoint(directory)
    attach(engine, trust=True)
    _, client_state = engine.load_checkpoint(directory)
    assert client_state["it"] is object
    # What is no tag is a file, as theirs.
    engine.save_16bit_model(directory, "model.bin")
    dist.barrier()
    assert torch.load(os.path.join(directory, "model.bin")).keys() == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    engine.destroy()


def test_what_is_no_complete_tag_is_refused(jobs, tmp_path):
    jobs.of(2).call(refused, str(tmp_path / "run"), timeout_seconds=120)


def installed(directory):
    """Every engine that is built has ours; and `latest` is as before where a save fails."""
    import deepspeed.runtime.engine as runtime

    from penstock.integrations.deepspeed import checkpoint_engine

    theirs = runtime.create_checkpoint_engine
    checkpoint_engine.install(background=True)
    try:
        engine = build(1)
        assert isinstance(engine.checkpoint_engine, checkpoint_engine.PenstockCheckpointEngine)
        train(engine, 1)
        engine.save_checkpoint(directory, tag="first")
        train(engine, 1)
        engine.save_checkpoint(directory, tag="second", save_latest=False)
        train(engine, 1)
        engine.destroy()
        with pytest.raises(ValueError, match="lazy=True"):
            checkpoint_engine.install(lazy=True)
    finally:
        runtime.create_checkpoint_engine = theirs
    dist.barrier()
    with open(os.path.join(directory, "latest")) as file:
        assert file.read() == "first"
    assert penstock.inspect(os.path.join(directory, "second")).step == 2
    assert not glob.glob(os.path.join(directory, "*.tmp"))


def test_install_is_for_all_engines_and_latest_for_those_that_ask(jobs, tmp_path):
    jobs.of(2).call(installed, str(tmp_path / "run"))


def complete(directory):
    """The steps of the complete tags of the example, up to the one that `latest` names."""
    newest = directory / "latest"
    if not newest.exists():
        return []
    last = int(newest.read_text().removeprefix("global_step"))
    steps = [penstock.inspect(one.parent).step for one in directory.glob("*/manifest.json")]
    assert last in steps
    return sorted(step for step in steps if step <= last)


def test_a_run_whose_ranks_are_killed_ends_as_if_they_had_not_been(tmp_path):
    killed_runs.survives(
        "deepspeed_training.py",
        tmp_path,
        KILLS,
        SEED,
        complete=complete,
        popen=forks.DeepSpeedPopen,
        ranks=2,
    )
