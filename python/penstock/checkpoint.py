"""One checkpoint: `save`, `load`, `inspect`, `verify`."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import _native, dtypes, tree
from penstock.errors import (
    CheckpointNotFoundError,
    PenstockWarning,
    StateMismatchError,
    UnsupportedStateError,
)
from penstock.fetch import fetch
from penstock.flatten import flatten
from penstock.gcpause import gc_paused
from penstock.inspection import CheckpointInfo, describe, part_name
from penstock.options import Options
from penstock.partial import settle
from penstock.pending import save_together
from penstock.progress import Progress, shown
from penstock.ranks import find as find_ranks
from penstock.ranks import own_rank
from penstock.reports import LoadReport, Problem, SaveReport, VerifyResult
from penstock.restore import BYTES_TAGS, Builder, Place, needed
from penstock.saving import Target
from penstock.targets import Targets
from penstock.view import View, view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed import ProcessGroup

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
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
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

    Where `torch.distributed` is initialized, all ranks call this with the same arguments and make
    one checkpoint together, on a file system that they share. Each writes what it holds of every
    `DTensor`; what several hold is written once, and so is a plain tensor that is the same on
    several ranks, in every element. Other plain tensors, and whatever is in `PerRank`, are kept for
    each rank, and so is everything else (arrays, byte strings, plain values), and vectors of up to
    64 KiB of ``uint8``: states of random generators. Either all ranks return or all raise.

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
        process_group: The ranks that save together; None for all, if there are any.
        no_dist: Save alone, whatever ranks there are: as one of them, or a different state on each.

    Returns:
        What was written and how.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False.
        RankError: Another rank failed, died, hangs, or saves something else.
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
    note = encode_metadata(metadata)
    step = None if step is None else check_step(step)
    settings = to_native(options)
    ranks = find_ranks(process_group, no_dist=no_dist)
    if ranks is not None:
        target = Target(path=where, step=step, metadata=note, overwrite=bool(overwrite))
        together = ranks.enter(target.label, settings["rank_timeout_seconds"], step)
        return save_together(target, state, together, settings, progress)
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
    rank: int | None = None,
) -> Any:
    """Loads a state; every byte handed out has been checked against its digest.

    Ranks load each for itself, and any number of them what any number has saved. A `DTensor` in
    ``into`` is filled with what this rank holds of it, and only that is read, however the tensor
    was laid out when it was saved. Without ``into``, every tensor comes back whole. Of what was
    kept for each rank, the own value comes back; beyond the ranks that saved, that of the rank
    modulo their number.

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
        rank: Whose state to load, exactly as that rank saved it; None for that of this process
            where `torch.distributed` is initialized, and else of rank 0. To what ``into`` holds or
            ``keys`` names, and to the whole state where one process loads it, what only other
            ranks had is added in its place, such as layers of other pipeline stages. Where ranks
            had values of their own under the same keys, a `PenstockWarning` says so.

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
        StateMismatchError: A key matches nothing, ``into`` does not fit, or what ranks saved apart
            makes no single state, as where pipeline stages use the same keys.
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
    wanted = Wanted(
        into=into,
        keys=keys,
        device=device,
        progress=progress,
        allow_partial=bool(allow_partial),
        rank=rank,
    )
    loaded = read(decode_path(path), wanted, options)
    for message in loaded.warnings:
        warnings.warn(message, PenstockWarning, stacklevel=2)
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


_NAMED_MAX = 8

_REPLACED_MAX = 8
"""How often a checkpoint may be replaced while it is read before that is an error."""


class Loaded(NamedTuple):
    """A state and how it was loaded.

    Attributes:
        state: The state.
        report: How.
        is_whole: Whether every byte of every file was read.
        warnings: What the caller should know of it.
    """

    state: Any
    report: LoadReport
    is_whole: bool
    warnings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What of a checkpoint a caller wants, and where; see `load`.

    Attributes:
        own_rank: Who asks, where ``rank`` is None; None to find that out.
    """

    into: Any = None
    keys: str | Iterable[str] | None = None
    device: Any = None
    progress: bool | Progress = False
    allow_partial: bool = False
    rank: int | None = None
    own_rank: int | None = None


def read(path: str, wanted: Wanted, options: Options | None) -> Loaded:
    """`load`, with the report.

    A checkpoint that is replaced while it is read is read again: at every moment there is a whole
    one.
    """
    with gc_paused():
        for _ in range(_REPLACED_MAX):
            try:
                return _Reading(path, wanted, options).run()
            except CheckpointNotFoundError:
                if not os.path.exists(os.path.join(path, "manifest.json")):
                    raise
        return _Reading(path, wanted, options).run()


class _Reading:
    """One attempt to load a checkpoint."""

    def __init__(self, path: str, wanted: Wanted, options: Options | None) -> None:
        if wanted.into is not None and wanted.device is not None:
            raise ValueError(
                "device= places new tensors, into= fills existing ones: give one of them"
            )
        self._path = path
        self._wanted = wanted
        self._patterns = _check_patterns(wanted.keys)
        self._options = to_native(options)
        self._device = _check_device(wanted.device)
        self._warnings: list[str] = []
        self._rank, self._is_alone = self._whose()

    def run(self) -> Loaded:
        """Loads it."""
        began = time.perf_counter()
        checkpoint = _native.open(self._path)
        try:
            part = part_name(checkpoint.files())
            with tree.reading(self._path, part):
                seen, targets = self._look(checkpoint)
                selection = self._select(seen, targets)
            opened = time.perf_counter()
            with shown(self._wanted.progress, "loading") as update:
                fetched = fetch(
                    checkpoint, seen, selection, targets, options=self._options, progress=update
                )
        finally:
            # An exception keeps this frame, and must not keep the files from being deleted.
            checkpoint.release()
        loaded = time.perf_counter()
        with tree.reading(self._path, part):
            state = self._build(seen, targets, fetched.places)
        ended = time.perf_counter()
        phases = {
            "open": opened - began,
            **fetched.fields["phases"],
            "build": ended - loaded,
        }
        changes = {"path": self._path, "phases": phases, "seconds": ended - began}
        if checkpoint.partial is not None and checkpoint.partial[1]:
            # The digests are those that it was salvaged with: they prove nothing about the
            # original.
            changes["verified"] = False
        report = LoadReport(**{**fetched.fields, **changes})
        return Loaded(state, report, fetched.is_whole, self._warnings)

    def _whose(self) -> tuple[int, bool]:
        """Whose state is loaded, and whether exactly as that rank saved it."""
        wanted = self._wanted
        if wanted.rank is not None:
            return _check_rank(wanted.rank), True
        rank = own_rank() if wanted.own_rank is None else wanted.own_rank
        if rank is None:
            return 0, False
        return rank, wanted.into is None and self._patterns is None

    def _look(self, checkpoint: _native.Checkpoint) -> tuple[View, Targets | None]:
        """What is to be loaded, and what it goes into."""
        wanted = self._wanted
        seen = view(checkpoint, self._rank, wanted.into, is_alone=self._is_alone)
        if seen.unreached and wanted.into is None and self._patterns is None and not self._is_alone:
            self._leave_out(seen)
        node = seen.node
        if self._patterns is not None:
            node = tree.select(node, self._patterns, self._path)
        allow_partial = wanted.allow_partial
        node, is_left_out = settle(node, checkpoint, self._path, allow_partial=allow_partial)
        seen = seen._replace(node=node)
        if wanted.into is None:
            return seen, None
        is_partial = self._patterns is not None or is_left_out
        return seen, Targets(node, wanted.into, seen, self._path, is_partial=is_partial)

    def _leave_out(self, seen: View) -> None:
        """Tells of what ranks saved apart and one state has no place for.

        Raises:
            StateMismatchError: It is more than values that each rank has of its own.
        """
        names = list(seen.unreached)
        named = ", ".join(map(repr, names[:_NAMED_MAX]))
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        if seen.are_few_unreached:
            self._warnings.append(
                f"{self._path}: other ranks have their own values of {len(names)} tensors, which "
                f"are left out: {named}{more}; rank= loads the state of one rank"
            )
            return
        raise StateMismatchError(
            f"{self._path}: the states of its ranks do not make one: beside what this one sees "
            f"they hold {named}{more}, under keys that are other tensors here; load what one rank "
            "saved with rank=, or choose leaves with keys=",
            key=names[0],
            path=self._path,
        )

    def _select(self, seen: View, targets: Targets | None) -> set[int] | None:
        """Indices of the tensors to read as they are; None for everything in every file."""
        if targets is None:
            if self._patterns is None and not seen.is_shared:
                return None
            return set(needed(seen.node, seen.tensors, seen.aliases))
        if self._patterns is None and not seen.is_shared and not targets.has_parts:
            return None
        beside = needed(seen.node, seen.tensors, seen.aliases, BYTES_TAGS)
        return {*beside, *targets.beside(), *targets.native()}

    def _build(self, seen: View, targets: Targets | None, places: dict[int, Place]) -> Any:
        if targets is None:
            return Builder(seen.tensors, seen.aliases, places, self._device).build(seen.node)
        builder = Builder(seen.tensors, seen.aliases, {**places, **targets.places()})
        return targets.finish(seen.node, self._wanted.into, builder)


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


def to_native(options: Options | None) -> dict[str, Any]:
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


def _check_rank(rank: Any) -> int:
    if type(rank) is not int:
        raise TypeError(f"rank={rank!r}: must be an int or None")
    if rank < 0:
        raise ValueError(f"rank={rank}: must not be negative")
    return rank


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


def encode_metadata(metadata: Mapping[str, Any] | None) -> str:
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
