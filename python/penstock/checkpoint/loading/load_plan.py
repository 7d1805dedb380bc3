"""The plans of a load: `LoadPlan` fills tensors and arrays of a state, `BuildPlan` makes new ones.

A `LoadPlan` belongs to ``load(into=…)``. Everything is matched before anything is written
(`penstock.checkpoint.loading.matching`), and each target gets its `Route`. The plan then carries
the routes out: it names the memory that the native module fills, and copies to all other targets
afterwards.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.loading.device_tensors import DeviceStaging, DeviceTensors
from penstock.checkpoint.loading.in_file import Filling, is_in_file, place
from penstock.checkpoint.loading.matching import TargetMatching
from penstock.checkpoint.loading.route import Route, choose_routes
from penstock.checkpoint.loading.target import NEW, local_of, unwrapped
from penstock.checkpoint.state.assembly import put_together
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.composites import take_apart
from penstock.checkpoint.state.tree.references import (
    BYTES_TAGS,
    BytesLocation,
    is_composite,
    is_data,
    needed,
)
from penstock.checkpoint.state.tree.tree import SKIPPED, Node, branches
from penstock.checkpoint.state.unstaged import hold_devices
from penstock.common.tracing import span
from penstock.tensors.copying import bump_versions, bytes_of, copy_elements
from penstock.tensors.devices import CurrentStreams
from penstock.tensors.memory import CPU, Memory, of_tensor

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock import _native
    from penstock.checkpoint.layout.boxes import Box
    from penstock.checkpoint.loading.target import Target
    from penstock.checkpoint.view.view import View
    from penstock.common.progress import Progress
    from penstock.tensors.file_tensor import FileTensor
    from penstock.tensors.native_rows import Fill, LoadTarget


class BuildPlan:
    """The tensors of a new state, in new memory of the host or of a device."""

    def __init__(self, seen: View, device: Any) -> None:
        self._seen = seen
        self._device = device
        self._made = DeviceTensors(seen, CurrentStreams())

    def allocate(self) -> DeviceTensors:
        """Allocates the tensors of the device."""
        if self._device is not None:
            self._made.make_all(self._device)
        return self._made

    def selection(self, *, is_everything: bool) -> set[int] | None:
        """Returns indices of the tensors to read whole, after `allocate`.

        Returns:
            None for everything in every file.
        """
        if is_everything:
            return None
        selected = set(needed(self._seen.node, self._seen.tensors, self._seen.aliases))
        return selected - (self._seen.wholes.keys() & self._made.made.keys())

    def requests(self) -> list[Fill]:
        """Returns the requests that the native module fills box by box."""
        return self._made.requests()

    def native(self) -> dict[int, LoadTarget]:
        """Returns the memory that the native module fills with entries, by index."""
        return self._made.native()

    def fill_files(self, *_: object) -> list[dict[str, Any]]:
        """Reads nothing: no new tensor is in a file."""
        return []

    def copy_through_devices(self, *_: object) -> list[dict[str, Any]]:
        """Reads nothing: new tensors are filled in place."""
        return []

    def finish(self, places: dict[int, BytesLocation]) -> Any:
        """Builds the state."""
        seen = self._seen
        builder = Builder(seen.tensors, seen.aliases, places, self._device, self._made.made)
        return builder.build(seen.node)


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
        self._node = node
        self._state = state
        self._seen = seen
        self._found = matching.found
        self._in_files = matching.in_files
        self._filled_files: dict[object, FileTensor] = {}
        in_bytes = needed(node, seen.tensors, seen.aliases, BYTES_TAGS)
        self._on_host = matching.new.union(in_bytes)
        self._targets, devices = choose_routes(self._found, seen, self._on_host)
        self._staging = DeviceStaging(seen, matching.places, devices)
        # Targets that hold the same part of a `DTensor` share one host copy. Not by claim: some
        # devices hide addresses.
        self._parts = {target.held: target for target in self._targets[Route.HOST_PART]}
        self._hosts: dict[tuple[Any, ...], Memory] = {}

    def selection(self, *, is_everything: bool) -> set[int] | None:
        """Returns indices of the tensors to read whole, into targets or into other memory.

        Returns:
            None for everything in every file.
        """
        if is_everything and not self._has_parts:
            return None
        copied = {target.index for target in self._targets[Route.HOST_COPY]}
        in_place = {target.index for target in self._targets[Route.IN_PLACE]}
        return self._on_host | copied | in_place | self._staging.entries()

    def allocate(self) -> DeviceTensors:
        """Allocates the intermediate memory; returns that of devices."""
        for held, target in self._parts.items():
            self._hosts[held] = _host_of(target)
        return self._staging.allocate()

    def requests(self) -> list[Fill]:
        """Returns the requests that the native module fills box by box."""
        memories = [(target, target.memory) for target in self._targets[Route.BOXES]]
        memories += [(self._parts[held], host) for held, host in self._hosts.items()]
        wholes = self._seen.wholes
        return [
            request
            for target, memory in memories
            for request in target.requests(wholes.get(target.index, target.index), memory)
        ] + self._staging.memory.requests()

    def native(self) -> dict[int, LoadTarget]:
        """Returns the memory that the native module fills with entries, by index."""
        in_place = {target.index: target.native() for target in self._targets[Route.IN_PLACE]}
        return in_place | self._staging.memory.native()

    def copy_through_devices(
        self,
        checkpoint: _native.Checkpoint,
        options: dict[str, Any],
        progress: Progress | None,
    ) -> list[dict[str, Any]]:
        """Fills the targets that are copied from new tensors of a device.

        Returns:
            The report fields of each read.
        """

        def copy(indices: Collection[int], builder: Builder) -> None:
            for target in self._targets[Route.DEVICE_COPY]:
                if target.index in indices:
                    _copy_built(builder, target)

        return self._staging.copy_batches(checkpoint, copy, options=options, progress=progress)

    def fill_files(
        self, checkpoint: _native.Checkpoint, options: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Loads tensors into files, before any memory of the state is changed.

        Returns:
            The report fields of the reads.
        """
        with span("fill files"):
            filling = Filling(checkpoint, self._seen, options)
            self._filled_files = filling.fill(self._in_files)
        # A running save may still copy the targets: they are filled after its copies.
        hold_devices()
        return [] if filling.fields is None else [filling.fields]

    def finish(self, places: dict[int, BytesLocation]) -> Any:
        """Fills the remaining targets and the plain leaves; returns the state."""
        builder = self._builder(places)
        # Steps that can fail come first: nothing is assigned before everything is built.
        assignments: list[tuple[Any, Any, Any]] = []
        state = self._rebuild(self._node, self._state, builder, assignments)
        targets = self._targets
        for target in targets[Route.HOST_PART]:
            copy_elements(local_of(target.value), self._hosts[target.held].owner)
        for target in targets[Route.TARGET_COPY] + targets[Route.HOST_COPY]:
            _copy_built(builder, target)
        in_memory = targets[Route.IN_PLACE] + targets[Route.BOXES]
        bump_versions([target.memory.owner for target in in_memory])
        for container, key, value in assignments:
            container[key] = value
        return state

    @property
    def _has_parts(self) -> bool:
        """Whether only parts of some tensors are needed, or some tensors are read later."""
        is_boxed = any(target.boxes is not None for target in self._found)
        return bool(self._in_files) or self._staging.is_in_batches or is_boxed

    def _builder(self, places: dict[int, BytesLocation]) -> Builder:
        """Returns the builder of the remaining values, from bytes read and filled targets."""
        made = {}
        for target in self._targets[Route.IN_PLACE]:
            if target.place is None:
                places[target.index] = (bytes_of(target.value), 0)
            else:
                made[target.index] = target.value.detach()
        return Builder(self._seen.tensors, self._seen.aliases, places, made=made)

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


def _copy_built(builder: Builder, target: Target) -> None:
    """Copies the separately loaded value of a target into it."""
    if isinstance(target.value, np.ndarray):
        np.copyto(target.value, builder.leaf(target.node, "ndarray"), casting="no")
        return
    value, source = target.value, builder.leaf(target.node, "tensor")
    if target.boxes is not None:
        _copy_boxes(local_of(value), source, target.boxes)
    else:
        copy_elements(value, source)


def _copy_boxes(local: Any, source: Any, boxes: list[Box]) -> None:
    """Fills a rank's part of a `DTensor` from the whole tensor."""
    for box in boxes:
        wanted = tuple(slice(low, low + size) for low, size in zip(*box[:2], strict=True))
        place = tuple(slice(low, low + size) for low, size in zip(box.at, box.shape, strict=True))
        copy_elements(local[place], source[wanted])
