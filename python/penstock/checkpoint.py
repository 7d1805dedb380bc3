"""One checkpoint: `save`, `load`, `inspect`, `verify`."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import _native, dtypes, tree
from penstock.errors import CheckpointNotFoundError, PenstockError, UnsupportedStateError
from penstock.flatten import flatten
from penstock.gcpause import gc_paused
from penstock.inspection import CheckpointInfo, describe, part_name
from penstock.options import Options
from penstock.partial import settle
from penstock.progress import Progress, shown
from penstock.reports import LoadReport, Problem, SaveReport, VerifyResult
from penstock.restore import Builder, Place, needed
from penstock.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

STEP_MAX = (1 << 63) - 1
_METADATA_INT_MAX = (1 << 63) - 1


def save(
    path: str | os.PathLike[str] | bytes,
    state: Any,
    *,
    overwrite: bool = False,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> SaveReport:
    """Saves a state durably: when this returns, a crash or power cut cannot take it away.

    The state is any nesting of dicts, lists, tuples and sets over tensors, NumPy arrays, anything
    with DLPack or the buffer protocol, and plain values: None, bool, int of any size, float
    (nan and inf included), complex, str, bytes, NumPy scalars and dtypes, `torch.Size`,
    `torch.dtype`, `torch.device`. Types, dictionary order, keys that are no text, and ties between
    tensors come back as they were. What could not come back as it was is refused. Exceptions, on
    purpose: of a tensor the elements, dtype and shape are kept, not its device, ``requires_grad``
    or attributes, and strides only of a view whose base is saved as well; a `torch.nn.Parameter`
    comes back as a tensor.

    Tensors of the host are read where they are: they must not change during the call.

    Args:
        path: The checkpoint's directory; made if missing, its parents too.
        state: What to save.
        overwrite: Replace a complete checkpoint at the path. It stays loadable until the new one
            is committed.
        step: The training step, recorded beside the state.
        metadata: A note of plain JSON, readable with `penstock.inspect`.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Returns:
        What was written and how.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False.
        UnsupportedStateError: A leaf cannot be stored; the message names it.
        StorageError: The operating system failed an operation: disk full, read-only, …

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> report = penstock.save(path, {"w": np.zeros((2, 3), "float32"), "lr": 0.1})
        >>> report.tensor_bytes
        24
        >>> penstock.load(path)["lr"]
        0.1
    """
    where = decode_path(path)
    note = _encode_metadata(metadata)
    step = None if step is None else check_step(step)
    settings = to_native(options)
    began = time.perf_counter()
    flat = flatten(state)
    flatten_seconds = time.perf_counter() - began
    with shown(progress, "saving") as update:
        fields = _native.save(
            where,
            flat.tensors,
            flat.aliases,
            flat.tree,
            step=step,
            metadata=note,
            overwrite=bool(overwrite),
            options=settings,
            progress=update,
        )
    phases = {"flatten": flatten_seconds, **fields["phases"]}
    seconds = time.perf_counter() - began
    return SaveReport(**{**fields, "path": where, "phases": phases, "seconds": seconds})


def load(
    path: str | os.PathLike[str] | bytes,
    *,
    into: Any = None,
    keys: str | Iterable[str] | None = None,
    device: Any = None,
    options: Options | None = None,
    allow_partial: bool = False,
    progress: bool | Progress = False,
    report: Callable[[LoadReport], object] | None = None,
) -> Any:
    """Loads a state; every byte handed out has been checked against its digest.

    Args:
        path: The checkpoint's directory.
        into: A state of the same structure whose tensors and arrays are filled in place and whose
            plain values are replaced. Everything is compared before anything is written. If
            reading fails half-way (`CorruptCheckpointError`, `StorageError`), the contents of the
            targets are undefined.
        keys: Dotted names of the leaves to load, or patterns of `fnmatch` over them, such as
            ``"model.*"`` (``*`` also matches dots). Only their bytes are read. The result keeps
            the structure: containers that are left without a leaf are dropped, lists and tuples
            close up. With ``into``, only these leaves are touched. The only leaf of a state that
            is no container is called ``"value"``.
        device: Where to put tensors, as for `torch.Tensor.to`; None for the host. Arrays stay on
            the host.
        options: How bytes move; None for ``Options()``.
        allow_partial: Of a checkpoint that `penstock.salvage` made, load what is there; what is
            missing is left out as with ``keys``, and left alone in ``into``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.
        report: Called with the `LoadReport` when the state is complete; ``reports.append`` of a
            list keeps it, ``print`` shows it.

    Returns:
        The state, or ``into`` (rebuilt where it is a tuple). New tensors and arrays of the host
        are windows over few large buffers, and each keeps its buffer alive: clone what is to
        outlive the rest. Without PyTorch installed, tensors come back as NumPy arrays where NumPy
        has their type.

    Raises:
        CheckpointNotFoundError: There is nothing at the path.
        IncompleteCheckpointError: The save there never finished.
        PartialCheckpointError: It was salvaged, lacks something that was asked for, and
            ``allow_partial`` is False.
        CorruptCheckpointError: The checkpoint is damaged, or none of Penstock's.
        FormatVersionError: A newer Penstock wrote it.
        StateMismatchError: A key matches nothing, or ``into`` does not fit.
        MissingDependencyError: The state holds values of a package that is not installed.
        StorageError: The operating system failed an operation.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"model": {"w": np.ones(3)}, "step": 7})
        >>> penstock.load(path, keys="model.*")
        {'model': {'w': array([1., 1., 1.])}}
        >>> w = np.zeros(3)
        >>> penstock.load(path, into={"model": {"w": w}, "step": 0})["step"]
        7
        >>> w
        array([1., 1., 1.])
        >>> reports = []
        >>> state = penstock.load(path, report=reports.append)
        >>> reports[0].verified
        True
    """
    loaded = read(
        decode_path(path),
        into=into,
        keys=keys,
        device=device,
        options=options,
        progress=progress,
        allow_partial=allow_partial,
    )
    if report is not None:
        report(loaded.report)
    return loaded.state


def inspect(path: str | os.PathLike[str] | bytes) -> CheckpointInfo:
    """Tells what is in a checkpoint, without reading its tensor data.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointNotFoundError: There is nothing at the path.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: The checkpoint is damaged, or none of Penstock's.
        FormatVersionError: A newer Penstock wrote it.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"w": np.zeros((2, 3), "float32")}, metadata={"run": "a"})
        >>> info = penstock.inspect(path)
        >>> [(tensor.name, tensor.dtype, tensor.shape) for tensor in info.tensors]
        [('w', 'float32', (2, 3))]
        >>> info.metadata
        {'run': 'a'}
    """
    where = decode_path(path)
    with gc_paused():
        return describe(_native.open(where), where)


def verify(
    path: str | os.PathLike[str] | bytes,
    *,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> VerifyResult:
    """Reads every byte of a checkpoint and compares it with its digest.

    Damage is a result, not an exception.

    Args:
        path: The checkpoint's directory; of a store, see `CheckpointStore.verify`.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Raises:
        CheckpointNotFoundError: There is nothing at the path.
        StorageError: The operating system failed an operation.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"w": np.zeros(3)})
        >>> penstock.verify(path).ok
        True
    """
    where = decode_path(path)
    with shown(progress, "verifying") as update:
        fields = _native.verify(where, options=to_native(options), progress=update)
    problems = tuple(Problem(**problem) for problem in fields["problems"])
    return VerifyResult(**{**fields, "path": where, "problems": problems})


_REPLACED_MAX = 8
"""How often a checkpoint may be replaced while it is read before that is an error."""


class Loaded(NamedTuple):
    """A state and how it was loaded."""

    state: Any
    report: LoadReport


def read(
    path: str,
    *,
    into: Any = None,
    keys: str | Iterable[str] | None = None,
    device: Any = None,
    options: Options | None = None,
    progress: bool | Progress = False,
    allow_partial: bool = False,
) -> Loaded:
    """`load`, with the report.

    A checkpoint that is replaced while it is read is read again: at every moment there is a whole
    one.
    """
    wanted = (into, keys, device, options, progress, bool(allow_partial))
    with gc_paused():
        for _ in range(_REPLACED_MAX):
            try:
                return _read_once(path, *wanted)
            except CheckpointNotFoundError:
                if not os.path.exists(os.path.join(path, "manifest.json")):
                    raise
        return _read_once(path, *wanted)


def _read_once(
    path: str,
    into: Any,
    keys: str | Iterable[str] | None,
    device: Any,
    options: Options | None,
    progress: bool | Progress,
    allow_partial: bool,
) -> Loaded:
    if into is not None and device is not None:
        raise ValueError("device= places new tensors, into= fills existing ones: give one of them")
    patterns = _check_patterns(keys)
    settings = to_native(options)
    target_device = _check_device(device)
    began = time.perf_counter()
    targets = None
    indices = None
    checkpoint = _native.open(path)
    try:
        if checkpoint.world_size > 1:
            raise PenstockError(
                f"{path} was written by {checkpoint.world_size} ranks, each of which has a state "
                "of its own: this version does not put them together"
            )
        tensors, aliases = checkpoint.tensors(), checkpoint.aliases()
        part = part_name(checkpoint.files())
        with tree.reading(path, part):
            node = tree.parse(checkpoint.tree)
            if patterns is not None:
                node = tree.select(node, patterns, path)
            node, is_left_out = settle(node, checkpoint, path, allow_partial=allow_partial)
            if patterns is not None:
                indices = needed(node, tensors, aliases)
            if into is not None:
                is_partial = patterns is not None or is_left_out
                targets = Targets(node, into, tensors, aliases, path, is_partial=is_partial)
        opened = time.perf_counter()
        with shown(progress, "loading") as update:
            buffers, places, fields = checkpoint.load(
                indices,
                None if targets is None else targets.native(),
                options=settings,
                progress=update,
            )
    finally:
        # An exception keeps this frame, and must not keep the files from being deleted.
        checkpoint.release()
    loaded = time.perf_counter()
    where: dict[int, Place] = {
        index: (buffers[place[0]], place[1])
        for index, place in zip(
            range(len(tensors)) if indices is None else indices, places, strict=True
        )
        if place is not None
    }
    with tree.reading(path, part):
        if targets is None:
            state = Builder(tensors, aliases, where, target_device).build(node)
        else:
            builder = Builder(tensors, aliases, {**where, **targets.places()})
            state = targets.finish(node, into, builder)
    ended = time.perf_counter()
    phases = {
        "open": opened - began,
        **fields["phases"],
        "build": ended - loaded,
    }
    changes = {"path": path, "phases": phases, "seconds": ended - began}
    if checkpoint.partial is not None and checkpoint.partial[1]:
        # The digests are those that it was salvaged with: they prove nothing about the original.
        changes["verified"] = False
    return Loaded(state, LoadReport(**{**fields, **changes}))


def decode_path(path: str | os.PathLike[str] | bytes) -> str:
    """A path as text; bytes as the file system's encoding has them.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty, or holds a NUL, which no file name can.
    """
    text = os.fsdecode(path)
    if not text:
        raise ValueError("the path is empty")
    if "\0" in text:
        raise ValueError(f"the path {text!r} holds a NUL character")
    return text


def check_step(step: Any) -> int:
    """A training step: a whole number that is not negative.

    Raises:
        TypeError: It is no int.
        ValueError: It is out of range.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step={step!r}: must be an int")
    number = step.__index__()
    if not 0 <= number <= STEP_MAX:
        raise ValueError(f"step={number}: must be between 0 and {STEP_MAX}")
    return int(number)


def to_native(options: Options | None) -> dict[str, object]:
    """The options of a call as the native module takes them."""
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise TypeError(f"options={options!r}: must be penstock.Options or None")
    return options.to_native()


def _check_patterns(keys: str | Iterable[str] | None) -> list[str] | None:
    if keys is None:
        return None
    patterns = [keys] if isinstance(keys, str) else list(keys)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"keys={keys!r}: must be text or a list of text")
    if not patterns:
        raise ValueError("keys is empty: leave it out to load everything")
    return patterns


def _check_device(device: Any) -> Any:
    """A device that tensors can be put on; None for the host."""
    if device is None or device == "cpu":
        return None
    torch = dtypes.import_torch()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device={device!r} cannot be used: {reason}") from error
    place = torch.device(device)
    return None if place.type == "cpu" else place


def _encode_metadata(metadata: Mapping[str, Any] | None) -> str:
    """A note as JSON text, refused if it would come back as something else."""
    if metadata is None:
        return "{}"
    try:
        text = json.dumps(
            dict(metadata), allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        text.encode("utf-8")
        is_same = json.loads(text, parse_int=_small_int) == dict(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedStateError(
            f"metadata is no plain JSON ({error}): use dicts with str keys, lists, str, int, "
            "float, bool and None; put other values into the state",
            key="metadata",
        ) from error
    if not is_same:
        raise UnsupportedStateError(
            "metadata would come back changed: use dicts with str keys, lists, str, int, float, "
            "bool and None; put tuples and other values into the state",
            key="metadata",
        )
    return text


def _small_int(text: str) -> int:
    value = int(text)
    if abs(value) > _METADATA_INT_MAX:
        raise ValueError(f"the integer {text} does not fit 64 bits")
    return value
