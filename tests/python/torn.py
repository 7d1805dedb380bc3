"""Changes of every kind during the copy of a lazy save: the commit is whole, or fails.

A scene has a state and a change of it. A run saves the state lazily, makes the change at a random
moment, and compares the committed state with the state at the call. Each scene says whether its
save has to succeed (a guard, a copy at the call) or may fail.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import optim

import penstock
from penstock.errors import StateMismatchError
from threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ELEMENTS = 3 << 19
"""Elements of the largest tensor, 6 MiB: its change takes longer than the copy of a part."""


@dataclass
class Scene:
    """A state and a change of it.

    Attributes:
        state: State to save.
        change: Changes the state.
        succeeds: Whether the save has to succeed, as no change comes before a late copy.
    """

    state: Any
    change: Callable[[], object]
    succeeds: bool = False


SCENES: dict[str, Callable[[random.Random], Scene]] = {}


def scene(make: Callable[[random.Random], Scene]) -> Callable[[random.Random], Scene]:
    SCENES[make.__name__] = make
    return make


def tensors(dice: random.Random, count: int = 2) -> list[torch.Tensor]:
    """Returns tensors whose values make every kernel here change every element."""
    return [torch.full((dice.randint(ELEMENTS // 4, ELEMENTS),), 2.75) for _ in range(count)]


def parameters(dice: random.Random, count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(tensor) for tensor in tensors(dice, count)]


KERNELS: dict[str, Callable[[torch.Tensor], object]] = {
    "lgamma": torch.Tensor.lgamma_,
    "digamma": torch.Tensor.digamma_,
    "erfinv": torch.Tensor.erfinv_,
    "add": lambda tensor: tensor.add_(1),
    "zero": torch.Tensor.zero_,
    "random": torch.Tensor.normal_,
    "out": lambda tensor: torch.lgamma(tensor + 1, out=tensor),
    "copy": lambda tensor: tensor.copy_(torch.ones_like(tensor)),
    "index": lambda tensor: tensor.__setitem__(slice(None), 7.0),
    "data": lambda tensor: tensor.data.lgamma_(),
    "detached": lambda tensor: tensor.detach().lgamma_(),
    "as numpy": lambda tensor: np.multiply(tensor.numpy(), 3, out=tensor.numpy()),
}


@scene
def kernels(dice: random.Random) -> Scene:
    state = tensors(dice)
    kernel = KERNELS[dice.choice([*KERNELS])]
    return Scene(state, lambda: [kernel(tensor) for tensor in state])


@scene
def another_thread(dice: random.Random) -> Scene:
    state = tensors(dice)
    kernel = KERNELS[dice.choice([*KERNELS])]

    return Scene(state, lambda: on_threads(kernel, state))


@scene
def foreach(dice: random.Random) -> Scene:
    state = tensors(dice, 3)
    change = dice.choice(
        [
            lambda: torch._foreach_add_(state, 1),
            lambda: torch._foreach_lgamma_(state),
            lambda: torch._foreach_lerp_(state, [torch.ones_like(one) for one in state], 0.1),
        ]
    )
    return Scene(state, change)


@scene
def views(dice: random.Random) -> Scene:
    base = torch.full((4, ELEMENTS // 2), 2.75)
    return Scene({"t": base.t(), "row": base[1:3]}, lambda: base[2].lgamma_())


@scene
def replaced(dice: random.Random) -> Scene:
    state = parameters(dice)

    def change() -> None:
        for parameter in state:
            parameter.data = torch.ones(3)

    return Scene(state, change, succeeds=True)


@scene
def numpy_views(dice: random.Random) -> Scene:
    array = np.full(ELEMENTS, 2.75, np.float32)
    return Scene([torch.from_numpy(array)], lambda: np.exp(array, out=array))


@scene
def arrays(dice: random.Random) -> Scene:
    array = np.full(ELEMENTS, 2.75, np.float32)
    state = [array, torch.from_numpy(array[100:])]
    return Scene(state, lambda: np.exp(array, out=array), succeeds=True)


@scene
def inference_tensors(dice: random.Random) -> Scene:
    with torch.inference_mode():
        state = [tensor * 1 for tensor in tensors(dice)]

    def change() -> None:
        with torch.inference_mode():
            for tensor in state:
                tensor.lgamma_()

    return Scene(state, change, succeeds=True)


@scene
def other_languages(dice: random.Random) -> Scene:
    state = tensors(dice)
    return Scene(
        state,
        lambda: [ctypes.memset(tensor.data_ptr(), 7, tensor.nbytes) for tensor in state],
    )


@scene
def kernel_of_the_system(dice: random.Random) -> Scene:
    """A file is read into the memory: the kernel writes, not the process."""
    (tensor,) = tensors(dice, 1)

    def change() -> None:
        with open("/dev/zero", "rb", buffering=0) as file:
            file.readinto(memoryview(tensor.numpy()).cast("B"))

    return Scene([tensor], change)


@scene
def another_process(dice: random.Random) -> Scene:
    """Memory that processes share, as in Hogwild training."""
    state = [tensor.share_memory_() for tensor in tensors(dice, 1)]
    memory = np.frombuffer(state[0].numpy(), np.float32)

    def change() -> None:
        child = os.fork()
        if child == 0:
            memory[:] = 1
            os._exit(0)
        os.waitpid(child, 0)

    return Scene(state, change, succeeds=True)


@scene
def running_statistics(dice: random.Random) -> Scene:
    norm = torch.nn.BatchNorm1d(ELEMENTS // 8)
    x = torch.randn(2, ELEMENTS // 8)
    return Scene(norm.state_dict(), lambda: norm(x))


@scene
def gradients(dice: random.Random) -> Scene:
    state = parameters(dice)

    def loss() -> torch.Tensor:
        return sum((parameter.exp() * parameter.cos()).sum() for parameter in state)

    loss().backward()
    return Scene([one.grad for one in state], lambda: loss().backward())


@scene
def averages(dice: random.Random) -> Scene:
    model = torch.nn.Linear(1500, 1500)
    average = optim.swa_utils.AveragedModel(
        model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(model)
    torch.nn.init.ones_(model.weight)
    return Scene(average.state_dict(), lambda: average.update_parameters(model))


class ScheduleFree(optim.Optimizer):
    """Like a schedule-free optimizer: parameters move between two points."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(z, 0.1)
                    z.sub_(parameter.grad, alpha=group["lr"])
                    parameter.data.add_(parameter.grad, alpha=-0.01)

    def switch(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.lerp_(self.state[parameter]["z"], 0.5)


class Foreign:
    """An optimizer that is not a subclass of PyTorch's."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters]

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.data.add_(momentum, alpha=-0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self.momenta}


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam fused": lambda p: optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "asgd": optim.ASGD,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": optim.RMSprop,
    "rprop": optim.Rprop,
    "schedule-free": ScheduleFree,
    "foreign": Foreign,
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3),
}


def stepped(dice: random.Random, kind: str, *, is_guarded: bool, has_closure: bool) -> Scene:
    """Steps an optimizer over parameters and its own state."""
    weights = parameters(dice)
    optimizer = OPTIMIZERS[kind](weights)

    def set_gradients() -> torch.Tensor:
        for parameter in weights:
            parameter.grad = torch.full_like(parameter, 0.5)
        return torch.tensor(1.0 + dice.random())

    def clear_gradients() -> None:
        for parameter in weights:
            parameter.grad = None

    has_closure |= kind == "lbfgs"
    set_gradients()
    optimizer.step(set_gradients) if has_closure else optimizer.step()
    clear_gradients() if has_closure else None
    if is_guarded:
        penstock.guard(optimizer)
    change = (lambda: optimizer.step(set_gradients)) if has_closure else optimizer.step
    state = {"weights": weights, "optimizer": optimizer.state_dict()}
    return Scene(state, change, succeeds=is_guarded)


@scene
def optimizers(dice: random.Random) -> Scene:
    kind = dice.choice([*OPTIMIZERS])
    return stepped(dice, kind, is_guarded=False, has_closure=dice.random() < 0.5)


@scene
def guarded_optimizers(dice: random.Random) -> Scene:
    kind = dice.choice([kind for kind in OPTIMIZERS if kind != "foreign"])
    return stepped(dice, kind, is_guarded=True, has_closure=dice.random() < 0.5)


@scene
def fused_closures(dice: random.Random) -> Scene:
    kind = dice.choice([kind for kind in OPTIMIZERS if "fused" in kind])
    return stepped(dice, kind, is_guarded=dice.random() < 0.5, has_closure=True)


@scene
def fused_kernels(dice: random.Random) -> Scene:
    """PyTorch's fused kernels, called without their optimizer."""
    state = tensors(dice)

    def change() -> None:
        rest = [[torch.ones_like(one) for one in state] for _ in range(2)]
        torch._fused_sgd_(
            state, rest[0], rest[1], weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip

    return Scene(state, change)


@scene
def switched_optimizers(dice: random.Random) -> Scene:
    """A guarded optimizer changes its parameters outside of its step."""
    weights = parameters(dice)
    optimizer = ScheduleFree(weights)
    penstock.guard(optimizer)
    for parameter in weights:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return Scene(weights, optimizer.switch)


@scene
def stepped_in_backward(dice: random.Random) -> Scene:
    """Each parameter has an optimizer of its own, which steps as soon as it has the gradient."""
    weights = parameters(dice)
    own = {parameter: optim.AdamW([parameter], fused=dice.random() < 0.5) for parameter in weights}
    is_guarded = dice.random() < 0.5
    for parameter, optimizer in own.items():
        if is_guarded:
            penstock.guard(optimizer)
        parameter.register_post_accumulate_grad_hook(lambda one: own[one].step())
    return Scene(
        weights,
        lambda: sum(parameter.cos().sum() for parameter in weights).backward(),
        succeeds=is_guarded,
    )


def serve(meeting: str) -> None:
    """Runs the rank that saves nothing: it joins the other rank's collectives on request."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=1, world_size=2)
    tensor, kind = torch.ones(ELEMENTS), torch.zeros(1)
    while True:
        distributed.broadcast(kind, 0)
        if kind == 0:
            return
        distributed.all_reduce(tensor) if kind == 1 else distributed.broadcast(tensor, 1)


@contextlib.contextmanager
def collectives() -> Iterator[Callable[[random.Random], Scene]]:
    """Yields a scene of two ranks, of which one saves."""
    from torch import distributed

    def make(dice: random.Random) -> Scene:
        tensor = torch.full((ELEMENTS,), 2.75)
        kind = dice.choice([1, 2])

        def change() -> None:
            distributed.broadcast(torch.full((1,), float(kind)), 0)
            distributed.all_reduce(tensor) if kind == 1 else distributed.broadcast(tensor, 1)

        return Scene([tensor], change)

    with tempfile.TemporaryDirectory() as directory:
        meeting = os.path.join(directory, "meeting")
        peer = os.fork()
        if peer == 0:
            with contextlib.suppress(BaseException):
                serve(meeting)
            os._exit(0)
        try:
            distributed.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=0, world_size=2
            )
            yield make
            distributed.broadcast(torch.zeros(1), 0)
        except BaseException:
            os.kill(peer, signal.SIGKILL)
            raise
        finally:
            distributed.destroy_process_group()
            os.waitpid(peer, 0)


def snapshot(state: Any) -> Any:
    return copy.deepcopy(state)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(equal, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return bool(torch.equal(torch.as_tensor(one).detach(), torch.as_tensor(other)))
    return bool(one == other)


def run(store: penstock.CheckpointStore, step: int, scene: Scene, dice: random.Random) -> str:
    """Saves a scene during its change; returns the outcome: whole, failed, or torn."""
    expected = snapshot(scene.state)
    pending = store.save_async(step, scene.state, lazy=True)
    if dice.random() < 0.7:
        time.sleep(dice.random() * 0.012)
    scene.change()
    error = pending.exception()
    if error is not None:
        if not isinstance(error, StateMismatchError):
            raise error
        return "refused" if scene.succeeds else "failed"
    is_whole = equal(expected, store.load(step))
    store.delete(step, force=True)
    return "whole" if is_whole else "torn"


def campaign(root: Path, saves: int, seed: int) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Runs random scenes; returns the outcomes, in all and by scene."""
    dice = random.Random(seed)
    total: Counter[str] = Counter()
    by_scene: dict[str, Counter[str]] = {}
    store = penstock.CheckpointStore(root, no_dist=True)
    with collectives() as make_collective:
        scenes = {**SCENES, "collectives": make_collective}
        for step in range(saves):
            # In turn, so that a short campaign runs all of them.
            name = [*scenes][step % len(scenes)]
            outcome = run(store, step, scenes[name](dice), dice)
            total[outcome] += 1
            by_scene.setdefault(name, Counter())[outcome] += 1
        store.close()
    return total, by_scene


def main() -> None:
    """Runs a campaign by hand, with the penstock on the path."""
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="penstock-torn-") as place:
        total, by_scene = campaign(Path(place) / "store", count, seed)
    rows = [f"{name:24} {dict(outcomes)}" for name, outcomes in sorted(by_scene.items())]
    sys.stdout.write("\n".join([f"seed {seed}: {dict(total)}", *rows, ""]))


if __name__ == "__main__":
    main()
