"""`Targets`: the tensors and arrays that ``load(into=…)`` fills, matched with a checkpoint.

Everything is checked before anything is written: names, shapes, types, whether memory can be
written at all, and whether targets share memory where the checkpoint has different tensors.
Contiguous host memory is then filled by the native module itself, and so is that of a `DTensor`,
box by box. For one on another device, host memory of what this rank holds stands in. The rest is
loaded beside, in full, and copied.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.layout.sharding import boxes_of
from penstock.loading.target import Target
from penstock.state import ties
from penstock.state.memory import CPU, Memory, of_array, of_tensor
from penstock.state.per_rank import PerRank
from penstock.state.references import Place, is_data, needed, reference
from penstock.state.refusals import refusal
from penstock.state.scalars import TreeError, label
from penstock.state.tree import LEVELS_MAX, ROOT, SEQUENCES, SKIPPED, Node, branches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock._native import _Fill
    from penstock.layout.boxes import Box
    from penstock.loading.view import View as Seen
    from penstock.state.build import Builder

_REPORTED_MAX = 10

_BUILD = "build the target as that of the save was, of the same model and settings"
_CHOOSE = "choose what to fill with keys=, or make both hold the same"
_CONVERT = "convert the target to that dtype first, as with .to(…) or .astype(…)"
_COPY = "put a copy into the target, as by .clone() or .copy()"
_OPTIMIZER = (
    "load without into= and pass what was loaded to optimizer.load_state_dict; of a store, "
    "penstock.Training(…) and store.resume(training) fill a fresh optimizer as well"
)
_SOLVER_WORK_MAX = 10_000


class _New:
    """Stands in a state to fill for what is made anew, whatever it is."""

    def __repr__(self) -> str:
        return "NEW"


NEW = _New()


class Targets:
    """What of a state is filled from a checkpoint.

    Args:
        node: The checkpoint's tree, `SKIPPED` where nothing was asked for.
        state: The state to fill.
        seen: What this rank sees of the checkpoint.
        path: The checkpoint, for messages.
        is_partial: Whether the state may hold more than the tree.

    Raises:
        StateMismatchError: Something does not fit; nothing has been changed.
        TreeError: The tree is malformed.
    """

    def __init__(
        self,
        node: Node,
        state: Any,
        seen: Seen,
        path: str,
        *,
        is_partial: bool,
    ) -> None:
        self._seen = seen
        self._path = path
        self._is_partial = is_partial
        self._found: list[Target] = []
        self._new: set[int] = set()
        self._mismatches: list[tuple[str, str]] = []
        self._remedies: dict[str, None] = {}
        self._match(node, state, ROOT, 0)
        if not self._mismatches:
            self._find_conflicts()
        if self._mismatches:
            raise self._mismatch()
        self._direct: dict[int, Target] = {}
        self._filled: dict[tuple[Any, ...], Target] = {}
        self._staged: dict[tuple[Any, ...], Target] = {}
        self._hosts: dict[tuple[Any, ...], Memory] = {}
        for target in self._found:
            if target.is_direct:
                self._direct.setdefault(target.index, target)
            elif target.is_filled:
                self._filled.setdefault(target.claim, target)
            elif target.is_staged:
                # Not by claim: some devices tell no addresses.
                self._staged.setdefault(target.held, target)

    def beside(self) -> set[int]:
        """Indices of the tensors that have to be loaded beside the targets, in full."""
        return self._new | {
            target.index
            for target in self._found
            if not (target.is_direct or target.is_filled or target.is_staged or target.is_nothing)
            and target.index not in self._direct
        }

    @property
    def has_parts(self) -> bool:
        """Whether of some tensors only a part may be wanted."""
        return any(target.boxes is not None for target in self._found)

    def requests(self) -> list[_Fill]:
        """What the native module fills box by box; takes the host memory that stands in."""
        for held, target in self._staged.items():
            if held not in self._hosts:
                self._hosts[held] = _host_of(target)
        memories = [(target, target.memory) for target in self._filled.values()]
        memories += [(self._staged[held], host) for held, host in self._hosts.items()]
        wholes = self._seen.wholes
        return [
            request
            for target, memory in memories
            for request in target.requests(wholes.get(target.index, target.index), memory)
        ]

    def native(self) -> dict[int, tuple[int, int, object]]:
        """Memory for the native module to fill: index -> (address, bytes, owner)."""
        return {
            index: (target.memory.address, target.memory.nbytes, target.value)
            for index, target in self._direct.items()
        }

    def places(self) -> dict[int, Place]:
        """Where the tensors that the native module filled are, for those that tie to them."""
        return {index: (_bytes_of(target.value), 0) for index, target in self._direct.items()}

    def finish(self, node: Node, state: Any, builder: Builder) -> Any:
        """Fills what the native module did not, and the plain leaves; returns the state."""
        # What can still fail comes first: nothing is assigned before everything is built.
        assignments: list[tuple[Any, Any, Any]] = []
        state = self._rebuild(node, state, builder, assignments)
        filled = {target.claim for target in self._direct.values()} | set(self._filled)
        for target in self._found:
            if target.is_staged:
                copy_elements(_local(target.value), self._hosts[target.held].owner)
            elif target.claim not in filled and not target.is_nothing:
                _copy(builder, target)
        in_place = [*self._direct.values(), *self._filled.values()]
        bump_versions([target.memory.owner for target in in_place])
        for container, key, value in assignments:
            container[key] = value
        return state

    def _rebuild(
        self, node: Node, state: Any, builder: Builder, assignments: list[tuple[Any, Any, Any]]
    ) -> Any:
        """What comes into the place of a value: itself, but for plain leaves and their tuples."""
        state = _unwrapped(state)
        if state is NEW:
            return builder.build(node)
        if is_data(node) and node["$"] in ("tensor", "ndarray"):
            return state
        children = branches(node)
        if children is None:
            return builder.build(node)
        new = {
            key: self._rebuild(child, state[key], builder, assignments)
            for key, child in children
            if child is not SKIPPED
        }
        if isinstance(state, tuple):
            return tuple(new.get(index, item) for index, item in enumerate(state))
        assignments += [
            (state, key, value) for key, value in new.items() if state[key] is not value
        ]
        if type(state) is OrderedDict and type(node) is dict:
            attributes = builder.attributes(node, 0)
            assignments += [(vars(state), name, value) for name, value in attributes.items()]
        return state

    # Matching.

    def _match(self, node: Node, state: Any, name: str, level: int) -> None:
        if level > LEVELS_MAX:
            raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
        state = _unwrapped(state)
        if state is NEW:
            self._new.update(needed(node, self._seen.tensors, self._seen.aliases))
            return
        if is_data(node) and node["$"] in ("tensor", "ndarray"):
            self._match_tensor(node, state, name)
            return
        children = branches(node)
        kind = _kind(state)
        if children is None:
            if kind in ("tensor", "array", "dict", "list", "tuple"):
                self._add(name, f"a plain value in the checkpoint, {kind} in the target", _BUILD)
            return
        if kind != _container_kind(node):
            text = f"{_container_kind(node)} in the checkpoint, {kind} in the target"
            self._add(name, text, _BUILD)
            return
        if children and not state and _is_of_optimizer(name):
            text = f"{len(children)} entries in the checkpoint, none in the target"
            self._add(name, f"{text}, whose optimizer has not stepped yet", _OPTIMIZER)
            return
        prefix = f"{name}." if level else ""
        here = state if kind == "dict" else dict(enumerate(state))
        self._match_children(children, here, prefix, level)

    def _match_children(
        self, children: list[tuple[Any, Node]], here: Mapping[Any, Any], prefix: str, level: int
    ) -> None:
        for key, child in children:
            if child is SKIPPED:
                continue
            child_name = prefix + label(key)
            if key in here:
                self._match(child, here[key], child_name, level + 1)
            else:
                self._add(child_name, "is in the checkpoint, not in the target", _CHOOSE)
        if not self._is_partial:
            known = {key for key, _ in children}
            for key in here:
                if key not in known:
                    name = prefix + label(key)
                    self._add(name, "is in the target, not in the checkpoint", _CHOOSE)

    def _match_tensor(self, node: dict[str, Node], state: Any, name: str) -> None:
        index, window = reference(node, self._seen.tensors, self._seen.aliases)
        _, dtype, shape, *_ = self._seen.tensors[index]
        shape = shape if window is None else window[0]
        memory: Memory | None
        boxes: list[Box] | None = None
        try:
            if is_sharded(state):
                memory, target_shape, boxes = _held(state, name)
            else:
                memory = _memory_of(state, name)
                target_shape = () if memory is None else memory.shape
        except UnsupportedStateError as error:
            self._add(name, f"cannot be filled: {str(error).removeprefix(f'{name}: ')}", _BUILD)
            return
        if memory is None:
            self._add(name, f"tensor in the checkpoint, {_kind(state)} in the target", _BUILD)
        elif target_shape != shape:
            text = f"shape {list(shape)} in the checkpoint, {list(target_shape)} in the target"
            self._add(name, text, _BUILD)
        elif memory.dtype != dtype:
            text = f"dtype {dtype} in the checkpoint, {memory.dtype} in the target"
            self._add(name, text, _CONVERT)
        elif isinstance(state, np.ndarray) and not state.flags.writeable:
            self._add(name, "the target array is read-only", _COPY)
        elif _overlaps_itself(memory):
            self._add(name, "the target is expanded: its elements share memory", _COPY)
        else:
            is_whole = index in self._seen.wholes
            self._found.append(Target(name, state, memory, node, index, window, boxes, is_whole))

    def _find_conflicts(self) -> None:
        """Targets that share memory have to be tied in the checkpoint in the same way."""
        for run in ties.overlaps([target.memory for target in self._found]):
            members = [self._found[index] for index in run]
            if len({target.claim for target in members}) == 1:
                continue
            for one, other in combinations(members, 2):
                if one.claim != other.claim and _share_memory(one.memory, other.memory):
                    self._add(
                        one.name,
                        f"shares memory with {other.name} in the target, not in the checkpoint",
                        _COPY,
                    )
                    break

    def _add(self, name: str, text: str, remedy: str) -> None:
        self._mismatches.append((name, text))
        if len(self._mismatches) <= _REPORTED_MAX:
            self._remedies[remedy] = None

    def _mismatch(self) -> StateMismatchError:
        shown = [f"{name}: {text}" for name, text in self._mismatches[:_REPORTED_MAX]]
        more = len(self._mismatches) - len(shown)
        if more:
            shown.append(f"and {more} more")
        remedies = list(self._remedies)
        if _OPTIMIZER not in remedies:
            remedies.append("or load without into=, which gives the state as it was saved")
        text = "; ".join([*shown, *remedies])
        return StateMismatchError(
            f"{self._path}: into= does not fit the checkpoint, nothing was changed: {text}",
            key=self._mismatches[0][0],
            path=self._path,
        )


def _is_of_optimizer(name: str) -> bool:
    """Whether that is what an optimizer keeps of its parameters, which is nothing before a step."""
    return name == "state" or name.endswith(".state")


def _unwrapped(value: Any) -> Any:
    """A value without the mark that each rank has its own: saved with it, it is filled with it."""
    while isinstance(value, PerRank):
        value = value.value
    return value


def _kind(value: Any) -> str:
    """What a value is to the one who matches it; whatever is replaced whole is a plain value."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, np.ndarray):
        return "array"
    for base in (dict, list):
        if isinstance(value, base):
            return base.__name__
    return "tuple" if type(value) is tuple else f"a value of type {type(value).__name__}"


def _container_kind(node: Node) -> str:
    if type(node) is list:
        return "list"
    return "tuple" if node.get("$") in SEQUENCES else "dict"


def _memory_of(value: Any, name: str) -> Memory | None:
    """The memory of a tensor or array; None for anything else."""
    kind = _kind(value)
    if kind == "tensor":
        torch = sys.modules["torch"]
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return of_tensor(value, name)
        raise refusal(value, name)
    if kind == "array":
        if type(value) in (np.ndarray, np.memmap):
            return of_array(value, name)
        raise refusal(value, name)
    return None


def is_sharded(value: Any) -> bool:
    """Whether it is a `DTensor`, of which this rank holds a part."""
    # Without the module there is none, and it takes a while to import.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor


def _held(value: Any, name: str) -> tuple[Memory, tuple[int, ...], list[Box]]:
    """Of a `DTensor`: the memory of its local tensor, its shape, and what of it that holds."""
    memory = of_tensor(_local(value), name)
    return memory, tuple(value.shape), boxes_of(value, memory.shape, name)


def _local(value: Any) -> Any:
    """What a rank holds of a `DTensor`, without autograd."""
    return value.detach().to_local()


def _host_of(target: Target) -> Memory:
    """Memory of the host for what a rank holds of a `DTensor` that lies elsewhere."""
    torch = sys.modules["torch"]
    dtype = target.memory.owner.dtype
    return of_tensor(torch.empty(target.memory.shape, dtype=dtype, device=CPU), target.name)


def _overlaps_itself(memory: Memory) -> bool:
    """Whether two elements may share bytes; exact for every layout that PyTorch makes."""
    if memory.strides is None or memory.high == memory.low:
        return False
    dims = zip(memory.strides, memory.shape, strict=True)
    reach_bytes = memory.item_bytes
    for stride, dim in sorted((abs(stride), dim) for stride, dim in dims if dim > 1):
        if stride < reach_bytes:
            return True
        reach_bytes += stride * (dim - 1)
    return False


def _share_memory(one: Memory, other: Memory) -> bool:
    """Whether two memories have a byte in common."""
    if one.low >= other.high or other.low >= one.high:
        return False
    if one.strides is None and other.strides is None:
        return True
    # NumPy's own stub knows only two of the numbers that its documentation allows.
    work: Any = _SOLVER_WORK_MAX
    try:
        return np.shares_memory(_window(one), _window(other), max_work=work)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Tells NumPy where elements are, so that its solver can compare; they are never read."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "data": (memory.address, True),
            "typestr": f"|V{memory.item_bytes}",
            "shape": memory.shape,
            "strides": memory.strides,
            "version": 3,
        }


def _window(memory: Memory) -> np.ndarray[Any, Any]:
    return np.asarray(_Addresses(memory))


def _copy(builder: Builder, target: Target) -> None:
    """Fills a target from what was loaded beside it."""
    if isinstance(target.value, np.ndarray):
        np.copyto(target.value, builder.leaf(target.node, "ndarray"), casting="no")
        return
    value, source = target.value, builder.leaf(target.node, "tensor")
    if target.boxes is not None:
        _copy_boxes(_local(value), source, target.boxes)
    else:
        copy_elements(value, source)


def copy_elements(value: Any, source: Any) -> None:
    """Fills a tensor from one of the same type and shape."""
    torch = sys.modules["torch"]
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        if value.itemsize == 1:
            # PyTorch copies no int4 and its like, but bytes.
            value, source = value.view(torch.uint8), source.view(torch.uint8)
        value.copy_(source)


def _copy_boxes(local: Any, source: Any, boxes: list[Box]) -> None:
    """Fills what a rank holds of a `DTensor` from the whole of it."""
    for box in boxes:
        wanted = tuple(slice(low, low + size) for low, size in zip(*box[:2], strict=True))
        place = tuple(slice(low, low + size) for low, size in zip(box.at, box.shape, strict=True))
        copy_elements(local[place], source[wanted])


def _bytes_of(value: Any) -> np.ndarray[Any, Any]:
    """The bytes of a contiguous tensor or array of the host, sharing its memory."""
    if isinstance(value, np.ndarray):
        return np.asarray(value).reshape(-1).view(np.uint8)
    torch = sys.modules["torch"]
    # Not a reshape: it would keep a stride other than one where there is a single element.
    flat = value.detach().as_strided((value.numel(),), (1,))
    array: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return array


def bump_versions(values: list[Any]) -> None:
    """Tells autograd of writes behind its back, so that a stale graph fails instead of lying."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_inference():
            torch.autograd.graph.increment_version(value)
