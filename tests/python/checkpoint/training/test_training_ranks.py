"""`Training` on many ranks: DDP and FSDP2, damage on one rank, other numbers of ranks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import penstock
from compare import assert_same
from parallel import gathered
from penstock.checkpoint.loading import load as loading
from penstock.checkpoint.loading import load_plan, matching
from penstock.checkpoint.steps.fallback import FallbackSearch
from penstock.checkpoint.training import filling
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PenstockWarning,
    RankError,
    StateMismatchError,
)
from penstock.tensors import memory

KINDS = ["ddp", "ddp+compiled", "fsdp"]
_meshes = {}


def wrap(model, kind):
    if kind == "plain":
        return model
    if kind == "fsdp":
        if "mesh" not in _meshes:
            _meshes["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=_meshes["mesh"])
        return fully_shard(model, mesh=_meshes["mesh"])
    if kind == "ddp+compiled":
        model = torch.compile(model, backend="eager")
    return nn.parallel.DistributedDataParallel(model)


class Run:
    def __init__(self, kind, seed=0, optimizer="adamw"):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 3))
        self.model = wrap(model, kind)
        make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
        more = {"momentum": 0.9} if optimizer == "sgd" else {"amsgrad": True}
        self.optimizer = make(self.model.parameters(), lr=0.01, **more)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 9)
        self.average = torch.zeros(300)
        self.training = penstock.Training(
            # Not in the order of their dependencies.
            optimizer=self.optimizer,
            model=self.model,
            scheduler=self.scheduler,
            average=penstock.PerRank(self.average),
            step=0,
        )
        # Each rank draws its own dropout.
        torch.manual_seed(seed + 1 + (dist.get_rank() if dist.is_initialized() else 0))

    def step(self, batch=None):
        self.training.step += 1
        batch = torch.randn(4, 6) if batch is None else batch
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average += loss.item()

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self

    def whole(self):
        """Returns model and optimizer with whole tensors."""
        state = self.training.state_dict()
        return copy.deepcopy(gathered({name: state[name] for name in ("model", "optimizer")}))

    def own(self):
        """Returns this rank's values; for `DTensor`s, its local part."""

        def local(value):
            if isinstance(value, DTensor):
                return value.detach().to_local().clone()
            if isinstance(value, torch.Tensor):
                return value.detach().clone()
            if isinstance(value, dict):
                return {key: local(one) for key, one in value.items()}
            if isinstance(value, list | tuple):
                return [local(one) for one in value]
            return local(value.value) if isinstance(value, penstock.PerRank) else value

        return local(self.training.state_dict())


def save(root, kind, optimizer="adamw", further=3):
    run = Run(kind, optimizer=optimizer).steps(3)
    store = penstock.CheckpointStore(root)
    store.save(2, run.training)
    store.save(3, run.training)
    whole = run.whole()
    return whole, run.steps(further).own()


def resume(root, kind, optimizer="adamw", further=3):
    run = Run(kind, seed=50, optimizer=optimizer)
    average = run.average
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PenstockWarning)
        step = penstock.CheckpointStore(root).resume(run.training)
    assert run.training.average.value is average
    whole = run.whole()
    texts = [str(one.message) for one in told if one.category is PenstockWarning]
    return step, texts, whole, run.steps(further).own()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_as_if_they_had_not_stopped(jobs, disk_path, kind, optimizer):
    saved = jobs.of(2).call(save, disk_path, kind, optimizer)
    resumed = jobs.of(2).call(resume, disk_path, kind, optimizer)
    for (_, state), (step, told, _, found) in zip(saved, resumed, strict=True):
        assert (step, told) == (3, [])
        assert_same(found, state)
    assert_same(resumed[0][2], saved[0][0])


@pytest.mark.parametrize(
    ("saved_as", "ranks", "resumed_as", "others"),
    [
        ("ddp", 2, "plain", 1),
        ("plain", 1, "ddp", 2),
        ("fsdp", 2, "plain", 1),
        ("plain", 1, "fsdp", 2),
        ("fsdp", 2, "fsdp", 4),
        ("fsdp", 4, "ddp", 2),
    ],
)
def test_any_number_goes_on_with_what_any_number_saved(
    jobs, disk_path, saved_as, ranks, resumed_as, others
):
    def call(function, count, kind):
        if count == 1:
            return [function(disk_path, kind)]
        return jobs.of(count).call(function, disk_path, kind)

    whole, _ = call(save, ranks, saved_as)[0]
    for rank, (step, told, found, _) in enumerate(call(resume, others, resumed_as)):
        assert step == 3
        # Warned once for all ranks.
        saved_by = "1 rank" if ranks == 1 else f"{ranks} ranks"
        go_on = "1 goes" if others == 1 else f"{others} go"
        left = {
            (2, 1): "those of rank 1 are left out",
            (1, 2): "rank 1 gets those of rank 0 as well",
            (2, 4): "ranks 2 to 3 get those of the first ones as well",
            (4, 2): "those of ranks 2 to 3 are left out",
        }[ranks, others]
        said = [f"{saved_by} saved it and {go_on} on" in one and left in one for one in told]
        assert said == ([True] if rank == 0 else [])
        assert_same(found, whole)


def resume_of_one(root, kind, broken_rank):
    """One rank's loader refuses its state; the others must not resume without it."""

    class Fussy:
        def state_dict(self):
            return {"place": 1}

        def load_state_dict(self, state):
            if dist.get_rank() == broken_rank:
                raise KeyError("place")

    store = penstock.CheckpointStore(root, options=penstock.Options(rank_timeout_seconds=20))
    training = penstock.Training(model=nn.Linear(2, 2), loader=Fussy())
    store.save(1, training)
    store.resume(training)


def test_all_ranks_restore_or_all_raise(jobs, disk_path):
    other, own = jobs.of(2).outcomes(resume_of_one, disk_path, "plain", 1)
    assert isinstance(own, StateMismatchError)
    assert "'loader' has refused its state, after model" in str(own)
    assert isinstance(other, RankError)
    assert "another rank could not restore" in str(other)


def damage(root, step, rank):
    """Flips a bit in one rank's data."""
    store = penstock.CheckpointStore(root, no_dist=True)
    info = penstock.inspect(store.path(step))
    (name, *_) = [
        one.name
        for one in info.files
        if one.name.endswith(".safetensors") and f"{rank:05}" in one.name
    ]
    path = f"{store.path(step)}/{name}"
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_one_rank_finds_damaged_all_pass_over(jobs, disk_path, kind):
    saved = jobs.of(2).call(save, disk_path, kind)
    damage(disk_path, 3, 1)
    resumed = jobs.of(2).call(resume, disk_path, kind)
    for (_, state), (step, told, _, found) in zip(saved, resumed, strict=True):
        assert step == 2
        assert len(told) == 1
        assert "step 3 is passed over" in told[0]
        assert_same(found, state)


def start_anew(root):
    training = Run("ddp").training
    return penstock.CheckpointStore(root).resume(training)


def test_ranks_agree_that_there_is_nothing_to_resume(jobs, disk_path):
    assert jobs.of(2).call(start_anew, disk_path) == [None, None]


def resume_as_other(root):
    """The layout of a moment whose shape differs from its parameter's is unknown."""
    run = Run("fsdp", optimizer="sgd").steps(1)
    for parameter, state in run.optimizer.state.items():
        if parameter.dim() == 2:
            state["row"] = DTensor.from_local(torch.ones(2), parameter.device_mesh)
    store = penstock.CheckpointStore(root)
    store.save(1, run.training)
    fresh = Run("fsdp", seed=3, optimizer="sgd")
    with pytest.raises(StateMismatchError, match="has another shape than its parameter"):
        store.resume(fresh.training)
    fresh = Run("fsdp", seed=3, optimizer="sgd").steps(1)
    for parameter, state in fresh.optimizer.state.items():
        if parameter.dim() == 2:
            state["row"] = DTensor.from_local(torch.zeros(2), parameter.device_mesh)
    return store.resume(fresh.training), run.own(), fresh.own()


def test_moments_that_nobody_can_place_are_refused_by_name(jobs, disk_path):
    for step, expected, found in jobs.of(2).call(resume_as_other, disk_path):
        assert step == 1
        assert_same(found, expected)


def written_by_a_refused_resume(root):
    """The load itself writes to memory of another device; "meta" stands in for it."""
    store = penstock.CheckpointStore(root)
    model = Run("fsdp").model
    # Without moments, for which no memory exists yet.
    optimizer = torch.optim.SGD(model.parameters())
    store.save(1, penstock.Training(model=model, optimizer=optimizer))
    with torch.device("meta"):
        model = wrap(nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 3)), "fsdp")
    optimizer = torch.optim.SGD([{"params": [one]} for one in model.parameters()])
    training = penstock.Training(model=model, optimizer=optimizer)
    written = []

    def of_tensor(tensor, name):
        names = {torch.float32: ("float32", 4)}
        if tensor.is_meta:
            return memory._without_address(tensor, *names[tensor.dtype])
        return memory.of_tensor(tensor, name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (matching, load_plan):
            patch.setattr(module, "of_tensor", of_tensor)
        for module in (filling, load_plan):
            patch.setattr(module, "copy_elements", lambda value, _: written.append(value.device))
        patch.setattr(DTensor, "is_meta", False)
        with pytest.raises(StateMismatchError, match=r"nothing was changed.* groups in"):
            store.resume(training, strict=False)
    return written


def test_what_lies_on_a_device_is_not_written_before_all_is_compared(jobs, disk_path):
    assert jobs.of(2).call(written_by_a_refused_resume, disk_path) == [[], []]


def save_after_a_forward(root):
    """After a forward without a backward, the root of a sharded model has whole parameters."""
    run = Run("fsdp").steps(1)
    store = penstock.CheckpointStore(root)
    store.save(1, run.training)
    with torch.no_grad():
        run.model(torch.ones(1, 6))
    store.save(2, run.training)
    with torch.no_grad():
        run.model(torch.ones(1, 6))
    fresh = Run("fsdp", seed=9)
    with torch.no_grad():
        fresh.model(torch.ones(1, 6))
    step = store.resume(fresh.training)
    return step, run.whole(), fresh.whole()


def test_a_sharded_model_that_was_only_looked_at_is_saved_and_restored(jobs, disk_path):
    for step, expected, found in jobs.of(2).call(save_after_a_forward, disk_path):
        assert step == 2
        assert_same(found, expected)
    names = {one.name for one in penstock.inspect(disk_path / "step-0000000002").tensors}
    assert {one.name for one in penstock.inspect(disk_path / "step-0000000001").tensors} == names


def resume_with_a_step_out_of_sight(root):
    """Rank 1 does not find the only step."""
    store = penstock.CheckpointStore(root)
    store.save(5, Run("ddp").training)

    def read(path, *_):
        raise CheckpointNotFoundError(f"{path} is not there", path=path)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dist.get_rank() == 1:
            patch.setattr(loading, "read", read)
        return store.resume(Run("ddp").training)


def test_no_rank_begins_anew_where_another_finds_a_step(jobs, disk_path):
    found = jobs.of(2).outcomes(resume_with_a_step_out_of_sight, disk_path)
    assert [type(one) for one in found] == [CorruptCheckpointError] * 2


def fail_between_the_rounds(root, is_resumed):
    """Rank 0 fails after a step is found, and before all ranks have restored it."""
    store = penstock.CheckpointStore(root, options=penstock.Options(rank_timeout_seconds=600))
    training = penstock.Training(model=nn.Linear(2, 2))
    store.save(1, training)

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(
                *((FallbackSearch, "_quarantine") if is_resumed else (loading, "read")), fail
            )
        try:
            if is_resumed:
                store.resume(training)
            else:
                store.load(into=training)
        except (penstock.PenstockError, KeyboardInterrupt) as error:
            return type(error)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_who_fails_after_a_step_is_found_is_not_waited_for(jobs, disk_path, is_resumed):
    found = jobs.of(2).call(fail_between_the_rounds, disk_path, is_resumed)
    assert found == [KeyboardInterrupt, RankError]


def save_random_states(path):
    penstock.save(path, penstock.Training())


def test_one_process_warns_of_another_number_of_ranks_before_all_have_a_group(
    jobs, disk_path, monkeypatch
):
    jobs.of(2).call(save_random_states, disk_path / "ckpt")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            penstock.load(disk_path / "ckpt", into=penstock.Training())
        messages = [str(one.message) for one in told if "2 ranks saved it" in str(one.message)]
        assert len(messages) == (rank == 0)
