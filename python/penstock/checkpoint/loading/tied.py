"""Checks tied tensors of a model or training against the values that fill them.

Filling one tied tensor fills the other: if a checkpoint has different elements for each, the last
one filled would silently win. Equal elements may come from two stored tensors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.checkpoint.loading.target import is_sharded, local_of
from penstock.checkpoint.state import ties
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.tensors.memory import Memory, contiguous_strides, of_array, of_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class FilledTensor(NamedTuple):
    """A live tensor and the value that fills it."""

    part: str
    name: str
    live: Any
    stored: Any


def differences(filled: Iterable[FilledTensor]) -> Iterator[tuple[FilledTensor, str]]:
    """Yields the tied tensors that would not get the checkpoint's elements, with the reason."""
    found = [(one, memory) for one in filled if (memory := _memory_of(one.live)) is not None]
    for run in ties.overlaps([memory for _, memory in found]):
        members = [found[index] for index in sorted(run)]
        if not _are_tied(members):
            yield from _overwritten(members)


def check_model(model: Any, state: Mapping[str, Any], path: str) -> None:
    """Checks a model's tied tensors against the state that fills or has filled them.

    For frameworks that leave the loading to PyTorch, which fills one tensor after another.

    Args:
        model: The module.
        state: The argument of `torch.nn.Module.load_state_dict`.
        path: The checkpoint, for messages.

    Raises:
        StateMismatchError: A tensor has two names, and the state has other elements for each.
    """
    filled = [
        FilledTensor("", name, live, state[name].to(live.dtype))
        for name, live in model.state_dict().items()
        if getattr(state.get(name), "shape", None) == getattr(live, "shape", ())
    ]
    for one, text in differences(filled):
        raise StateMismatchError(
            f"{path}: {one.name}: {text}; build the model as the run did that saved it",
            key=one.name,
            path=path,
        )


def _are_tied(members: list[tuple[FilledTensor, Memory]]) -> bool:
    """Whether all tensors are in one place and filled from one tensor, the usual case."""
    places = {(memory.address, memory.shape, memory.strides) for _, memory in members}
    return len(places) == 1 and len({id(one.stored) for one, _ in members}) == 1


def _overwritten(members: list[tuple[FilledTensor, Memory]]) -> Iterator[tuple[FilledTensor, str]]:
    """Fills a copy of the memory in the same order, and yields the overwritten tensors."""
    low = min(memory.low for _, memory in members)
    space = np.zeros(max(memory.high for _, memory in members) - low, np.uint8)
    windows = [_window(space, memory, low) for _, memory in members]
    contents = [_bytes_of(one.stored, memory) for one, memory in members]
    for window, content in zip(windows, contents, strict=True):
        window[...] = content
    for index, (window, content) in enumerate(zip(windows, contents, strict=True)):
        if not np.array_equal(window, content):
            later = (
                one
                for (one, _), other in zip(members[index + 1 :], windows[index + 1 :], strict=True)
                if np.may_share_memory(window, other)
            )
            other = next(later, members[-1][0])
            where = other.name if other.part == members[index][0].part else _whole_name(other)
            yield (
                members[index][0],
                f"shares memory with {where} in the training, and the checkpoint has other "
                "elements for each",
            )


def _whole_name(one: FilledTensor) -> str:
    return f"{one.part}.{one.name}" if one.name else one.part


def _memory_of(live: Any) -> Memory | None:
    """Returns the memory of a tensor or array; None if nothing can share it."""
    torch = sys.modules.get("torch")
    try:
        if isinstance(live, np.ndarray):
            return of_array(live, "")
        if torch is not None and isinstance(live, torch.Tensor):
            return of_tensor(local_of(live) if is_sharded(live) else live.detach(), "")
    except UnsupportedStateError:
        # The tensor cannot be filled from a checkpoint; other code reports this.
        pass
    return None


def _window(space: Bytes, memory: Memory, low: int) -> Bytes:
    """Returns a memory's elements as bytes, in a substitute buffer, with one more dimension."""
    strides = memory.strides or contiguous_strides(memory.shape, memory.item_bytes)
    shape = (*memory.shape, memory.item_bytes)
    return np.ndarray(shape, np.uint8, space, memory.address - low, (*strides, 1))


def _bytes_of(stored: Any, memory: Memory) -> Bytes:
    """Returns the bytes of all elements of a tensor or array, in the shape of `_window`."""
    if isinstance(stored, np.ndarray):
        flat = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    else:
        torch = sys.modules["torch"]
        whole = (local_of(stored) if is_sharded(stored) else stored.detach()).cpu()
        whole = whole.resolve_conj().resolve_neg().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
    content: Bytes = flat.reshape(*memory.shape, memory.item_bytes)
    return content
