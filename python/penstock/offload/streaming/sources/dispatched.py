"""Models that accelerate, or transformers with it, has dispatched to disk: locates their weights.

Accelerate's hooks hold a map of the weights: an ``OffloadedWeightsLoader`` holds those in memory,
and for others an index with the safetensors file, or the shape and type of a raw file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedStateError
from penstock.io.files.extents import TensorExtent, Weights
from penstock.io.files.file_marks import FileMark
from penstock.io.files.safetensors_header import header_of
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class _Offloaded(NamedTuple):
    """A tensor of a module that is offloaded while the module is not called.

    Attributes:
        name: Its name in the model.
        key: Its key in the map.
        weights: The map that holds it.
        dtype: Name of the type that the model needs.
    """

    name: str
    key: str
    weights: Any
    dtype: str


def is_dispatched(model: Any) -> bool:
    """Whether hooks of accelerate load weights of a model."""
    return any(_hooks(module) for module in model.modules())


def weights_of_dispatched(model: Any) -> tuple[Weights, dict[str, Any]]:
    """Locates the weights of a dispatched model on disk; also returns those in memory, by name."""
    files = _IndexFiles()
    resident: dict[str, Any] = {}
    found: dict[str, TensorExtent] = {}
    for one in _offloaded(model):
        in_memory = one.weights.state_dict if hasattr(one.weights, "index") else one.weights
        if one.key in in_memory:
            resident[one.name] = in_memory[one.key]
        else:
            found[one.name] = files.stored(one)
    # Hooks untie tied weights, and each may have a file of its own.
    for name, other in getattr(model, "all_tied_weights_keys", {}).items():
        for tensors in (found, resident):
            if name in tensors and other in tensors:
                tensors[name] = tensors[other]
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in every:
        held = resident.get(name, tensor)
        if name not in found and held.device.type != "cpu":
            raise UnsupportedStateError(
                f"{name!r} is on {held.device}: a streamed model stays on the CPU; dispatch it to"
                " 'cpu' and 'disk' alone",
                key=name,
            )
        if name not in found:
            resident[name] = held
    return Weights(found, files.marks), resident


def take_off(model: Any, resident: Mapping[str, Any]) -> None:
    """Removes the hooks of accelerate, and puts the weights in memory back into the model."""
    from accelerate.hooks import remove_hook_from_submodules

    for module in model.modules():
        for hook in _hooks(module):
            # Otherwise removing the hook would load all weights.
            hook.offload = False
    remove_hook_from_submodules(model)
    model.__dict__.pop("hf_device_map", None)
    torch = dtypes.import_torch()
    tied: dict[int, Any] = {}
    for name, tensor in resident.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if attribute in module._buffers:
            module._buffers[attribute] = tensor
            continue
        if id(tensor) not in tied:
            is_one = isinstance(tensor, torch.nn.Parameter)
            tied[id(tensor)] = tensor if is_one else torch.nn.Parameter(tensor, requires_grad=False)
        module._parameters[attribute] = tied[id(tensor)]


def _hooks(module: Any) -> list[Any]:
    """The module's hooks that hold a map of weights."""
    hook = getattr(module, "_hf_hook", None)
    every = [] if hook is None else getattr(hook, "hooks", [hook])
    return [one for one in every if getattr(one, "offload", False)]


def _offloaded(model: Any) -> Iterator[_Offloaded]:
    from accelerate.utils import PrefixedDataset, named_module_tensors

    for name, module in model.named_modules():
        for hook in _hooks(module):
            weights, prefix = hook.weights_map, ""
            while isinstance(weights, PrefixedDataset):
                weights, prefix = weights.dataset, weights.prefix + prefix
            inside = named_module_tensors(
                module,
                include_buffers=hook.offload_buffers,
                recurse=hook.place_submodules,
                remove_non_persistent=True,
            )
            for own, tensor in inside:
                dtype = str(tensor.dtype).removeprefix("torch.")
                full = f"{name}.{own}" if name else own
                yield _Offloaded(full, prefix + own, weights, dtype)


class _IndexFiles:
    """The files of an index, each inspected once."""

    def __init__(self) -> None:
        self.marks: dict[str, FileMark] = {}
        self._headers: dict[str, dict[str, TensorExtent]] = {}

    def stored(self, one: _Offloaded) -> TensorExtent:
        """The location of a tensor's bytes."""
        name, key, weights, dtype = one
        entry, folder = weights.index[key], weights.save_folder
        path = entry.get("safetensors_file")
        if path is None:
            return self._plain(os.path.join(folder, f"{key}.dat"), name, entry)
        path = os.path.abspath(path)
        if path not in self._headers:
            self._inspect(path)
            header = header_of(Path(path))
            self._headers[path], self.marks[path] = header.tensors, header.mark
        inside = entry.get("weight_name", key)
        if (found := self._headers[path].get(inside)) is None:
            raise _gone(path, name, f"it has no tensor {inside!r}")
        if entry.get("dtype") not in (None, str(found.dtype).removeprefix("torch."), dtype):
            raise UnsupportedStateError(
                f"{name!r} is stored as {found.dtype} and was to be rounded to {entry['dtype']} on"
                f" the way to {dtype}: dispatch the model in the type that it is to have",
                key=name,
            )
        return found

    def _plain(self, path: str, name: str, entry: Mapping[str, Any]) -> TensorExtent:
        """A tensor that is the whole content of its file."""
        path = os.path.abspath(path)
        self.marks[path] = self._inspect(path)
        dtype = dtypes.any_torch_dtype(entry["dtype"])
        stored = TensorExtent(path, 0, tuple(entry["shape"]), dtype)
        if self.marks[path].nbytes != stored.nbytes:
            held = self.marks[path].nbytes
            raise _gone(path, name, f"it has {held} bytes, {name!r} takes {stored.nbytes}")
        return stored

    def _inspect(self, path: str) -> FileMark:
        try:
            return FileMark.of(os.stat(path))
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{path}: it is not there any more, and the model that was dispatched has weights"
                " in it: dispatch it again",
                path=path,
            ) from error


def _gone(path: str, name: str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {why}: dispatch the model again",
        path=os.path.dirname(path),
        file=os.path.basename(path),
        tensor=name,
    )
