"""`LoadPlan`: the tensors and arrays that ``load(into=…)`` fills from a checkpoint.

Everything is matched before anything is written (`penstock.checkpoint.loading.matching`). The
native module then fills contiguous host memory, the local parts of `DTensor`s box by box, and
memory of devices with a driver. For a `DTensor` on another device, its local part is read to host
memory first. Scattered memory of a device is filled by PyTorch, from contiguous memory of the
device that is bounded in size. All other tensors are loaded separately as a whole, and copied.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.loading.copying import bytes_of, copy_built
from penstock.checkpoint.loading.device_staging import DEVICE_STAGING_BYTES, DeviceStaging
from penstock.checkpoint.loading.in_file import Filling, is_in_file, place
from penstock.checkpoint.loading.matching import TargetMatching
from penstock.checkpoint.loading.target import NEW, Target, local_of, unwrapped
from penstock.checkpoint.state.assembly import put_together
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.composites import take_apart
from penstock.checkpoint.state.references import (
    BYTES_TAGS,
    BytesLocation,
    is_composite,
    is_data,
    needed,
)
from penstock.checkpoint.state.tree import SKIPPED, Node, branches
from penstock.tensors.copying import bump_versions, copy_elements
from penstock.tensors.memory import CPU, Memory, of_tensor

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock import _native
    from penstock.checkpoint.loading.device_tensors import DeviceTensors
    from penstock.checkpoint.view.view import View
    from penstock.common.progress import Progress
    from penstock.tensors.file_tensor import FileTensor
    from penstock.tensors.native_rows import Fill, LoadTarget


class LoadPlan:
    """The tensors of a state that are filled from a checkpoint.

    Args:
        node: The checkpoint's tree, `SKIPPED` where nothing was requested.
        state: The state to fill.
        seen: This rank's view of the checkpoint.
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
        matching = TargetMatching(node, state, seen, path, is_partial=is_partial)
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
            if target.is_direct and target.place is None:
                self._direct.setdefault(target.index, target)
            elif target.is_filled:
                self._filled.setdefault(target.claim, target)
            elif target.is_staged:
                # Not by claim: some devices hide addresses.
                self._staged.setdefault(target.held, target)
        in_bytes = needed(node, seen.tensors, seen.aliases, BYTES_TAGS)
        devices = self._choose_on_devices(self._new.union(in_bytes))
        self._staging = DeviceStaging(seen, matching.places, devices)
        self._beside = self._new | {
            target.index
            for target in self._found
            if self._is_to_copy(target) and target.index not in devices
        }
        # Claims of targets that were filled early, through other memory of a device.
        self._passed: set[tuple[Any, ...]] = set()

    def _choose_on_devices(self, on_host: set[int]) -> dict[int, Any]:
        """Chooses the device targets that the native module fills.

        Args:
            on_host: Indices of tensors that are needed in host memory in any case.

        Returns:
            The device of each tensor that is filled through other memory of the device, by index.
        """
        on_device = [one for one in self._found if one.place is not None and not one.is_empty]
        if not on_device:
            return {}
        on_host = on_host | {one.index for one in self._found if isinstance(one.value, np.ndarray)}
        windows = {one.index for one in self._found if one.window is not None}
        on_device = [one for one in on_device if one.index not in on_host]
        for target in on_device:
            # A tensor from which windows are copied has to be contiguous.
            is_run = target.memory.strides is None or target.index not in windows
            if target.is_direct and is_run:
                self._direct.setdefault(target.index, target)
        found: dict[int, Any] = {}
        for target in on_device:
            if target.boxes is None and self._is_to_copy(target):
                entry = self._seen.tensors[target.index]
                # The whole tensor of a window may be very large: then it stays on the host.
                if target.window is None or entry.end - entry.begin <= DEVICE_STAGING_BYTES:
                    found[target.index] = target.memory.owner.device
        return found

    def _is_to_copy(self, target: Target) -> bool:
        """Whether a target is not filled natively, neither itself nor through a tie."""
        if target.index in self._direct or target.is_filled:
            return False
        return not (target.is_staged or target.is_nothing or target.claim in self._filled)

    def beside(self) -> set[int]:
        """Returns indices of the tensors to be loaded separately as a whole."""
        return self._beside

    def indices(self) -> set[int]:
        """Returns indices of the entries that are read into targets, or on the way there."""
        return self._direct.keys() | self._staging.entries()

    @property
    def has_parts(self) -> bool:
        """Whether only parts of some tensors are needed, or some tensors are read later."""
        is_boxed = any(target.boxes is not None for target in self._found)
        return bool(self._in_files) or self._staging.is_in_parts or is_boxed

    def take(self) -> DeviceTensors:
        """Allocates the intermediate memory; returns that of devices."""
        for held, target in self._staged.items():
            self._hosts[held] = _host_of(target)
        return self._staging.take()

    def requests(self) -> list[Fill]:
        """Returns the requests that the native module fills box by box."""
        memories = [(target, target.memory) for target in self._filled.values()]
        memories += [(self._staged[held], host) for held, host in self._hosts.items()]
        wholes = self._seen.wholes
        return [
            request
            for target, memory in memories
            for request in target.requests(wholes.get(target.index, target.index), memory)
        ] + self._staging.memory.requests()

    def native(self) -> dict[int, LoadTarget]:
        """Returns the memory that the native module fills with entries, by index."""
        direct = {index: target.native() for index, target in self._direct.items()}
        return direct | self._staging.memory.native()

    def builder(self, places: dict[int, BytesLocation]) -> Builder:
        """Returns the builder of the remaining values, from the bytes read and the filled targets.

        Args:
            places: The place of each tensor's bytes, except those read into targets.
        """
        made = {}
        for index, target in self._direct.items():
            if target.place is None:
                places[index] = (bytes_of(target.value), 0)
            else:
                made[index] = target.value.detach()
        return Builder(self._seen.tensors, self._seen.aliases, places, made=made)

    def pass_on(
        self,
        checkpoint: _native.Checkpoint,
        options: dict[str, Any],
        progress: Progress | None,
    ) -> list[dict[str, Any]]:
        """Fills the targets that are reached through other memory of their devices.

        Args:
            checkpoint: The open checkpoint.
            options: How bytes move.
            progress: Called with the bytes done and the total bytes, separately for each batch.

        Returns:
            The report fields of each read.
        """

        def copy(indices: Collection[int], builder: Builder) -> None:
            for target in self._found:
                if target.index in indices and self._is_to_copy(target):
                    copy_built(builder, target)
                    self._passed.add(target.claim)

        return self._staging.pass_on(checkpoint, copy, options=options, progress=progress)

    def fill_files(
        self, checkpoint: _native.Checkpoint, options: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Loads tensors into files; changes no memory of the state.

        Args:
            checkpoint: The open checkpoint.
            options: How bytes move.

        Returns:
            The report fields of the reads.
        """
        filling = Filling(checkpoint, self._seen, options)
        self._filled_files = filling.fill(self._in_files)
        return [] if filling.fields is None else [filling.fields]

    def finish(self, node: Node, state: Any, builder: Builder) -> Any:
        """Fills the remaining targets and the plain leaves; returns the state."""
        # Steps that can fail come first: nothing is assigned before everything is built.
        assignments: list[tuple[Any, Any, Any]] = []
        state = self._rebuild(node, state, builder, assignments)
        filled = {target.claim for target in self._direct.values()} | set(self._filled)
        filled |= self._passed
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
        """Returns a node's new value: the old object, except for plain leaves and their tuples."""
        state = unwrapped(state)
        if state is NEW:
            return builder.build(node)
        if is_data(node) and node["$"] in ("tensor", "ndarray"):
            return self._filled_files[place(state)] if is_in_file(state) else state
        if is_composite(node):
            _take_over(node, state)
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


def _take_over(node: dict[str, Node], state: Any) -> None:
    """Sets the flags of a composite tensor after its members are filled, and checks its indices.

    Raises:
        TreeError: The members form no valid tensor.
    """
    parts = take_apart(state, "")
    if parts is not None and parts.tag != "subclass":
        # Kernels trust a tensor's indices, so they are checked.
        put_together(node, parts.inner, None)
    if "coalesced" in node:
        state._coalesced_(node["coalesced"])


def _host_of(target: Target) -> Memory:
    """Allocates host memory for a rank's part of a `DTensor` on another device."""
    torch = sys.modules["torch"]
    dtype = target.memory.owner.dtype
    return of_tensor(torch.empty(target.memory.shape, dtype=dtype, device=CPU), target.name)
