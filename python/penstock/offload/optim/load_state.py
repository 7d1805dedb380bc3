"""Loads a state into an optimizer, or the entries of one that a caller has assigned.

Step counts are kept in memory, moments in files.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import StateMismatchError
from penstock.offload.optim.import_state import ImportedFile, StateImport
from penstock.offload.optim.layout import label
from penstock.tensors.file_tensor import FileTensor
from penstock.tensors.memory import contiguous_strides
from penstock.tensors.torch_names import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.offload.optim.layout import ParameterEntry
    from penstock.offload.optim.shares import SteppedParameter
    from penstock.offload.optim.state import StoredState
    from penstock.tensors.file_tensor import FileBox

MASTER = "master"
"""Name of the moment that is a copy of the parameter."""

STEP = "step"


def import_moments(
    stored: StoredState, own: Sequence[tuple[Any, int]], state_dict: dict[str, Any]
) -> tuple[dict[Any, Any], StateImport | None]:
    """Imports the moments of a state into files, unless a load has put them there already.

    Returns:
        The part of the state that stays in memory, and the import; None for an empty state.
    """
    theirs = [one for group in state_dict["param_groups"] for one in group["params"]]
    # Parameters correspond by their position in the groups, as in PyTorch.
    places = {str(place): (place, one) for place, one in zip(theirs, own, strict=False)}
    plain: dict[Any, Any] = {}
    wanted: dict[int, tuple[Any, dict[str, Any]]] = {}
    for key, state in state_dict["state"].items():
        if all(value is None for value in state.values()):
            continue
        if str(key) not in places:
            raise StateMismatchError(
                f"the state has parameter {key}, the optimizer {len(own)}", key=str(key)
            )
        place, (parameter, number) = places[str(key)]
        # Not all optimizers count steps: a state without a count has made one at least. The count
        # is a number, as for each tensor PyTorch searches its parameter among all of a group.
        plain[place] = {"step": float(state.get("step", 1.0))}
        wanted[number] = parameter, state
    if not wanted:
        return plain, None
    state_import = _import_of(stored, wanted) or StateImport(stored)
    lacking = {
        (number, moment): _reader_of(stored, number, moment, state, parameter)
        for number, (parameter, state) in wanted.items()
        for moment in stored.segment_of(number).moments
        if not state_import.has(number, moment)
    }
    if lacking:
        _put(state_import, lacking)
    return plain, state_import


def _import_of(
    stored: StoredState, wanted: dict[int, tuple[Any, dict[str, Any]]]
) -> StateImport | None:
    """The import into which a load has put all moments of a state, unchanged; else None."""
    found: set[StateImport] = set()
    for number, (_, state) in wanted.items():
        for moment in stored.segment_of(number).moments:
            value = state.get(moment)
            if value is None and moment == MASTER:
                continue
            if not isinstance(value, FileTensor) or value.label != label(number, moment):
                return None
            if not isinstance(value.file, ImportedFile):
                return None
            found.add(value.file.state_import)
    state_import = found.pop() if len(found) == 1 else None
    return state_import if state_import is not None and state_import.state is stored else None


def _put(state_import: StateImport, lacking: dict[tuple[int, str], _Reader]) -> None:
    """Imports moments, each by its reader."""
    readers = list(lacking.values())

    def read(memory: Any, boxes: Sequence[FileBox]) -> None:
        for box in boxes:
            reader = readers[box.target]
            end = box.place + math.prod(box.shape) * reader.dtype.itemsize
            block = memory[box.place : end].view(reader.dtype).view(box.shape)
            reader.read(block, box.start)

    state_import.put(list(lacking), read)


class _Reader(NamedTuple):
    """Reads boxes of a moment.

    Attributes:
        dtype: Type of the elements in the optimizer.
        read: Fills a contiguous tensor with the box that begins at an index.
    """

    dtype: Any
    read: Callable[[Any, tuple[int, ...]], object]


def _reader_of(
    stored: StoredState, number: int, moment: str, state: dict[str, Any], parameter: Any
) -> _Reader:
    value = state.get(moment)
    if value is None and moment == MASTER:
        value = local_of(parameter)
    if value is None:
        raise StateMismatchError(
            f"the state of parameter {number} has no {moment!r}: it is of another optimizer",
            key=f"{number}.{moment}",
        )
    return _reader(value, stored.entry_of(number), moment)


def local_of(tensor: Any) -> Any:
    """The tensor's part on this rank, without autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reader(value: Any, entry: ParameterEntry, moment: str) -> _Reader:
    """A reader for a moment that is in memory, or in a file of another state."""
    tensor = value if isinstance(value, FileTensor) else local_of(value)
    shape = tuple(tensor.shape)
    if shape != entry.shape:
        raise StateMismatchError(
            f"{moment!r} of parameter {entry.number} has shape {list(shape)} in the state,"
            f" {list(entry.shape)} in the optimizer",
            key=f"{entry.number}.{moment}",
        )
    if not isinstance(value, FileTensor):
        return _Reader(entry.dtype, partial(_copy, tensor))
    return _Reader(entry.dtype, partial(_read, value))


def _copy(tensor: Any, block: Any, start: tuple[int, ...]) -> None:
    box = tuple(slice(at, at + size) for at, size in zip(start, block.shape, strict=True))
    block.copy_(tensor[box])


def _read(tensor: FileTensor, block: Any, start: tuple[int, ...]) -> None:
    first = sum(map(int.__mul__, start, contiguous_strides(tensor.shape, tensor.dtype.itemsize)))
    if block.dtype == tensor.dtype:
        tensor.file.read(block, tensor.offset + first)
        return
    other = torch.empty(block.shape, dtype=tensor.dtype, device="cpu")
    tensor.file.read(other, tensor.offset + first)
    block.copy_(other)


def steps_made(number: int, state: Mapping[str, Any]) -> float | None:
    """The number of steps that a parameter has made; None while it has no state."""
    step = state.get(STEP)
    if step is None:
        return None
    try:
        made = float(step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateMismatchError(
            f"the step of parameter {number} is no number ({error})", key=f"{number}.{STEP}"
        ) from error
    if not (math.isfinite(made) and made >= 0):
        raise StateMismatchError(
            f"the step of parameter {number} is {made}: it counts steps", key=f"{number}.{STEP}"
        )
    return made


def assigned_moments(
    entry: ParameterEntry, state: Mapping[str, Any], *, is_kept: bool
) -> dict[str, Any]:
    """Moments that a caller has assigned in the state of a parameter.

    Moments are kept in files, so ``optimizer.state`` holds none of them unless the caller assigns
    one. ``is_kept``: files have its moments, so that not all need be assigned.

    Returns:
        The values on this rank, by the names of the moments.
    """
    found = {}
    for name, value in state.items():
        if name == STEP:
            continue
        key = f"{entry.number}.{name}"
        if name not in entry.moments:
            raise StateMismatchError(
                f"the state of parameter {entry.number} has {name!r}, which this optimizer does"
                f" not store (it stores {', '.join(entry.moments)}): keep it elsewhere",
                key=key,
            )
        if not isinstance(value, torch.Tensor | FileTensor):
            raise StateMismatchError(
                f"{name!r} of parameter {entry.number} is {type(value).__name__}, no tensor: to"
                " begin anew, remove the parameter from optimizer.state",
                key=key,
            )
        values = value.read() if isinstance(value, FileTensor) else local_of(value)
        if tuple(values.shape) != entry.shape or values.dtype != entry.dtype:
            raise StateMismatchError(
                f"{name!r} of parameter {entry.number} is {list(values.shape)}, {values.dtype}; the"
                f" optimizer keeps {list(entry.shape)}, {entry.dtype}",
                key=key,
            )
        found[name] = values
    if STEP in state and not is_kept:
        for moment in entry.moments:
            if moment != MASTER and moment not in found:
                raise StateMismatchError(
                    f"the state of parameter {entry.number} has {STEP!r} and no {moment!r}: assign"
                    " all moments, or remove the parameter from optimizer.state",
                    key=f"{entry.number}.{moment}",
                )
    return found


def count_step(live: Iterable[SteppedParameter]) -> None:
    """Counts a step of each parameter that made one, and drops assigned moments, now in files."""
    counted = []
    for one in live:
        made = one.made or 0.0
        step = one.state.get(STEP)
        if one.gradient is not None and isinstance(step, torch.Tensor):
            counted.append(step)
        elif step is None or one.gradient is not None:
            one.state[STEP] = count(made if one.gradient is None else made + 1)
        for name in one.assigned:
            one.state.pop(name, None)
    if counted:
        torch._foreach_add_(counted, 1)


def count(steps: Any) -> Any:
    """A count of steps as the fused kernels take it: float32 on the CPU, whatever the defaults."""
    return torch.as_tensor(steps, dtype=torch.float32, device="cpu").clone()
