"""`TargetMatching`: assigns tensors of a checkpoint to the state that ``load(into=…)`` fills.

All checks come before any write: names, shapes, types, whether memory is writable, and whether
targets share memory where the checkpoint has different tensors.
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.layout.sharding import boxes_of
from penstock.checkpoint.loading.in_file import InFile, description, is_in_file
from penstock.checkpoint.loading.target import NEW, Target, is_sharded, local_of, unwrapped
from penstock.checkpoint.state import ties
from penstock.checkpoint.state.composites import take_apart
from penstock.checkpoint.state.flatten import facts_of
from penstock.checkpoint.state.refusals import refusal
from penstock.checkpoint.state.tree.references import is_composite, is_data, needed, reference
from penstock.checkpoint.state.tree.scalars import TreeError, label, member
from penstock.checkpoint.state.tree.tree import LEVELS_MAX, ROOT, SEQUENCES, SKIPPED, Node, branches
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.tensors.devices import CurrentStreams
from penstock.tensors.memory import Memory, of_array, of_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checkpoint.layout.boxes import Box
    from penstock.checkpoint.view.view import View

_REPORTED_MAX = 10

_BUILD = "build the target as that of the save was, of the same model and settings"
_CHOOSE = "choose what to fill with keys=, or make both hold the same"
_CONVERT = "convert the target to that dtype first, as with .to(…) or .astype(…)"
_COPY = "put a copy into the target, as by .clone() or .copy()"
_OPTIMIZER = (
    "load without into= and pass what was loaded to optimizer.load_state_dict; of a store, "
    "penstock.Training(…) and store.resume(training) fill a fresh optimizer as well"
)


class TargetMatching:
    """The assignment of a checkpoint's tensors to targets in a state.

    Attributes:
        found: All targets in memory.
        in_files: All targets in files.
        new: Indices of the tensors in values that are built anew.
        places: The places of device memory that the native module fills.

    Raises:
        StateMismatchError: Something does not fit.
        TreeError: The tree is malformed.
    """

    def __init__(self, node: Node, state: Any, seen: View, path: str, *, is_partial: bool) -> None:
        self.found: list[Target] = []
        self.in_files: list[InFile] = []
        self.new: set[int] = set()
        self._seen = seen
        self._path = path
        self.places = CurrentStreams()
        self._is_partial = is_partial
        self._mismatches: list[tuple[str, str]] = []
        self._remedies: dict[str, None] = {}
        self._match(node, state, ROOT, 0)
        if not self._mismatches:
            self._find_conflicts()
        if self._mismatches:
            raise self._mismatch()

    def _match(self, node: Node, state: Any, name: str, level: int) -> None:
        if level > LEVELS_MAX:
            raise TreeError(f"nested deeper than {LEVELS_MAX} levels")
        state = unwrapped(state)
        if state is NEW:
            self.new.update(needed(node, self._seen.tensors, self._seen.aliases))
            return
        if is_data(node) and node["$"] in ("tensor", "ndarray"):
            self._match_tensor(node, state, name)
            return
        if is_composite(node):
            self._match_composite(node, state, name, level)
            return
        children = branches(node)
        kind = _kind(state)
        if children is None:
            if kind in ("tensor", "array", "dict", "list", "tuple", "deque"):
                self._add(name, f"a plain value in the checkpoint, {kind} in the target", _BUILD)
            # A value of a class is built anew, with its tensors.
            self.new.update(_in_object(node, self._seen))
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

    def _match_composite(self, node: dict[str, Node], state: Any, name: str, level: int) -> None:
        """Matches the members of a composite tensor, if all its other properties are equal."""
        try:
            found = None if _kind(state) != "tensor" else take_apart(state, name)
            own = None if found is None else facts_of(found, name)
        except UnsupportedStateError as error:
            self._add(name, f"cannot be filled: {str(error).removeprefix(f'{name}: ')}", _BUILD)
            return
        if found is None or own is None or own["$"] != node["$"]:
            here = _kind(state) if own is None else f"a {own.get('type', own['$'])} tensor"
            text = f"a {node.get('type', node['$'])!s:.200} tensor in the checkpoint, {here}"
            self._add(name, f"{text} in the target", _BUILD)
            return
        for fact in sorted((own.keys() | node.keys()) - {"v", "strides", "coalesced"}):
            if own.get(fact) != node.get(fact):
                text = f"{fact} {node.get(fact)!r:.80} in the checkpoint, {own.get(fact)!r:.80}"
                self._add(name, f"{text} in the target", _BUILD)
                return
        stored = member(node, "v", dict)
        if stored.keys() != found.inner.keys():
            text = f"made of {', '.join(stored):.80} in the checkpoint, of {', '.join(found.inner)}"
            self._add(name, f"{text} in the target", _BUILD)
            return
        for key, child in stored.items():
            self._match(child, found.inner[key], f"{name}.{key}", level + 1)

    def _match_tensor(self, node: dict[str, Node], state: Any, name: str) -> None:
        index, window = reference(node, self._seen.tensors, self._seen.aliases)
        dtype, shape = self._seen.tensors[index].dtype, self._seen.tensors[index].shape
        shape = shape if window is None else window[0]
        if is_in_file(state):
            self._match_file(InFile(name, state, node, index, window, []), dtype, tuple(shape))
            return
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
        elif self._differs(name, (dtype, shape), (memory.dtype, target_shape)):
            return
        elif isinstance(state, np.ndarray) and not state.flags.writeable:
            self._add(name, "the target array is read-only", _COPY)
        elif _overlaps_itself(memory):
            self._add(name, "the target is expanded: its elements share memory", _COPY)
        else:
            place = self.places.of(memory)
            self.found.append(Target(name, state, memory, node, index, window, boxes, place))

    def _match_file(self, found: InFile, dtype: str, shape: tuple[int, ...]) -> None:
        name = found.name
        try:
            own_dtype, own_shape, found.boxes = description(found.value, name)
        except UnsupportedStateError as error:
            self._add(name, f"cannot be filled: {str(error).removeprefix(f'{name}: ')}", _BUILD)
            return
        if not self._differs(name, (dtype, shape), (own_dtype, own_shape)):
            self.in_files.append(found)

    def _differs(
        self, name: str, stored: tuple[str, tuple[int, ...]], own: tuple[str, tuple[int, ...]]
    ) -> bool:
        """Compares type and shape, and reports a difference."""
        (dtype, shape), (own_dtype, own_shape) = stored, own
        if own_shape != shape:
            text = f"shape {list(shape)} in the checkpoint, {list(own_shape)} in the target"
            self._add(name, text, _BUILD)
        elif own_dtype != dtype:
            text = f"dtype {dtype} in the checkpoint, {own_dtype} in the target"
            self._add(name, text, _CONVERT)
        else:
            return False
        return True

    def _find_conflicts(self) -> None:
        """Reports targets in one place that are not tied in the same way in the checkpoint."""
        first: dict[object, InFile] = {}
        for one in self.in_files:
            other = first.setdefault(one.place, one)
            if other.origin != one.origin:
                text = f"is {other.name} as well in the target, not in the checkpoint"
                self._add(one.name, text, _BUILD)
        for run in ties.overlaps([target.memory for target in self.found]):
            members = [self.found[index] for index in run]
            if len({target.claim for target in members}) == 1:
                continue
            for target, tied in combinations(members, 2):
                if target.claim != tied.claim and ties.share_memory(target.memory, tied.memory):
                    self._add(
                        target.name,
                        f"shares memory with {tied.name} in the target, not in the checkpoint",
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
    """Whether the name is that of an optimizer's state, which is empty before the first step."""
    return name == "state" or name.endswith(".state")


def _kind(value: Any) -> str:
    """Returns the kind of a value for matching; a value that is replaced whole is plain."""
    torch = sys.modules.get("torch")
    if (torch is not None and isinstance(value, torch.Tensor)) or is_in_file(value):
        return "tensor"
    if isinstance(value, np.ndarray):
        return "array"
    for base in (dict, list):
        if isinstance(value, base):
            return base.__name__
    if type(value) in (tuple, deque):
        return type(value).__name__
    return f"a value of type {type(value).__name__}"


def _container_kind(node: Node) -> str:
    if type(node) is list:
        return "list"
    return str(node["$"]) if node.get("$") in SEQUENCES else "dict"


def _in_object(node: Node, seen: View) -> list[int]:
    """Returns the indices of the tensors in a value of a class."""
    is_object = type(node) is dict and node.get("$") == "object"
    return needed(node, seen.tensors, seen.aliases) if is_object else []


def _memory_of(value: Any, name: str) -> Memory | None:
    """Returns the memory of a tensor or array; None for anything else."""
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


def _held(value: Any, name: str) -> tuple[Memory, tuple[int, ...], list[Box]]:
    """Returns the memory of a `DTensor`'s local tensor, the whole shape, and the boxes held."""
    memory = of_tensor(local_of(value), name)
    return memory, tuple(value.shape), boxes_of(value, memory.shape, name)


def _overlaps_itself(memory: Memory) -> bool:
    """Whether two elements may share bytes; exact for every layout that PyTorch creates."""
    if memory.strides is None or memory.high == memory.low:
        return False
    dims = zip(memory.strides, memory.shape, strict=True)
    reach_bytes = memory.item_bytes
    for stride, dim in sorted((abs(stride), dim) for stride, dim in dims if dim > 1):
        if stride < reach_bytes:
            return True
        reach_bytes += stride * (dim - 1)
    return False
