"""`Training`: captured, and restored so that the run continues as if it had not stopped."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import penstock
from compare import assert_same
from conftest import run_child
from penstock.checkpoint.loading import load as loading
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PenstockWarning,
    StateMismatchError,
    UnsupportedStateError,
)

torch.set_num_threads(1)


def make_model():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 4)
    )


def groups(model):
    return [
        {"params": [model[0].weight, model[4].weight], "lr": 0.02, "weight_decay": 0.1},
        {"params": [model[0].bias, model[4].bias, *model[1].parameters()], "lr": 0.005},
    ]


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(groups(model), momentum=0.9, nesterov=True),
    "sgd-plain": lambda model: torch.optim.SGD(groups(model)),
    "adam": lambda model: torch.optim.Adam(groups(model), amsgrad=True),
    "adamw": lambda model: torch.optim.AdamW(groups(model), foreach=False),
    "adamw-tensor": lambda model: torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.01), capturable=False
    ),
    "adafactor": lambda model: torch.optim.Adafactor(groups(model)),
    "rprop": lambda model: torch.optim.Rprop(groups(model)),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), history_size=3, max_iter=3),
}
SCHEDULERS = {
    "one-cycle": lambda one: lr_scheduler.OneCycleLR(one, max_lr=0.03, total_steps=30),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 20),
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0, threshold=0.5),
    "sequential": lambda one: lr_scheduler.SequentialLR(
        one,
        [lr_scheduler.LinearLR(one, total_iters=2), lr_scheduler.ExponentialLR(one, 0.9)],
        milestones=[3],
    ),
}


class Batches:
    """Shuffled batches that keep their position, as torchdata's loader does."""

    def __init__(self):
        self.epoch = self.position = 0

    def __next__(self):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))
        index = int(order[self.position])
        self.position += 1
        if self.position == len(order):
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(1_000 + index)
        return torch.randn(5, 6, generator=generator)

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class Run:
    """A training, with the loop around it."""

    def __init__(self, optimizer="adamw", scheduler="cosine", wrap=lambda model: model, seed=0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        bare = make_model()
        self.optimizer = OPTIMIZERS[optimizer](bare)
        self.model = wrap(bare)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.batches = Batches()
        self.training = penstock.Training(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.batches,
            losses=[],
        )

    def step(self):
        batch = next(self.batches) * random.uniform(0.9, 1.1) + np.random.rand() / 10

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        else:
            self.scheduler.step()
        self.training.losses.append(loss.item())

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self

    def state(self):
        return copy.deepcopy(self.training.state_dict())


def resumed(store, **kinds):
    """Resumes a fresh run, without any warning; returns the run and the step."""
    run = Run(**kinds, seed=99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = store.resume(run.training)
    return run, step


@pytest.fixture
def store(tmp_path):
    return penstock.CheckpointStore(tmp_path / "store")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_as_if_it_had_not_stopped(store, optimizer):
    run = Run(optimizer).steps(3)
    store.save(3, run.training)
    state = run.steps(4).state()
    other, step = resumed(store, optimizer=optimizer)
    assert step == 3
    assert_same(other.steps(4).state(), state)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_rates_go_on_where_they_were(store, scheduler):
    run = Run("sgd", scheduler).steps(4)
    store.save(4, run.training)
    state = run.steps(5).state()
    other, _ = resumed(store, optimizer="sgd", scheduler=scheduler)
    assert_same(other.steps(5).state(), state)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_save_in_the_background_is_of_one_moment_without_a_guard_of_the_users(store, lazy):
    run = Run()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(300, 300))]})
    run.model.register_parameter("large", run.optimizer.param_groups[-1]["params"][0])
    run.optimizer.param_groups[-1]["params"][0].grad = torch.ones(300, 300)
    run.steps(2)
    pending = store.save_async(2, run.training, lazy=lazy)
    state = run.steps(3).state()
    pending.result()
    other = Run(seed=5)
    other.model.register_parameter("large", nn.Parameter(torch.ones(300, 300)))
    other.optimizer.add_param_group({"params": [other.model.large]})
    assert store.resume(other.training) == 2
    assert_same(other.steps(3).state(), state)


def test_saving_changes_nothing_of_the_run(store):
    straight = Run().steps(4).state()
    run = Run()
    for step in range(4):
        # Also before the first step: moments created by the save would count as a step.
        store.save(step, run.training)
        run.step()
    assert_same(run.state(), straight)
    other, step = resumed(penstock.CheckpointStore(store.root))
    assert step == 3
    assert_same(other.steps(1).state(), straight)


def test_a_fresh_optimizer_takes_rates_and_moments(store):
    """`load(into=…)` cannot create missing moments, or replace rates."""
    run = Run().steps(2)
    store.save(2, run.training)
    fresh = Run(seed=4)
    before = fresh.optimizer.param_groups[0]["lr"]
    assert store.load(into=fresh.training) is fresh.training
    assert fresh.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"] != before
    assert_same(fresh.optimizer.state_dict(), run.optimizer.state_dict())


def test_what_is_stored_is_an_ordinary_state(tmp_path):
    run = Run().steps(1)
    penstock.save(tmp_path / "ckpt", run.training)
    state = penstock.load(tmp_path / "ckpt", keys=["model.*", "losses.*", "optimizer.param_*"])
    assert_same(state["model"], run.model.state_dict())
    assert state["losses"] == run.training.losses
    assert state["optimizer"]["param_groups"][0]["params"] == ["0.weight", "4.weight"]
    fresh = Run(seed=7)
    penstock.load(tmp_path / "ckpt", into=fresh.training)
    assert_same(fresh.state(), run.state())


def test_only_a_model_can_be_restored_in_part(tmp_path):
    run = Run().steps(1)
    penstock.save(tmp_path / "ckpt", run.training)
    fresh = Run(seed=7)
    bias, moments = fresh.model[0].bias.clone(), fresh.optimizer.state_dict()
    penstock.load(tmp_path / "ckpt", into=fresh.training, keys="model.0.weight")
    assert torch.equal(fresh.model[0].weight, run.model[0].weight)
    assert torch.equal(fresh.model[0].bias, bias)
    assert_same(fresh.optimizer.state_dict(), moments)
    with pytest.raises(StateMismatchError, match="only some of 'optimizer'"):
        penstock.load(tmp_path / "ckpt", into=fresh.training, keys="optimizer.state.*.exp_avg")


@pytest.mark.parametrize("way", ["compiled-to-plain", "plain-to-compiled", "inner"])
def test_a_compiled_model_has_the_names_of_the_model(store, way):
    def compiled(model):
        return torch.compile(model, backend="eager")

    def inner(model):
        model[0] = compiled(model[0])
        return model

    wrap = {"compiled-to-plain": compiled, "plain-to-compiled": None, "inner": inner}[way]
    run = Run(wrap=wrap or (lambda model: model)).steps(3)
    store.save(3, run.training)
    names = [one.name for one in penstock.inspect(store.path(3)).tensors]
    assert not any("_orig_mod" in name for name in names)
    state = run.steps(2).state()
    back = {"compiled-to-plain": lambda model: model, "plain-to-compiled": compiled, "inner": inner}
    other, _ = resumed(store, wrap=back[way])
    assert_same(other.steps(2).state(), state)
    assert list(other.training.state_dict()["model"]) == list(make_model().state_dict())


def test_versions_of_modules_go_by_the_names_of_the_model(store):
    """Modules with an old version of their state need to see the version number."""

    class Aging(nn.Module):
        _version = 3
        seen = None

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            Aging.seen = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    def wrapped():
        return nn.Sequential(torch.compile(Aging(), backend="eager"))

    for model in (wrapped(), nn.Sequential(Aging())):
        store.save(1, penstock.Training(model=model), overwrite=True)
        for other in (wrapped(), nn.Sequential(Aging()), torch.compile(wrapped(), backend="eager")):
            Aging.seen = None
            store.resume(penstock.Training(model=other))
            assert Aging.seen == 3


def test_averages_scalers_lists_and_dictionaries_of_parts(store):
    def begin(seed):
        torch.manual_seed(seed)
        models = {"one": make_model(), "other": nn.Linear(4, 2)}
        optimizers = [torch.optim.Adam(one.parameters()) for one in models.values()]
        average = torch.optim.swa_utils.AveragedModel(models["one"])
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        parts = {"models": models, "optimizers": optimizers, "average": average, "scaler": scaler}
        return penstock.Training(**parts, generators=(random.Random(seed), torch.Generator()))

    def step(training):
        models = training.models
        loss = models["other"](models["one"](torch.randn(3, 6))).square().mean()
        training.scaler.scale(loss * training.generators[0].random()).backward()
        for one in training.optimizers:
            training.scaler.step(one)
            one.zero_grad()
        training.scaler.update()
        training.average.update_parameters(models["one"])
        torch.rand(2, generator=training.generators[1])

    training, other = begin(1), begin(2)
    for _ in range(3):
        step(training)
    store.save(3, training)
    names = penstock.load(store.path(3), keys="optimizers.1.param_groups.*")
    assert names["optimizers"][0]["param_groups"][0]["params"] == ["weight", "bias"]
    store.resume(other)
    for one in (training, other):
        torch.manual_seed(7)
        step(one)
    assert_same(other.state_dict(), training.state_dict())


def test_an_optimizer_over_two_models_names_both(store):
    def begin():
        one, other = nn.Linear(2, 3), nn.Linear(3, 1)
        parameters = [*one.parameters(), *other.parameters()]
        return penstock.Training(one=one, other=other, optimizer=torch.optim.SGD(parameters))

    store.save(1, begin())
    named = penstock.load(store.path(1), keys="optimizer.param_groups.*")
    params = named["optimizer"]["param_groups"][0]["params"]
    assert params == ["one.weight", "one.bias", "other.weight", "other.bias"]
    assert store.resume(begin()) == 1


def test_an_optimizer_of_parameters_without_a_model_goes_by_their_order(store):
    def begin():
        prompt = nn.Parameter(torch.randn(3))
        return penstock.Training(prompt=prompt, optimizer=torch.optim.Adam([prompt]))

    training, fresh = begin(), begin()
    training.prompt.sum().backward()
    training.optimizer.step()
    store.save(1, training)
    own = fresh.prompt
    store.resume(fresh)
    assert own is fresh.prompt
    assert_same(own.detach(), training.prompt.detach())
    assert_same(fresh.optimizer.state_dict(), training.optimizer.state_dict())


def test_parameters_may_come_in_another_order(store):
    def begin(is_turned):
        model = nn.Linear(2, 3)
        parameters = list(model.parameters())
        parameters = parameters[::-1] if is_turned else parameters
        return penstock.Training(model=model, optimizer=torch.optim.Adam(parameters))

    training, fresh = begin(False), begin(True)
    training.model(torch.ones(2)).sum().backward()
    training.optimizer.step()
    store.save(1, training)
    store.resume(fresh)
    for name in ("weight", "bias"):
        stored = training.optimizer.state[getattr(training.model, name)]
        assert_same(fresh.optimizer.state[getattr(fresh.model, name)], stored)


class WideSGD(torch.optim.Optimizer):
    """Momentum in 32 bits and in 8, for parameters in 16, as optimizers of large models have it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["wide"] = torch.zeros(parameter.shape)
                state["count"] = torch.zeros((2,), dtype=torch.int8)
            state["wide"].mul_(0.9).add_(torch.full(parameter.shape, 1 / 3))
            state["count"] += 1
            parameter.sub_(state["wide"].to(parameter.dtype), alpha=0.1)


def test_moments_keep_their_types_where_pytorch_casts_them(store):
    def begin():
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
        return penstock.Training(model=model, optimizer=WideSGD(model.parameters()))

    training, fresh = begin(), begin()
    training.optimizer.step()
    store.save(1, training)
    store.resume(fresh)
    for one in (training, fresh):
        one.optimizer.step()
    assert_same(fresh.state_dict()["optimizer"], training.state_dict()["optimizer"])


def test_arrays_are_filled_in_place_and_need_no_torch(tmp_path):
    assert (
        run_child(
            """
        import json, sys
        import numpy as np, penstock
        def begin():
            rng = np.random.default_rng(3)
            return penstock.Training(w=np.zeros(3), layers={"b": np.zeros(2)}, rng_own=rng, log=[])
        training = begin()
        training.w += training.rng_own.random(3)
        training.layers["b"][:] = 5
        training.log.append("first")
        store = penstock.CheckpointStore(sys.argv[1])
        store.save(1, training)
        fresh = begin()
        w, b, log = fresh.w, fresh.layers["b"], fresh.log
        step = store.resume(fresh)
        same = [w is fresh.w, (w == training.w).all(), (b == 5).all(), log == ["first"]]
        next = training.rng_own.random() == fresh.rng_own.random()
        numbers = [np.random.rand() for _ in range(2) if not store.resume(begin()) is None]
        same += [next, numbers[0] == numbers[1], step == 1, "torch" not in sys.modules]
        print(json.dumps([bool(one) for one in same]))
        """,
            tmp_path,
            is_fresh=True,
        )
        == [True] * 8
    )


# Warnings and errors.


def test_an_empty_store_is_a_new_run(store):
    run = Run()
    before = run.state()
    assert store.resume(run.training) is None
    assert_same(run.state(), before)


def damage(store, step):
    """Flips a bit of a shard."""
    (shard,) = (path for path in _files(store, step) if path.suffix == ".safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def _files(store, step):
    from pathlib import Path

    return sorted(Path(store.path(step)).iterdir())


def test_it_falls_back_past_what_is_damaged_and_says_so(store):
    run = Run()
    states = {}
    for step in range(1, 5):
        run.step()
        store.save(step, run.training)
        states[step] = run.state()
    damage(store, 4)
    _, manifest = (path for path in _files(store, 3) if path.suffix == ".json")
    manifest.write_text("{}")
    other = Run(seed=3)
    reports = []
    with pytest.warns(PenstockWarning) as told:
        assert store.resume(other.training, report=reports.append) == 2
    found = [str(one.message).partition(" for an older one")[0] for one in told]
    assert found == ["step 4 is passed over", "step 3 is passed over"]
    assert [step for step, _ in reports[0].skipped] == [4, 3]
    assert_same(other.state(), states[2])


def test_a_step_that_is_gone_when_it_is_read_is_told(store, monkeypatch):
    """As on a host with a stale view of the directory."""
    run = Run()
    for step in (1, 2):
        store.save(step, run.steps(1).training)
    read = loading.read

    def lagging(path, *arguments):
        if path == store.path(2):
            raise CheckpointNotFoundError("no checkpoint there", path=path)
        return read(path, *arguments)

    monkeypatch.setattr(loading, "read", lagging)
    with pytest.warns(PenstockWarning, match="step 2 is passed over.*not to be seen"):
        assert store.resume(Run(seed=3).training) == 1


def test_no_good_step_is_an_error_and_leaves_the_training_alone(store):
    run = Run().steps(1)
    store.save(1, run.training)
    damage(store, 1)
    other = Run(seed=3)
    before = other.state()
    with (
        pytest.warns(PenstockWarning, match="passed over"),
        pytest.raises(CorruptCheckpointError, match="no step of"),
    ):
        store.resume(other.training)
    assert_same(other.state(), before)


def test_a_step_that_was_set_aside_is_no_reason_to_begin_anew(store):
    store.save(5, Run().steps(1).training)
    damage(store, 5)
    store.verify(5)
    path = store.quarantine(5)
    with pytest.raises(CorruptCheckpointError, match="quarantined as damaged") as caught:
        store.resume(Run(seed=3).training)
    assert path in str(caught.value)


def test_a_part_that_one_side_lacks_is_named(store):
    run = Run().steps(1)
    store.save(1, run.training)
    fresh = Run(seed=3)
    parts = {"model": fresh.model, "optimizer": fresh.optimizer, "ema": nn.Linear(1, 1)}
    training = penstock.Training(**parts)
    before = fresh.state()
    with pytest.raises(StateMismatchError) as caught:
        store.resume(training)
    for text in ("'ema' is in the training, not", "'scheduler' is in the checkpoint", "strict="):
        assert text in str(caught.value)
    assert caught.value.key == "ema"
    assert_same(fresh.state(), before)
    assert store.resume(training, strict=False) == 1
    assert_same(fresh.model.state_dict(), run.model.state_dict())
    with pytest.raises(StateMismatchError, match="'scheduler' is in the checkpoint"):
        store.load(into=training)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.append(nn.Linear(4, 4)), "5.weight is in the model, not in the check"),
        (lambda model: model.pop(4), "4.weight is in the checkpoint, not in the model"),
        (lambda model: model.__setitem__(0, nn.Linear(6, 9)), r"0.weight: shape \[8, 6\] in the"),
        (lambda model: model.double(), "0.weight: dtype torch.float32 in the checkpoint"),
    ],
)
def test_another_model_is_refused_before_anything_changes(store, change, text):
    run = Run().steps(1)
    store.save(1, run.training)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    change(model)
    training = penstock.Training(model=model, optimizer=optimizer)
    before = copy.deepcopy(training.state_dict())
    with pytest.raises(StateMismatchError, match=text):
        store.resume(training, strict=False)
    assert_same(training.state_dict(), before)


def test_another_optimizer_is_refused_before_anything_changes(store):
    run = Run().steps(1)
    store.save(1, run.training)
    for make, text in [
        (lambda model: torch.optim.AdamW(model.parameters()), "2 parameter groups in the"),
        (lambda model: torch.optim.AdamW(groups(model)[::-1]), "group 0 has 2 parameters in the"),
        (
            lambda model: torch.optim.AdamW(
                [
                    {"params": [model[0].weight, model[0].bias]},
                    {"params": [model[4].weight, model[4].bias, *model[1].parameters()]},
                ]
            ),
            "group 0 has '4.weight' in the checkpoint, not",
        ),
    ]:
        model = make_model()
        training = penstock.Training(model=model, optimizer=make(model), rng=False)
        before = copy.deepcopy(training.state_dict())
        with pytest.raises(StateMismatchError, match=text):
            store.resume(training, strict=False)
        assert_same(training.state_dict(), before)


def test_a_part_that_refuses_its_state_is_named_with_what_was_restored(store):
    class Fussy(Batches):
        def load_state_dict(self, state):
            raise KeyError("shard")

    run = Run().steps(1)
    store.save(1, run.training)
    fresh = Run(seed=3)
    fresh.training.loader = Fussy()
    with pytest.raises(
        StateMismatchError,
        match="'loader' has refused its state, after model, optimizer, scheduler: KeyError",
    ):
        store.resume(fresh.training)


def test_a_state_that_was_kept_in_memory_brings_it_back():
    run = Run().steps(2)
    run.training.losses = {"first": [0.5], "seen": {1, 2}}
    kept = run.state()
    run.training.losses = []
    run.steps(2)
    run.training.losses = {"first": [], "seen": set()}
    run.training.load_state_dict(kept)
    assert_same(run.state(), kept)
    # Its own state, too.
    run.training.load_state_dict(run.training.state_dict())
    assert_same(run.state(), kept)


def test_a_generator_of_another_kind_is_refused(store):
    store.save(1, penstock.Training(own=np.random.Generator(np.random.PCG64(1))))
    training = penstock.Training(own=np.random.Generator(np.random.Philox(1)))
    with pytest.raises(StateMismatchError, match="PCG64 in the checkpoint, Philox in the"):
        store.resume(training)


def test_a_value_may_be_called_self():
    training = penstock.Training(self=1)
    assert training.self == 1
    assert "self" in training.state_dict()


def test_what_cannot_be_saved_is_refused_when_it_is_given():
    loader = torch.utils.data.DataLoader([1, 2, 3], shuffle=True)
    with pytest.raises(UnsupportedStateError, match="does not know its place"):
        penstock.Training(loader=loader)
    with pytest.raises(UnsupportedStateError, match="callback"):
        penstock.Training(callback=print)
    with pytest.raises(UnsupportedStateError, match="model: "):
        penstock.Training(model=nn.Linear)
    with pytest.raises(UnsupportedStateError, match=r"own: .*SystemRandom"):
        penstock.Training(own=random.SystemRandom())
    with pytest.raises(TypeError, match="has none"):
        penstock.Training(parts=[nn.Linear(1, 1), 3])
    with pytest.raises(TypeError, match="another name"):
        penstock.Training(rng=np.random.default_rng())
    for name in ("state_dict", "_hidden", "a.b"):
        with pytest.raises(TypeError, match="cannot have this name"):
            penstock.Training(**{name: 1})
    training = penstock.Training(epoch=0)
    with pytest.raises(AttributeError, match="epcoh=…"):
        training.epcoh = 1
    with pytest.raises(AttributeError, match="has no 'step'"):
        training.step  # noqa: B018
    with pytest.raises(TypeError, match=r"is no penstock\.Training"):
        penstock.CheckpointStore("x").resume({"epoch": 0})


def test_random_states_of_devices_that_are_not_here_are_told(store, monkeypatch):
    """This machine may lack the device: its module is a stand-in."""

    class Devices:
        def __init__(self, count):
            self.states = [
                torch.full((16,), index + 1, dtype=torch.uint8) for index in range(count)
            ]

        def is_initialized(self):
            return True

        def is_available(self):
            return True

        def device_count(self):
            return len(self.states)

        def get_rng_state(self, index):
            return self.states[index].clone()

        def set_rng_state(self, state, index):
            self.states[index] = state

    monkeypatch.setattr(torch, "cuda", Devices(2))
    store.save(1, penstock.Training())
    fewer, more, same = Devices(1), Devices(3), Devices(2)
    for devices in (fewer, more, same):
        devices.states = [torch.zeros(16, dtype=torch.uint8) for _ in devices.states]
    for devices, count in ((fewer, 1), (more, 3)):
        monkeypatch.setattr(torch, "cuda", devices)
        with pytest.warns(PenstockWarning, match=f"of 2 cuda devices, and .* {count} "):
            assert store.resume(penstock.Training()) == 1
    monkeypatch.setattr(torch, "cuda", same)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.resume(penstock.Training())
    assert [state[0].item() for state in fewer.states] == [1]
    assert [state[0].item() for state in more.states] == [1, 2, 0]
    assert [state[0].item() for state in same.states] == [1, 2]


class Counted(nn.Module):
    """A module with extra state beside its parameters."""

    def __init__(self, extra):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("fresh", "stored"),
    [
        (None, torch.ones(3)),
        (torch.ones(3), None),
        (torch.empty(0), torch.arange(40, dtype=torch.uint8)),
        (torch.ones(2), torch.ones(3)),
        ({"amax": []}, {"amax": [torch.ones(2)], "scale": torch.ones(1)}),
    ],
)
def test_what_a_module_keeps_for_itself_may_have_any_shape(store, fresh, stored, is_strict):
    store.save(1, penstock.Training(model=nn.Sequential(Counted(stored))))
    training = penstock.Training(model=nn.Sequential(Counted(fresh)))
    assert store.resume(training, strict=is_strict) == 1
    assert_same(training.model[0].extra, stored)
    # The stored value itself, not a copy into the old one.
    assert fresh is None or training.model[0].extra is not fresh


STEPPED = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def stepped(kind, width=4):
    model = nn.Linear(width, width)
    optimizer = STEPPED[kind](model.parameters())
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("sgd", "adamw"),
        ("adamw", "sgd"),
        ("adam", "nadam"),
        ("adagrad", "sgd"),
        ("rmsprop", "adam"),
        ("adam", "rmsprop"),
    ],
)
def test_an_optimizer_of_another_class_is_refused_before_anything_changes(store, kind, saved):
    model, optimizer = stepped(saved)
    store.save(1, penstock.Training(model=model, optimizer=optimizer))
    model, optimizer = stepped(kind)
    training = penstock.Training(model=model, optimizer=optimizer)
    before = copy.deepcopy(training.state_dict())
    with pytest.raises(StateMismatchError, match=r"nothing was changed.*another class"):
        store.resume(training)
    assert_same(training.state_dict(), before)
    optimizer.step()


@pytest.mark.parametrize(("kind", "saved"), [("sgd", "adamw"), ("adamw", "sgd")])
@pytest.mark.parametrize("has_parameters", [True, False])
def test_so_it_is_where_parameters_go_by_their_order(store, kind, saved, has_parameters):
    def made(kind):
        return stepped(kind)[1] if has_parameters else STEPPED[kind]([{"params": []}])

    store.save(1, penstock.Training(optimizer=made(saved)))
    training = penstock.Training(optimizer=made(kind))
    before = copy.deepcopy(training.state_dict())
    with pytest.raises(StateMismatchError, match=r"nothing was changed.*another class"):
        store.resume(training)
    assert_same(training.state_dict(), before)
    training.optimizer.step()


def test_settings_that_versions_and_loops_add_are_no_other_class(store):
    model, optimizer = stepped("adamw")
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    group = optimizer.param_groups[0]
    group["step"] = 7  # As other libraries' fused optimizers count steps.
    group["new_switch"] = False
    del group["foreach"], group["decoupled_weight_decay"]
    store.save(1, penstock.Training(model=model, optimizer=optimizer))
    model, optimizer = stepped("adamw")
    assert store.resume(penstock.Training(model=model, optimizer=optimizer)) == 1
    assert optimizer.param_groups[0]["step"] == 7
    optimizer.step()


def test_moments_of_other_shapes_are_refused_without_a_model_too(store):
    store.save(1, penstock.Training(optimizer=stepped("adam", 8)[1]))
    training = penstock.Training(optimizer=stepped("adam", 4)[1])
    before = copy.deepcopy(training.state_dict())
    with pytest.raises(StateMismatchError, match=r"exp_avg of 0 has shape \[8, 8\]"):
        store.resume(training)
    assert_same(training.state_dict(), before)


# Tensors that cannot be copied into.


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.register_buffer("mask", mask)


def inferred(count):
    with torch.inference_mode():
        return torch.ones(count)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (lambda: torch.ones(1).expand(3), r"mask is expanded.*\.clone\(\)"),
        (lambda: inferred(3), "mask is of inference mode"),
        (lambda: torch.ones(3, device="meta"), r"mask is on the meta device.*to_empty"),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_changes(store, mask, text):
    store.save(1, penstock.Training(model=Masked(torch.arange(3.0)), epoch=4))
    training = penstock.Training(model=Masked(mask()), epoch=0)
    before = training.model.first.weight.clone()
    with pytest.raises(StateMismatchError, match=f"nothing was changed: model: {text}"):
        store.resume(training)
    assert training.epoch == 0
    assert torch.equal(training.model.first.weight, before)
    training.model = Masked(torch.zeros(3))
    assert store.resume(training) == 1
    assert training.model.mask.tolist() == [0, 1, 2]


def test_what_was_saved_expanded_comes_back(store):
    store.save(1, penstock.Training(mask=torch.ones(1).expand(3), more=[torch.ones(1).expand(2)]))
    training = penstock.Training(mask=torch.zeros(1).expand(3), more=[torch.zeros(1).expand(2)])
    assert store.resume(training) == 1
    assert training.mask.tolist() == [1, 1, 1]
    assert training.more[0].tolist() == [1, 1]


# Missing random states.


@pytest.mark.parametrize("ways", ["resume", "load"])
def test_of_a_checkpoint_without_random_states_the_way_out_is_named_and_works(tmp_path, ways):
    store = penstock.CheckpointStore(tmp_path)
    store.save(1, penstock.Training(rng=False, w=np.ones(3), epoch=4))

    def restored(training, **arguments):
        if ways == "resume":
            assert store.resume(training, **arguments) == 1
        else:
            penstock.load(store.path(1), into=training)
        return training.epoch

    whole = penstock.Training(w=np.zeros(3), epoch=0)
    with pytest.raises(StateMismatchError, match=r"Training\(rng=False, …\)") as raised:
        restored(whole)
    assert "strict=False" in str(raised.value)
    assert (raised.value.key, whole.epoch) == ("rng", 0)
    assert restored(penstock.Training(rng=False, w=np.zeros(3), epoch=0)) == 4
    if ways == "resume":
        assert restored(whole, strict=False) == 4
