"""`stream`: a model whose weights are read from storage ahead of their use."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.offload.streaming import transformers as of_transformers
from penstock.offload.streaming.safetensors import weights_of
from penstock.offload.streaming.shares import shared_out
from penstock.offload.streaming.streamer import Streamer
from penstock.offload.streaming.units import units_of
from penstock.offload.tensor_io import TensorIO
from penstock.option_kinds import Number
from penstock.state import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.offload.streaming.stored import Stored

_BYTES = Number(1, (1 << 63) - 1, "bytes", is_open=False)


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What a streamed model holds and has done.

    Attributes:
        weight_bytes: Of all its weights, each once.
        resident_bytes: Memory of those that stay once they were read.
        passing_bytes: Memory that the others pass through.
        read_bytes: That were asked of storage so far.
        pass_bytes: That a pass through all blocks reads, once what stays is there.
        stalled_seconds: That calls have waited for weights so far.
        uses: Calls of blocks, and of what stands beside them.
        hits: Of them, those whose weights were there already.
    """

    weight_bytes: int
    resident_bytes: int
    passing_bytes: int
    read_bytes: int
    pass_bytes: int
    stalled_seconds: float
    uses: int
    hits: int


def stream(
    model: Any,
    *,
    memory_bytes: int,
    weights: str | os.PathLike[str] | None = None,
    blocks: Iterable[str] | None = None,
    io: TensorIO | None = None,
) -> Any:
    """A model for inference whose weights need not fit into memory.

    Before the first call only stored buffers are read, and nothing is written. Each block's weights
    are read from their safetensors files, past the page cache, while the blocks before it compute.
    As many as there is room for stay in memory after the first pass.

    Args:
        model: A directory as `save_pretrained` of transformers makes it, or a module, whose own
            parameters are given up.
        memory_bytes: For weights, those included that are on their way. Activations and caches
            come on top.
        weights: The directory with the safetensors files of a module; their tensors have the names
            of its parameters.
        blocks: Names of the modules whose weights come and go together, as they are called one
            after the other. Without, those that transformers never takes apart, or the members of
            the module's outermost `torch.nn.ModuleList`.
        io: Reads; one with its defaults without.

    Returns:
        The model, in evaluation mode; a module is changed in place.

    Raises:
        ValueError: The memory is too little for the weights that are used at a time.
        CheckpointNotFoundError: There are no safetensors files.
        CorruptCheckpointError: A file is not what its header says.
        StateMismatchError: The model has parameters that the files have not, or of another shape.
        MissingDependencyError: PyTorch or transformers is not there.

    A call of the model raises `CorruptCheckpointError` where a file has changed since, and
    `TransferError` where it cannot be read.
    """
    _BYTES.check("memory_bytes", memory_bytes)
    if isinstance(model, str | os.PathLike):
        directory = os.fspath(model)
        found = weights_of(directory)
        model = of_transformers.model_of(directory)
    elif weights is None:
        raise TypeError("weights=: the directory with the safetensors files of the module")
    else:
        found = weights_of(os.fspath(weights))
    if getattr(model, "_no_split_modules", None) is not None:
        tensors = of_transformers.renamed(model, found.tensors)
        named = of_transformers.blocks_of(model) if blocks is None else list(blocks)
    else:
        tensors = dict(found.tensors)
        named = _members(model) if blocks is None else list(blocks)
    stored = of_transformers.matched(model, tensors)
    units = units_of(model, _checked(model, named), stored)
    shares = shared_out(units, memory_bytes)
    io = io or TensorIO()
    _fill_buffers(model, tensors, io)
    streamer = Streamer(units, shares, io, found.marks)
    for index, unit in enumerate(units):
        for module in unit.modules:
            _hook(module, index, streamer)
    for module in model.modules():
        _keep_as_it_is(module)
    _streamers[model] = streamer
    return model.eval()


def report(model: Any) -> StreamReport:
    """What a model that `stream` has made holds and has done.

    Raises:
        ValueError: It is another one.
    """
    streamer = _streamers.get(model)
    if streamer is None:
        raise ValueError("model: stream() has not made it")
    counts, shares = streamer.counts, streamer.shares
    units = streamer.units
    passing = [unit for index, unit in enumerate(units) if index not in shares.resident]
    return StreamReport(
        weight_bytes=sum(unit.weight_bytes for unit in units),
        resident_bytes=shares.resident_bytes,
        passing_bytes=shares.ring_bytes,
        read_bytes=counts.read_bytes,
        pass_bytes=sum(span.nbytes for unit in passing for span in unit.spans),
        stalled_seconds=counts.stalled_seconds,
        uses=counts.uses,
        hits=counts.hits,
    )


_streamers: weakref.WeakKeyDictionary[Any, Streamer] = weakref.WeakKeyDictionary()


def _fill_buffers(model: Any, tensors: Mapping[str, Stored], io: TensorIO) -> None:
    """Reads what is stored of the buffers, which are small and stay."""
    torch = dtypes.import_torch()
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if (stored := tensors.get(name)) is None:
            continue
        if stored.shape != tuple(buffer.shape):
            raise StateMismatchError(f"{name!r} is of another shape in the files", key=name)
        content = torch.empty(stored.shape, dtype=stored.dtype)
        io.read(content, stored.path, stored.offset).result()
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = content.to(buffer.dtype)


def _members(model: Any) -> list[str]:
    """The members of the outermost lists of modules."""
    torch = dtypes.import_torch()
    lists = [name for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{one}.") for one in lists)]
    return [f"{name}.{index}" for name in outer for index in range(len(model.get_submodule(name)))]


def _checked(model: Any, blocks: list[str]) -> list[str]:
    known = {name for name, _ in model.named_modules()}
    for name in blocks:
        if name not in known:
            raise ValueError(f"blocks: the model has no module {name!r}")
    return blocks


def _hook(module: Any, index: int, streamer: Streamer) -> None:
    def before(*_: Any) -> None:
        streamer.enter(index)

    def after(*_: Any) -> None:
        streamer.leave(index)

    # First of all before and last of all behind, so that hooks of others find the weights.
    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)


def _keep_as_it_is(module: Any) -> None:
    """Refuses what would move or convert parameters that are not there."""
    torch = dtypes.import_torch()

    def apply(function: Callable[[Any], Any], recurse: bool = True) -> Any:
        del recurse
        for parameter in module.parameters():
            probe = torch.empty(0, dtype=parameter.dtype)
            changed = function(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise UnsupportedStateError(
                    f"a streamed model stays on the CPU and in its type, {probe.dtype}: convert"
                    " the files, or load it whole",
                    key="model",
                )
        return module

    module._apply = apply
