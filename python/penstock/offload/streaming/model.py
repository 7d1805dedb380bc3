"""`stream`: a model whose weights are read from storage ahead of their use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.checkpoint.steps.newest import is_penstock
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.io.arguments import decode_local_path
from penstock.io.extents import Stored
from penstock.io.own_io import own_io
from penstock.io.safetensors_header import weights_of
from penstock.offload.streaming import transformers as of_transformers
from penstock.offload.streaming.budget import MEMORY_BYTES, Budget
from penstock.offload.streaming.checkpoint import weights_of_checkpoint
from penstock.offload.streaming.conversions import renamed, whole_ones
from penstock.offload.streaming.dispatched import (
    is_dispatched,
    take_off,
    weights_of_dispatched,
)
from penstock.offload.streaming.expert_cache import ExpertCache
from penstock.offload.streaming.experts import mixtures_of
from penstock.offload.streaming.memory import Memory
from penstock.offload.streaming.report import StreamReport, report_of
from penstock.offload.streaming.routing import route
from penstock.offload.streaming.shares import NO_SLOTS, needs_of
from penstock.offload.streaming.streamer import Streamer
from penstock.offload.streaming.unit_use import Use, check_is_whole, keep_as_it_is
from penstock.offload.streaming.units import PAGE_BYTES, Span, units_of
from penstock.offload.streaming.verify_on_first_read import FirstReads
from penstock.tensors import dtypes
from penstock.tensors.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.io.extents import Composed, Weights
    from penstock.io.tensor_io import TensorIO

_STREAMER = "_penstock_streamer"


def stream(
    model: Any,
    *,
    memory_bytes: int | Budget,
    weights: str | PathLike[str] | None = None,
    key: str | None = None,
    blocks: Iterable[str] | None = None,
    io: TensorIO | None = None,
    device: Any = None,
) -> Any:
    """A model for inference whose weights need not fit into memory.

    Nothing is loaded first but stored buffers, and nothing is written. Each block's weights are
    read from their safetensors files or their checkpoint, past the page cache, while the blocks
    before it compute; those of the first ones from now on. As many as there is room for stay in
    memory after the first pass. Of mixtures of experts those are read that the routers choose.

    What is read of a checkpoint for the first time is compared with its digests before anything is
    computed of it. No deletion and no save removes its files as long as the model is there.

    Args:
        model: A directory as `save_pretrained` of transformers makes it, or a module, whose own
            parameters are given up; or one that accelerate, or transformers with it, has dispatched
            to disk: what it has on disk is read there, what it has in memory stays.
        memory_bytes: For weights, those included that are on their way; a `Budget` for those of
            several models. Activations and caches come on top.
        weights: The directory with the safetensors files of a module, whose tensors have the names
            of its parameters; or a checkpoint, or a store, whose newest complete step is taken. Of
            a model that is a directory, where other weights are than there.
        key: Under what of the state of a checkpoint the parameters are, as ``"model"``; empty
            where they are the state. Without, where the state has all of them.
        blocks: Names of the modules whose weights come and go together, as they are called one
            after the other. Without, those that transformers never takes apart, or the members of
            the module's outermost `torch.nn.ModuleList`.
        io: Reads; one with its defaults without.
        device: Where the model computes, and whose memory `memory_bytes` are, as ``"cuda"``; the
            host without. Weights go through pinned memory of ``io``, and are copied while the GPU
            computes; memory is filled anew when the streams are done with what it held.

    Returns:
        The model, in evaluation mode; a module is changed in place.

    Raises:
        ValueError: The memory is too little for the weights that are used at a time, there is no
            such device, or a `Budget` is for one.
        CheckpointNotFoundError: There are neither safetensors files nor a checkpoint.
        CorruptCheckpointError: A file is not what its header says, or a checkpoint is damaged.
        StateMismatchError: The model has parameters that the files have not, or of another shape.
        UnsupportedStateError: Bytes of a parameter are scattered in the checkpoint.
        MissingDependencyError: PyTorch or transformers is not there.
        StorageError: A file cannot be opened, or the system has no room for the memory.

    A call of the model raises `CorruptCheckpointError` where a file has changed since, or what is
    read of a checkpoint is not what was saved, and `TransferError` where it cannot be read. On a
    GPU it raises `DeviceError` where the driver fails, in a fork, and where a stream is captured
    into a graph that would have weights where they are now.
    """
    if not isinstance(memory_bytes, Budget):
        MEMORY_BYTES.check("memory_bytes", memory_bytes)
    if not isinstance(key, str | None):
        raise TypeError(f"key={key!r:.80}: must be text or None")
    if not isinstance(blocks, Iterable | None):
        raise TypeError(f"blocks={blocks!r:.80}: must be names of modules, or None")
    # Each model has its own share of the device, also where models share workers.
    io = own_io(io)
    where = _device_of(device)
    if not isinstance(model, str | PathLike):
        check_is_whole(model)
    if where is not None:
        _check_device(model, memory_bytes, weights, where)
    model, found, held, memory = _model_and_weights(model, weights, key, memory_bytes)
    if getattr(model, "_no_split_modules", None) is not None:
        named = of_transformers.blocks_of(model) if blocks is None else list(blocks)
    else:
        named = _members(model) if blocks is None else list(blocks)
    stored = of_transformers.matched(model, found.tensors, held)
    is_on_device = where is not None
    mixtures = mixtures_of(model, stored, is_on_device=is_on_device)
    of_experts = {name for mixture in mixtures for name in mixture.names}
    whole = whole_ones(stored, of_experts)
    units = units_of(model, _checked(model, named), whole, is_on_device=is_on_device)
    held_bytes = _held_bytes(model, held)
    digests = found.digests
    first_reads = None if digests is None else FirstReads(digests, found.marks, io._another())
    experts = None
    if mixtures:
        experts = ExpertCache(mixtures, io._another(), found.marks, first_reads, where)

    def made(share_bytes: int) -> Streamer:
        return Streamer(
            units, share_bytes, held_bytes, io, found.marks, first_reads, memory, experts, where
        )

    if isinstance(memory_bytes, Budget):
        slots = NO_SLOTS if experts is None else experts.slots
        streamer = memory_bytes._admit(needs_of(units, held_bytes, slots), made)
    else:
        streamer = made(memory_bytes)
    if is_dispatched(model):
        take_off(model, held)
    _fill_buffers(model, found.tensors, io, first_reads)
    if where is not None:
        _move_buffers(model, where)
    streamer.begin()
    if experts is not None:
        for mixture in mixtures:
            route(mixture, experts)
    for index, unit in enumerate(units):
        for module in unit.modules:
            Use(module, streamer, index)
    for module in model.modules():
        keep_as_it_is(module)
    # By nothing else than the model, which it refers to: both go together.
    object.__setattr__(model, _STREAMER, streamer)
    return model.eval()


def _device_of(device: Any) -> torch.device | None:
    """The device that a model is streamed to; None for the host.

    Raises:
        ValueError: PyTorch knows no such device.
    """
    found: Any = device_of(device)
    if found is None or found.type == "cpu":
        return None
    if found.type == "cuda" and found.index is None:
        # Who calls the model may have another one as the current one.
        of_torch = dtypes.import_torch()
        found = of_torch.device("cuda", of_torch.cuda.current_device())
    return cast("torch.device", found)


def _check_device(
    model: Any, memory_bytes: int | Budget, weights: Any, device: torch.device
) -> None:
    """That a model can be streamed to a device.

    Raises:
        ValueError: Its memory is shared with others.
        UnsupportedStateError: It was dispatched.
    """
    if isinstance(memory_bytes, Budget):
        raise ValueError(f"memory_bytes: a Budget is of the host's memory: give bytes of {device}")
    if weights is None and not isinstance(model, str | PathLike) and is_dispatched(model):
        raise UnsupportedStateError(
            f"a model that was dispatched has weights of the host, and stays there: stream it to"
            f" {device} from its files, as stream(directory, device=…)",
            key="model",
        )


def _move_buffers(model: Any, device: torch.device) -> None:
    """Has a device have what does not come and go, once where modules share it."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                # With what it was, whose number nothing else gets meanwhile.
                moved[id(buffer)] = buffer, buffer.to(device)
            module._buffers[name] = moved[id(buffer)][1]


def report(model: Any, *, gb_per_second: float | None = None) -> StreamReport:
    """What a model that `stream` has made holds and has done.

    Args:
        model: The model.
        gb_per_second: What storage gives, GB (10**9 bytes) a second, as fio or `penstock bench io`
            measure it. Without, what the reads had while there were any.

    Raises:
        ValueError: It is another one, or the rate is none.
    """
    if gb_per_second is not None and not 0 < gb_per_second < math.inf:
        raise ValueError(f"gb_per_second={gb_per_second!r}: must be above 0")
    streamer = getattr(model, _STREAMER, None)
    if not isinstance(streamer, Streamer):
        raise ValueError("model: stream() has not made it")
    return report_of(streamer, gb_per_second)


def _model_and_weights(
    model: Any, weights: str | PathLike[str] | None, key: str | None, budget: int | Budget
) -> tuple[Any, Weights, dict[str, Any], Memory | None]:
    """A module, where its tensors lie by its names for them, those that it has, and memory."""
    directory = None
    if isinstance(model, str | PathLike):
        directory = decode_local_path(model)
        where = directory if weights is None else decode_local_path(weights)
        if is_penstock(where) and not (Path(directory) / "config.json").exists():
            raise ValueError(
                f"{directory} does not say what model its weights are of: pass that,"
                f" stream(module, weights={where!r}, …), or put the config.json of transformers"
                " there"
            )
    elif weights is None and is_dispatched(model):
        return model, *weights_of_dispatched(model), None
    elif weights is None:
        raise TypeError("weights=: the directory with the safetensors files of the module")
    else:
        where = decode_local_path(weights)
    if is_penstock(where):
        if directory is not None:
            model = of_transformers.model_of(directory)
        # Its names are those that the model had when it was saved.
        found = weights_of_checkpoint(where, model, key)
        if directory is not None:
            of_transformers.untie(model, found.tensors)
        return model, found, {}, None
    if key is not None:
        raise ValueError(f"key={key!r}: {where} is no checkpoint, whose state has keys")
    found = weights_of(where)
    memory = None
    if directory is not None:
        memory = None if isinstance(budget, Budget) else _memory_for(found.tensors, budget)
        model = of_transformers.model_of(directory, of_transformers.dtype_of(found.tensors))
    if getattr(model, "_no_split_modules", None) is not None:
        found = replace(found, tensors=renamed(model, found.tensors))
    if directory is not None:
        of_transformers.untie(model, found.tensors)
    return model, found, {}, memory


def _memory_for(tensors: Mapping[str, Stored | Composed], budget_bytes: int) -> Memory:
    """Memory for what is stored, and for the pages that it begins and ends in the middle of."""
    stored_bytes = sum(one.nbytes + 2 * PAGE_BYTES for one in tensors.values())
    return Memory(min(stored_bytes, budget_bytes))


def _held_bytes(model: Any, held: Mapping[str, Any]) -> int:
    """Memory of parameters that are there already."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    storages = {
        storage.data_ptr(): storage.nbytes()
        for name, tensor in held.items()
        if name in names
        for storage in [tensor.untyped_storage()]
    }
    return sum(storages.values())


def _fill_buffers(
    model: Any,
    tensors: Mapping[str, Stored | Composed],
    io: TensorIO,
    first_reads: FirstReads | None,
) -> None:
    """Reads what is stored of the buffers, which are small and stay."""
    torch = dtypes.import_torch()
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        stored = tensors.get(name)
        if not isinstance(stored, Stored):
            continue
        if stored.shape_in_model != tuple(buffer.shape):
            raise StateMismatchError(f"{name!r} is of another shape in the files", key=name)
        content = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        memory, place = content.view(-1).view(torch.uint8), 0
        spans = []
        for run in stored.runs:
            spans.append(Span(*run, place))
            place += run.nbytes
        io.read_all(
            (memory[one.place : one.place + one.nbytes], one.path, one.offset) for one in spans
        ).result()
        if first_reads is not None:
            first_reads.check(spans, memory, None)
        made = torch.empty(stored.shape_in_model, dtype=buffer.dtype, device="cpu")
        stored.fill(made, content)
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = made


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
