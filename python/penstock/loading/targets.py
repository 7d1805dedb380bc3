"""`Targets`: the tensors and arrays that ``load(into=…)`` fills, matched with a checkpoint.

Everything is matched before anything is written (`penstock.loading.matching`). Contiguous host
memory is then filled by the native module itself, and so is that of a `DTensor`, box by box, and
that of devices which have a driver here. For a `DTensor` on another device, host memory of what
this rank holds stands in. The rest is loaded beside, in full, and copied.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from penstock.loading.copying import bump_versions, bytes_of, copy_built, copy_elements
from penstock.loading.in_file import Filling, is_in_file, place
from penstock.loading.matching import Matching
from penstock.loading.target import NEW, Target, local_of, unwrapped
from penstock.state.memory import CPU, Memory, of_tensor
from penstock.state.references import Place, is_data
from penstock.state.tree import SKIPPED, Node, branches

if TYPE_CHECKING:
    from penstock import _native
    from penstock._native import _Fill
    from penstock.loading.view import View
    from penstock.state.build import Builder
    from penstock.state.file_tensor import FileTensor


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
        seen: View,
        path: str,
        *,
        is_partial: bool,
    ) -> None:
        matching = Matching(node, state, seen, path, is_partial=is_partial)
        self._seen = seen
        self._found = matching.found
        self._in_files = matching.in_files
        self._filled_files: dict[object, FileTensor] = {}
        self._new = matching.new
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
            and target.claim not in self._filled
        }

    @property
    def has_parts(self) -> bool:
        """Whether of some tensors only a part may be wanted."""
        return bool(self._in_files) or any(target.boxes is not None for target in self._found)

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
        return {index: (bytes_of(target.value), 0) for index, target in self._direct.items()}

    def fill_files(
        self, checkpoint: _native.Checkpoint, options: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Puts tensors into files; no memory of the state is changed.

        Args:
            checkpoint: The checkpoint, open.
            options: How bytes move.

        Returns:
            What is to be reported of it, if there is anything.

        Raises:
            CorruptCheckpointError: One is damaged.
        """
        filling = Filling(checkpoint, self._seen, options)
        self._filled_files = filling.fill(self._in_files)
        return filling.fields

    def finish(self, node: Node, state: Any, builder: Builder) -> Any:
        """Fills what the native module did not, and the plain leaves; returns the state."""
        # What can still fail comes first: nothing is assigned before everything is built.
        assignments: list[tuple[Any, Any, Any]] = []
        state = self._rebuild(node, state, builder, assignments)
        filled = {target.claim for target in self._direct.values()} | set(self._filled)
        for target in self._found:
            if target.is_staged:
                copy_elements(local_of(target.value), self._hosts[target.held].owner)
            elif target.claim not in filled and not target.is_nothing:
                copy_built(builder, target)
        in_place = [*self._direct.values(), *self._filled.values()]
        bump_versions([target.memory.owner for target in in_place])
        for container, key, value in assignments:
            container[key] = value
        return state

    def _rebuild(
        self, node: Node, state: Any, builder: Builder, assignments: list[tuple[Any, Any, Any]]
    ) -> Any:
        """What comes into the place of a value: itself, but for plain leaves and their tuples."""
        state = unwrapped(state)
        if state is NEW:
            return builder.build(node)
        if is_data(node) and node["$"] in ("tensor", "ndarray"):
            return self._filled_files[place(state)] if is_in_file(state) else state
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


def _host_of(target: Target) -> Memory:
    """Memory of the host for what a rank holds of a `DTensor` that lies elsewhere."""
    torch = sys.modules["torch"]
    dtype = target.memory.owner.dtype
    return of_tensor(torch.empty(target.memory.shape, dtype=dtype, device=CPU), target.name)
