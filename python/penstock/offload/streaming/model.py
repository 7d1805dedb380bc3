"""`stream`: a model whose weights are read from storage ahead of their use."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.checkpoint.steps.newest import is_penstock
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.io.files.extents import TensorExtent
from penstock.io.files.safetensors_header import weights_of
from penstock.io.own_io import another, own_io
from penstock.offload.streaming.budget import MEMORY_BYTES, Budget
from penstock.offload.streaming.expert_cache import ExpertCache
from penstock.offload.streaming.experts import mixtures_of
from penstock.offload.streaming.report import StreamReport, report_of
from penstock.offload.streaming.routing import route
from penstock.offload.streaming.sources import transformers as of_transformers
from penstock.offload.streaming.sources.checkpoint import weights_of_checkpoint
from penstock.offload.streaming.sources.conversions import renamed, whole_ones
from penstock.offload.streaming.sources.dispatched import (
    is_dispatched,
    take_off,
    weights_of_dispatched,
)
from penstock.offload.streaming.streamer import Streamer
from penstock.offload.streaming.unit_use import UnitUse, check_is_whole, keep_as_it_is
from penstock.offload.streaming.weights.memory import WeightMemory
from penstock.offload.streaming.weights.sealed_read import SealedReader
from penstock.offload.streaming.weights.shares import NO_SLOTS, needs_of
from penstock.offload.streaming.weights.units import PAGE_BYTES, ReadSpan, units_of
from penstock.offload.streaming.weights.verify_on_first_read import FirstReadVerifier
from penstock.sealing.unsealing import Unsealing
from penstock.tensors import dtypes
from penstock.tensors.arguments import decode_local_path
from penstock.tensors.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.io.files.extents import Composed, Weights
    from penstock.io.tensor_io import TensorIO
    from penstock.offload.streaming.experts import Mixture
    from penstock.sealing.identities import Identities
    from penstock.sealing.passphrase import Key
    from penstock.signing import SignatureKey, Signers

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
    identities: Identities | Key | Iterable[Key] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> Any:
    """Prepares a model for inference with weights that need not fit into memory.

    Only stored buffers are loaded first, and nothing is written. The weights of each block are read
    from safetensors files or a checkpoint, past the page cache, while the blocks before it compute;
    reading the first blocks starts now. As many blocks as fit stay in memory after the first pass.
    Of mixtures of experts only the experts chosen by the router are read.

    The first read of each range of a checkpoint is compared with its digests before anything is
    computed from it. No deletion and no save removes the checkpoint's files while the model exists.

    Args:
        model: A directory as written by `save_pretrained` of transformers; or a module, whose own
            parameters are dropped; or a model that accelerate, or transformers with it, has
            dispatched to disk: weights on disk are read there, weights in memory stay.
        memory_bytes: Bytes for weights, including those being read; a `Budget` to share them among
            several models. Activations and caches need additional memory.
        weights: The source of a module's weights: a directory of safetensors files, with tensors
            named as its parameters; or a checkpoint, or a store, whose newest complete step is
            used. For a model given as a directory: weights that replace its own.
        key: Key of a checkpoint's state under which the parameters are, as ``"model"``; empty if
            they are the state itself. Default: the place that has all of them.
        blocks: Names of the modules whose weights are loaded and dropped together, in the order of
            their calls, or patterns of names such as ``"*_proj"``. Smaller ones need less memory
            for reads, but nothing may use their weights except calls of them. Default: modules that
            transformers never splits, or the members of the outermost `torch.nn.ModuleList`.
        io: Reads; default: a `TensorIO` with default settings.
        device: Device that computes and whose memory `memory_bytes` limits, as ``"cuda"``; default:
            the host. Weights pass through pinned memory of ``io`` and are copied while the GPU
            computes; memory is refilled once the streams have used its content.
        identities: Keys that open a sealed checkpoint, as for `penstock.load`; weights that are not
            sealed are then refused. Default: those of ``PENSTOCK_IDENTITIES``, which refuse
            nothing. Sealed weights are opened chunk by chunk while blocks before them compute, and
            their tags are compared at every read.
        signed_by: Public keys of which one must have signed the checkpoint, as for `penstock.load`;
            other weights are refused. Every read is then compared with the signed hashes, not only
            the first one, as the files may be exchanged meanwhile.

    Returns:
        The model, in evaluation mode; a module is changed in place.

    Raises:
        ValueError: The memory is smaller than the weights used at a time, there is no such device,
            or a `Budget` is given with a device.
        CheckpointNotFoundError: There are neither safetensors files nor a checkpoint.
        CorruptCheckpointError: A file contradicts its header, or a checkpoint is damaged.
        StateMismatchError: Parameters of the model are not in the files, or have another shape.
        UnsupportedStateError: Bytes of a parameter are scattered in the checkpoint.
        MissingDependencyError: PyTorch or transformers is not installed.
        StorageError: A file cannot be opened, or the system has no room for the memory.
        SealedError: The checkpoint is sealed, and there are no identities.
        NotSealedError: ``identities`` are given, and the weights are not sealed.
        WrongKeyError: The identities do not open the checkpoint.
        TamperedError: Somebody without the key has changed the checkpoint.
        SignatureError: None of ``signed_by`` has signed the checkpoint; `NotSignedError` if the
            weights have no signature.

    A call of the model raises `CorruptCheckpointError` if a file has changed since, or bytes of a
    checkpoint are not those that were saved, `TamperedError` if a sealed chunk is not the one that
    was sealed for its place, `SignatureError` if bytes are not the signed ones, and `TransferError`
    if bytes cannot be read. On a GPU it raises `DeviceError` if the driver fails, in a fork, and
    while a stream is captured into a graph that would keep the addresses of weights that move.
    """
    if not isinstance(memory_bytes, Budget):
        MEMORY_BYTES.check("memory_bytes", memory_bytes)
    if not isinstance(key, str | None):
        raise TypeError(f"key={key!r:.80}: must be text or None")
    if not isinstance(blocks, Iterable | None):
        raise TypeError(f"blocks={blocks!r:.80}: must be names of modules, or None")
    # Each model has its own share of the device, even if models share workers.
    io = own_io(io)
    where = _device_of(device)
    if not isinstance(model, str | PathLike):
        check_is_whole(model)
    if where is not None:
        _check_device(model, memory_bytes, weights, where)
    unsealing = Unsealing.of(identities, signed_by=signed_by)
    model, found, held, memory = _model_and_weights(model, weights, key, memory_bytes, unsealing)
    _refuse_sealed(found, where)
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
    verifier = None if digests is None else FirstReadVerifier(digests, found.marks, another(io))
    sealed = None if found.chunks is None else SealedReader(found.chunks, found.marks, io)
    experts = _expert_cache(mixtures, found, another(io), verifier, where) if mixtures else None

    def made(share_bytes: int) -> Streamer:
        return Streamer(
            units,
            share_bytes,
            held_bytes,
            io,
            found.marks,
            verifier,
            memory,
            experts,
            where,
            sealed,
        )

    if isinstance(memory_bytes, Budget):
        slots = NO_SLOTS if experts is None else experts.slots
        streamer = memory_bytes._admit(needs_of(units, held_bytes, slots), made)
    else:
        streamer = made(memory_bytes)
    if is_dispatched(model):
        take_off(model, held)
    _fill_buffers(model, found.tensors, io, verifier, sealed)
    if where is not None:
        _move_buffers(model, where)
    streamer.begin()
    if experts is not None:
        for mixture in mixtures:
            route(mixture, experts)
    for index, unit in enumerate(units):
        for place, module in enumerate(unit.modules):
            UnitUse(module, streamer, index, place)
    for module in model.modules():
        keep_as_it_is(module)
    # Only the model refers to the streamer, and it to the model: both are freed together.
    object.__setattr__(model, _STREAMER, streamer)
    return model.eval()


def _device_of(device: Any) -> torch.device | None:
    """The device that a model is streamed to; None for the host."""
    found: Any = device_of(device)
    if found is None or found.type == "cpu":
        return None
    if found.type == "cuda" and found.index is None:
        # Resolved now, as the current device may be another one when the model is called.
        of_torch = dtypes.import_torch()
        found = of_torch.device("cuda", of_torch.cuda.current_device())
    return cast("torch.device", found)


def _check_device(
    model: Any, memory_bytes: int | Budget, weights: Any, device: torch.device
) -> None:
    """Raises unless a model can be streamed to a device."""
    if isinstance(memory_bytes, Budget):
        raise ValueError(f"memory_bytes: a Budget is of the host's memory: give bytes of {device}")
    if weights is None and not isinstance(model, str | PathLike) and is_dispatched(model):
        raise UnsupportedStateError(
            f"a model that was dispatched has weights of the host, and stays there: stream it to"
            f" {device} from its files, as stream(directory, device=…)",
            key="model",
        )


def _refuse_sealed(found: Weights, device: torch.device | None) -> None:
    """Raises if weights are sealed and go to a device."""
    if found.chunks is not None and device is not None:
        raise UnsupportedStateError(
            f"sealed weights are opened in memory of the host, and not streamed to {device} yet:"
            " leave out device=",
            key="device",
        )


def _expert_cache(
    mixtures: list[Mixture],
    found: Weights,
    io: TensorIO,
    verifier: FirstReadVerifier | None,
    device: torch.device | None,
) -> ExpertCache:
    """The experts of a model, read with a share of the device of their own."""
    sealed = None if found.chunks is None else SealedReader(found.chunks, found.marks, io)
    return ExpertCache(mixtures, io, found.marks, verifier, device, sealed)


def _move_buffers(model: Any, device: torch.device) -> None:
    """Moves buffers to a device, one that modules share once."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                # Keeps the old buffer alive, so that its id is not used again meanwhile.
                moved[id(buffer)] = buffer, buffer.to(device)
            module._buffers[name] = moved[id(buffer)][1]


def report(model: Any, *, gb_per_second: float | None = None) -> StreamReport:
    """Returns the memory use, counters and speed of a streamed model.

    Args:
        model: A model made by `stream`.
        gb_per_second: Speed of the storage in GB (10**9 bytes) per second, as measured with fio or
            `penstock bench io`. Default: the speed of the model's own reads.

    Raises:
        ValueError: `stream` has not made the model, or the speed is not positive.
    """
    if gb_per_second is not None and not 0 < gb_per_second < math.inf:
        raise ValueError(f"gb_per_second={gb_per_second!r}: must be above 0")
    streamer = getattr(model, _STREAMER, None)
    if not isinstance(streamer, Streamer):
        raise ValueError("model: stream() has not made it")
    return report_of(streamer, gb_per_second)


def _model_and_weights(
    model: Any,
    weights: str | PathLike[str] | None,
    key: str | None,
    budget: int | Budget,
    unsealing: Unsealing,
) -> tuple[Any, Weights, dict[str, Any], WeightMemory | None]:
    """The module, the location of its tensors, those already in memory, and memory for others."""
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
        unsealing.refuse_other("a dispatched model", "")
        return model, *weights_of_dispatched(model), None
    elif weights is None:
        raise TypeError("weights=: the directory with the safetensors files of the module")
    else:
        where = decode_local_path(weights)
    if is_penstock(where):
        if directory is not None:
            model = of_transformers.model_of(directory)
        # The checkpoint's names are those that the model had when it was saved.
        found = weights_of_checkpoint(where, model, key, unsealing)
        if directory is not None:
            of_transformers.untie(model, found.tensors)
        return model, found, {}, None
    unsealing.refuse_other(where, where)
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


def _memory_for(tensors: Mapping[str, TensorExtent | Composed], budget_bytes: int) -> WeightMemory:
    """Memory for stored tensors, including the partial pages at their ends."""
    stored_bytes = sum(one.nbytes + 2 * PAGE_BYTES for one in tensors.values())
    return WeightMemory(min(stored_bytes, budget_bytes))


def _held_bytes(model: Any, held: Mapping[str, Any]) -> int:
    """Bytes of parameters that are already in memory."""
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
    tensors: Mapping[str, TensorExtent | Composed],
    io: TensorIO,
    verifier: FirstReadVerifier | None,
    sealed: SealedReader | None,
) -> None:
    """Reads stored buffers, which are small and stay in memory."""
    torch = dtypes.import_torch()
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        stored = tensors.get(name)
        if not isinstance(stored, TensorExtent):
            continue
        if stored.shape_in_model != tuple(buffer.shape):
            raise StateMismatchError(f"{name!r} is of another shape in the files", key=name)
        content = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        memory, place = content.view(-1).view(torch.uint8), 0
        spans = []
        for run in stored.runs:
            spans.append(ReadSpan(*run, place))
            place += run.nbytes
        if sealed is not None:
            sealed.begin(spans, memory, str).result()
        else:
            io.read_all(
                (memory[one.place : one.place + one.nbytes], one.path, one.offset) for one in spans
            ).result()
        if verifier is not None:
            verifier.check(spans, memory, None)
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
    """The names of blocks, with those of modules in place of patterns."""
    known = {name: None for name, _ in model.named_modules()}
    found: list[str] = []
    for name in blocks:
        # No pattern means the model itself, whose name is empty.
        named = [name] if name in known else fnmatch.filter(filter(None, known), name)
        if not named:
            raise ValueError(f"blocks: the model has no module {name!r}")
        found += named
    return found
