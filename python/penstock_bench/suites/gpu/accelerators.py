"""The device of tensors: a GPU by PyTorch, or the driver for tests, which PyTorch does not know."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.common.machine import gpus
from penstock_bench.harness.options import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGE_ITEMS, _SMALL_ITEMS, _SMALL_TENSORS = 16 << 20, 1 << 10, 64
_LARGE_PART = 4
"""The least number of large tensors in a state."""

State = dict[str, Any]


class NoGpuError(Exception):
    """There is no GPU to measure on; the text says what there is."""


class Accelerator:
    """The first GPU of PyTorch. Tensors that it makes have numbers of four bytes."""

    is_stand_in = False

    def put(self, host: torch.Tensor) -> Any:
        """A tensor with the content of one of the host."""
        return host.to("cuda:0")

    def full(self, items: int, value: float) -> Any:
        """A tensor of so many numbers, all the same."""
        return torch.full((items,), value, device="cuda:0")

    def empty(self, items: int) -> Any:
        """A tensor of so many numbers."""
        return torch.empty(items, device="cuda:0")

    def is_full(self, tensor: Any, items: int, value: float) -> bool:
        """Whether it is a tensor of so many numbers, all the same."""
        return tensor.is_cuda and tensor.shape == (items,) and bool((tensor == value).all())

    def fill(self, tensor: Any, value: float) -> None:
        """Queues that all items become a value, which PyTorch counts as a change."""
        tensor.fill_(value)

    def read(self, tensor: Any) -> torch.Tensor:
        """The content, on the host."""
        host: torch.Tensor = tensor.cpu()
        return host

    def synchronize(self) -> None:
        """Waits for everything that is queued."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """Returns PyTorch's cached memory to the device, for other processes."""
        torch.cuda.empty_cache()

    def capture(self) -> None:
        """Captures a graph."""
        values = torch.ones(1024, device="cuda:0")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = values * 2
        graph.replay()
        if doubled[0].item() != 2.0:
            raise RuntimeError("the graph does something else than it was captured for")


class _StandIn(Accelerator):
    """A device of the driver for tests, by tensors that pass for those of a GPU."""

    is_stand_in = True

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu

    def put(self, host: torch.Tensor) -> Any:
        return self._gpu.put(host.clone())

    def full(self, items: int, value: float) -> Any:
        return self._gpu.put(torch.full((items,), value))

    def empty(self, items: int) -> Any:
        return self._gpu.put(torch.empty(items))

    def is_full(self, tensor: Any, items: int, value: float) -> bool:
        return tensor.shape == (items,) and bool((self.read(tensor) == value).all())

    def fill(self, tensor: Any, value: float) -> None:
        self._gpu.change(tensor, torch.full(tensor.shape, value, dtype=tensor.dtype))

    def read(self, tensor: Any) -> torch.Tensor:
        read: torch.Tensor = self._gpu.read(tensor)
        return read

    def synchronize(self) -> None:
        """Also lets go of tensors that changes came from."""
        self._gpu.forget()

    def release(self) -> None:
        """Nothing is kept."""

    def capture(self) -> None:
        """The stream of a training alone."""
        try:
            with self._gpu.capturing():
                pass
        except AssertionError as error:
            raise RuntimeError(str(error)) from error


@contextmanager
def accelerator() -> Iterator[Accelerator]:
    """The device to measure on.

    Raises:
        NoGpuError: Nothing is.
    """
    problem = gpus.usable(0)
    if problem is not None:
        raise NoGpuError(problem)
    given = os.environ.get("PENSTOCK_CUDA_DRIVER")
    if given and hasattr(ctypes.CDLL(given), "penstock_fake_reset"):
        with _stand_in(Path(given)) as made:
            yield made
        return
    if not torch.cuda.is_available():
        raise NoGpuError(f"PyTorch {torch.__version__} sees none (torch.cuda.is_available())")
    yield Accelerator()


@contextmanager
def _stand_in(driver: Path) -> Iterator[_StandIn]:
    sys.path.append(str(ROOT / "tests" / "python"))
    tests = importlib.import_module("gpu")
    tests.DRIVER = driver  # type: ignore[attr-defined]
    with tests.taken_for_real() as made:
        yield _StandIn(made)


def shapes(nbytes: int) -> list[tuple[str, int]]:
    """Tensors of a state by their items of four bytes: large and small ones, as models have."""
    small = [(f"norm.{number}", _SMALL_ITEMS) for number in range(_SMALL_TENSORS)]
    left = max(_LARGE_PART, nbytes // 4 - _SMALL_TENSORS * _SMALL_ITEMS)
    each = max(1, min(_LARGE_ITEMS, left // _LARGE_PART))
    return [*((f"layer.{number}", each) for number in range(left // each)), *small]


def state(device: Accelerator, nbytes: int) -> State:
    """Tensors of which each holds its own number."""
    made = {}
    for number, (name, items) in enumerate(shapes(nbytes)):
        made[name] = device.full(items, float(number))
    return made


def empty(device: Accelerator, nbytes: int) -> State:
    """Tensors of the same names and shapes."""
    return {name: device.empty(items) for name, items in shapes(nbytes)}


def size(nbytes: int) -> int:
    """The exact size of a state of about so many bytes."""
    return sum(4 * items for _, items in shapes(nbytes))


def wrong(device: Accelerator, found: State, nbytes: int) -> str | None:
    """The name of the first tensor that is not as `state` made it; None if all are."""
    for number, (name, items) in enumerate(shapes(nbytes)):
        if not device.is_full(found[name], items, float(number)):
            return name
    return None
