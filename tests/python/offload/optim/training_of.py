"""Small trainings: one optimizer with its state in files, and one in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock import offload
from penstock.tensors.file_tensor import FileTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

SHAPES = ((301, 1003), (17,), (3, 5, 7), (1,), (512, 256), (0, 4), (300001,), (4096, 64), ())
"""Whole pages, whole cache lines, odd sizes, one element, none."""
SMALL = ((64, 64), (17,), (300, 1000))
MEMORY_BYTES = 32 << 20


def parameters(dtype: Any = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Any]:
    """Returns parameters with the same values at each call."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def set_gradients(
    step: int, *sets: list[Any], without: Callable[[int], bool] = lambda _: False
) -> None:
    """Sets the gradients of a step on each set of parameters.

    Args:
        step: Number of the step.
        sets: The parameters.
        without: Whether the parameter with an index has no gradient.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    for index, same in enumerate(zip(*sets, strict=True)):
        gradient = torch.randn(same[0].shape, generator=generator)
        for one in same:
            one.grad = None if without(index) else gradient.to(one.dtype, copy=True)


def stepped(
    directory: Path,
    steps: int = 2,
    shapes: Sequence[tuple[int, ...]] = SMALL,
    **options: Any,
) -> tuple[list[Any], Any]:
    """Returns small parameters and their optimizer after some steps."""
    ours = parameters(shapes=shapes)
    optimizer = offload.AdamW(ours, directory=directory, memory_bytes=MEMORY_BYTES, **options)
    for step in range(steps):
        set_gradients(step, ours)
        optimizer.step()
    return ours, optimizer


def in_memory(value: Any) -> Any:
    """Reads a moment into memory, if it is in a file."""
    return value.read() if isinstance(value, FileTensor) else value


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Checks that two states of optimizers are the same, bit for bit."""
    assert one["state"].keys() == other["state"].keys()
    for number, moments in one["state"].items():
        for name, value in moments.items():
            found = in_memory(other["state"][number][name])
            assert torch.equal(in_memory(value), found), (number, name)


def assert_equal(one: Sequence[Any], other: Sequence[Any]) -> None:
    """Checks that parameters are the same, bit for bit."""
    for index, pair in enumerate(zip(one, other, strict=True)):
        assert torch.equal(*pair), index
