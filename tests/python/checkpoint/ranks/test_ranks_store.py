"""Stores on many ranks: background saves, retention, stages, groups, inspection."""

from __future__ import annotations

import time
import warnings

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Shard

import forks
import penstock
from compare import assert_same
from dtensors import LINE, Layout, as_loaded, cleared, local_bytes, plain, rank, sharded, values
from penstock.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    SaveInProgressError,
    StateMismatchError,
)
from penstock.planning.records import history

ROWS = Layout(LINE, [Shard(0)], (50, 30))

_stores = {}


def state(step):
    return {"rows": sharded(f"rows{step}", ROWS), "plain": plain(rank(), str(step)), "step": step}


def whole(step):
    return {"rows": values(f"rows{step}", ROWS.shape), "step": step}


def store_of(root, **settings):
    """Returns one store per directory for the life of the rank, as a training run has it."""
    return _stores.setdefault(str(root), penstock.CheckpointStore(root, **settings))


def spoil(one):
    one["rows"].to_local().zero_()
    one["plain"]["plain"]["weight"].zero_()


# In the background.


def save_async(root, step, lazy):
    one = state(step)
    pending = store_of(root).save_async(step, one, lazy=lazy)
    if lazy:
        pending.stage()
    # The copy is complete by now.
    spoil(one)
    return pending.result().rank


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_state_may_change_as_soon_as_it_is_staged(jobs, disk_path, lazy):
    root = disk_path / "store"
    for step in (1, 2):
        assert jobs.of(4).call(save_async, root, step, lazy) == [0, 1, 2, 3]
    store = penstock.CheckpointStore(root)
    for step in (1, 2):
        assert_same(store.load(step, keys=["rows", "step"]), whole(step))
        weight = values(f"{step}weight", (30, 7))
        assert_same(store.load(step)["plain"]["plain"]["weight"], weight)


def save_while_busy(root, if_busy):
    """The last rank keeps all others waiting with a save."""
    store = store_of(root)
    store.save(1, state(1))
    if rank() == 3:
        time.sleep(1.5)
    pending = store.save_async(2, state(2))
    try:
        other = store.save_async(3, state(3), if_busy=if_busy)
    except SaveInProgressError:
        other = "busy"
    pending.result()
    store.save(4, state(4))
    return None if other is None else str(other)


@pytest.mark.parametrize(("if_busy", "expected"), [("skip", None), ("error", "busy")])
def test_all_ranks_leave_a_save_out_or_none(jobs, disk_path, if_busy, expected):
    """The slowest rank has no save running: the first rank's decision counts."""
    root = disk_path / "store"
    assert jobs.of(4).call(save_while_busy, root, if_busy) == [expected] * 4
    assert penstock.CheckpointStore(root).steps() == [1, 2, 4]


def save_again_unseen(root):
    """The error of an unseen background save is raised by the next save."""
    store = store_of(root)
    store.save(1, state(1))
    store.save_async(1, state(1))
    try:
        store.save_async(2, state(2))
    except CheckpointExistsError:
        store.save_async(3, state(3)).result()
        return "told"
    return "not told"


def test_a_failure_in_the_background_is_told_once_on_every_rank(jobs, disk_path):
    root = disk_path / "store"
    assert jobs.of(4).call(save_again_unseen, root) == ["told"] * 4
    assert penstock.CheckpointStore(root).steps() == [1, 3]


def save_many(root, first, last):
    store = store_of(root, keep_last=2)
    for step in range(first, last, 2):
        store.save(step, {"rows": sharded("rows", ROWS), "step": step})
        store.save_async(step + 1, {"rows": sharded("rows", ROWS)})
    store.wait()


def test_old_steps_go_and_messages_do_not_pile_up(jobs, disk_path):
    """200 saves leave two steps, and as many keys as 20."""
    root, job = disk_path / "store", jobs.of(4)
    job.call(save_many, root, 0, 20)
    assert penstock.CheckpointStore(root).steps() == [18, 19]
    before = job.store.num_keys()
    job.call(save_many, root, 20, 220, timeout_seconds=120)
    assert job.store.num_keys() <= before
    assert [info.step for info in penstock.CheckpointStore(root).scan()] == [218, 219]


# Pipeline stages, groups, and ranks that save alone.


def stage_state(stage):
    """Returns layers of its own; optimizer states of the same names and other shapes."""
    layers = {f"layer{2 * stage + i}": values(f"layer{2 * stage + i}", (4, 3)) for i in range(2)}
    rows = 5 + stage
    moments = {i: {"exp_avg": values(f"{stage}.{i}", (rows, 2))} for i in range(2)}
    return {
        # On both stages, as if the output layer were tied to it.
        "model": {**layers, "embedding": values("embedding", (6, 2))},
        "optimizer": {"state": moments, "lr": 0.1},
        "stage": stage,
    }


def save_stage(path):
    return penstock.save(path, stage_state(rank() // 2)).tensor_bytes


def load_stage(path):
    expected = stage_state(rank() // 2)
    one = cleared(expected)
    penstock.load(path, into=one)
    assert_same(one, expected)


def test_pipeline_stages_get_their_own_back_and_others_see_all_layers(jobs, disk_path):
    path = disk_path / "ckpt"
    for _ in range(2):
        written = jobs.of(4).call(save_stage, path)
        jobs.of(4).call(load_stage, path)
        # Tensors that several stages hold are written once, too.
        tensors = [local_bytes({**stage_state(i), "stage": 0}) for i in range(2)]
        assert sum(written) == sum(len(one) for stage in tensors for one in stage) - 6 * 2 * 4
        path = disk_path / "again"
    for number in range(4):
        assert_same(penstock.load(path, rank=number), stage_state(number // 2))
    with pytest.raises(StateMismatchError, match="rank="):
        penstock.load(path)
    # In the order of the first rank, then of the others.
    shapes = {"layer0": (4, 3), "layer1": (4, 3), "embedding": (6, 2)}
    shapes |= {"layer2": (4, 3), "layer3": (4, 3)}
    layers = {name: values(name, shape) for name, shape in shapes.items()}
    assert_same(penstock.load(path, keys="model.*"), {"model": layers})
    into = {"model": cleared(layers)}
    penstock.load(path, into=into, keys="model.*")
    assert_same(into, {"model": layers})


def save_alone(path):
    return penstock.save(path, {"w": values("w", (3,)), "rank": rank()}, no_dist=True).world_size


def test_one_rank_saves_alone_while_the_others_do_nothing(jobs, disk_path):
    path = disk_path / "ckpt"
    assert jobs.of(4).call(save_alone, path, ranks=[2]) == [1]
    assert_same(penstock.load(path), {"w": values("w", (3,)), "rank": 2})
    # They still save together.
    jobs.of(4).call(save_stage, disk_path / "next")


def save_in_group(root):
    group = dist.new_group([3, 1])
    if rank() not in (1, 3):
        with pytest.raises(ValueError, match="not in process_group"):
            penstock.save(root / "none", {}, process_group=group)
        return None
    rows = sharded("pair", Layout([1, 3], [Shard(0)], (7, 3)))
    store = penstock.CheckpointStore(root, process_group=group)
    report = store.save(5, {"rows": rows, "rank": rank()})
    one = cleared({"rows": rows, "rank": 0})
    store.load(into=one)
    assert local_bytes(one["rows"]) == local_bytes(rows)
    assert one["rank"] == rank()
    return report.world_size


def test_a_group_of_ranks_saves_without_the_others(jobs, disk_path):
    # The mesh is of these ranks, but all ranks have to take part in making it.
    jobs.of(4).call(make_mesh)
    assert jobs.of(4).call(save_in_group, disk_path) == [None, 2, None, 2]
    loaded = penstock.CheckpointStore(disk_path).load()
    assert_same(loaded["rows"], values("pair", (7, 3)))


def make_mesh():
    sharded("pair", Layout([1, 3], [Shard(0)], (7, 3)))


# Inspecting a checkpoint of many ranks.


def save_big(root):
    rows = sharded("big", Layout(LINE, [Shard(0)], (64, 512)))
    penstock.CheckpointStore(root).save(1, {"rows": rows, "step": 1, "rank": rank()})


def shard_of(path, number):
    (shard,) = path.glob(f"shard-{number:05}-*.safetensors")
    return shard


def run_cli(*arguments):
    done = forks.run(["-m", "penstock", *arguments])
    return done.returncode, done.stdout + done.stderr


def test_a_checkpoint_of_many_ranks_can_be_looked_at(jobs, disk_path):
    root = disk_path / "store"
    jobs.of(4).call(save_big, root)
    path = root / "step-0000000001"
    info = penstock.inspect(path)
    assert info.world_size == 4
    assert info.tensor_bytes == 64 * 512 * 4
    assert sum(file.bytes for file in info.files) == info.bytes
    result = penstock.verify(path)
    assert result.ok
    assert result.bytes_checked == info.bytes
    for command in (["inspect", path], ["verify", path], ["ls", root]):
        code, text = run_cli(*command)
        assert code == 0, text
    assert "rows" in run_cli("inspect", path)[1]


def test_damage_in_the_shard_of_one_rank_is_named(jobs, disk_path):
    root = disk_path / "store"
    jobs.of(4).call(save_big, root)
    path = root / "step-0000000001"
    shard = shard_of(path, 2)
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    result = penstock.verify(path)
    assert not result.ok
    assert {problem.file for problem in result.problems} == {shard.name}
    assert any("rows" in (problem.tensor or "") for problem in result.problems)
    code, text = run_cli("verify", path)
    assert code == 1
    assert "shard-00002" in text
    with pytest.raises(CorruptCheckpointError, match=shard.name):
        penstock.load(path)
    # A load that needs none of the damaged data succeeds.
    assert penstock.load(path, keys=["step", "rank"]) == {"step": 1, "rank": 0}


@pytest.mark.parametrize("kind", ["part", "shard"])
def test_a_lost_file_of_one_rank_is_named(jobs, disk_path, kind):
    root = disk_path / "store"
    jobs.of(4).call(save_big, root)
    path = root / "step-0000000001"
    (lost,) = path.glob(f"{kind}-00003*")
    lost.unlink()
    result = penstock.verify(path)
    assert not result.ok
    assert lost.name in {problem.file for problem in result.problems}
    (info,) = penstock.CheckpointStore(root).scan()
    assert info.state == "damaged"
    assert lost.name in info.reason
    with pytest.raises(CorruptCheckpointError, match=lost.name):
        penstock.load(path)


def save_over(path, step):
    """The first rank commits while the others still wait for its answer."""
    penstock.save(path, state(step), step=step, overwrite=True)


def test_what_is_replaced_goes_with_the_save_that_replaces_it(jobs, disk_path):
    path = disk_path / "ckpt"
    files = set()
    for step in range(4):
        jobs.of(4).call(save_over, path, step)
        files.add(len(list(path.iterdir())))
        assert_same(penstock.load(path, keys=["rows", "step"]), whole(step))
    assert len(files) == 1


# Damage.


def fall_back_and_come_again(root):
    """As a restarted training run that reaches the damaged step again."""
    store = store_of(root)
    into = cleared(state(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = store.load(into=into, fallback=True)
        told = [str(one.message) for one in caught if "quarantined" in str(one.message)]
    # Ranks without an error have filled their state from the damaged step.
    assert local_bytes(into["rows"]) == local_bytes(state(1)["rows"])
    assert local_bytes(loaded) == local_bytes(as_loaded(state(1)))
    store.save(2, state(2))
    again = store.load(into=cleared(state(2)))
    return loaded["step"], len(told), again["step"]


@pytest.mark.parametrize("kind", ["shard-00001", "part-00002", "manifest"])
def test_ranks_that_fell_back_come_past_the_damaged_step(jobs, disk_path, kind):
    root, job = disk_path / "store", jobs.of(4)
    for step in (1, 2):
        job.call(save_async, root, step, False)
    (file,) = (root / "step-0000000002").glob(f"{kind}*")
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    # Only the first rank does it.
    assert job.call(fall_back_and_come_again, root) == [(1, int(n == 0), 2) for n in range(4)]
    ((step, path),) = penstock.CheckpointStore(root).quarantined()
    assert (step, len(list(root.glob("damaged-*")))) == (2, 1)
    assert not penstock.verify(path).ok


# When to save.


def saves_when_due(root, steps):
    """Trains with steps of a length of the rank's own; returns the steps that it saved."""
    saved = []
    with penstock.CheckpointStore(root, save_every="auto", failures_per_hour=36_000.0) as store:
        for step in range(1, steps + 1):
            time.sleep(0.002 * (1 + 4 * (rank() == 1)))
            if store.due(step):
                store.save_async(step, state(step))
                saved.append(step)
    return saved


def test_ranks_of_different_speed_save_the_same_steps(jobs, disk_path):
    saved, *others = jobs.of(4).call(saves_when_due, disk_path / "store", 200)
    assert others == [saved] * 3
    assert len(saved) > 2


def save_and_count(root):
    """Returns the bytes that this rank wrote, and those that it knows of all ranks."""
    with penstock.CheckpointStore(root) as store:
        report = store.save(1, state(1))
    return report.bytes, report.total_bytes


def test_the_history_counts_the_bytes_of_all_ranks(jobs, disk_path):
    counted = jobs.of(4).call(save_and_count, disk_path / "store")
    total = sum(own for own, _ in counted)
    assert [known for _, known in counted] == [total, None, None, None]
    (saved,) = [one for one in history.entries(str(disk_path / "store")) if one["kind"] == "save"]
    assert (saved["bytes"], saved["ranks"]) == (total, 4)
    files = (disk_path / "store" / "step-0000000001").iterdir()
    assert sum(one.stat().st_size for one in files) == total


def goes_on_as_before(root, steps):
    """Resumes a store that the runs before have saved to; returns the steps that it saves."""
    training = penstock.Training(losses=[])
    with penstock.CheckpointStore(root, save_every="auto", failures_per_hour=36_000.0) as store:
        began = store.resume(training) or 0
        saved = []
        for step in range(began + 1, began + steps + 1):
            time.sleep(0.002)
            if store.due(step):
                store.save(step, training)
                saved.append(step)
    return saved


def test_ranks_begin_again_with_the_number_of_steps_of_the_run_before(jobs, disk_path):
    """Rank 0 alone reads the history, and all save at the same steps."""
    job = jobs.of(2)
    first, other = job.call(goes_on_as_before, disk_path / "store", 120)
    assert first == other
    again, other = job.call(goes_on_as_before, disk_path / "store", 120)
    assert again == other
    assert again
