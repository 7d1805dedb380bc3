"""One checkpoint: `save`, `load`, `inspect`, `verify`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.inspection import CheckpointInfo, describe
from penstock.checkpoint.loading.foreign import check_no_store, telling
from penstock.checkpoint.loading.leaf_names import problems_of
from penstock.checkpoint.loading.load import Wanted, deliver, read
from penstock.checkpoint.ranks.entering import entered
from penstock.checkpoint.ranks.group import find as find_ranks
from penstock.checkpoint.saving.alone import save_alone
from penstock.checkpoint.saving.destination import Destination
from penstock.checkpoint.saving.groups import Groups, read_files
from penstock.checkpoint.saving.together import save_together
from penstock.common.events import observed
from penstock.common.gc_paused import gc_paused
from penstock.common.progress import Progress, shown
from penstock.common.tracing import call
from penstock.errors import PenstockWarning
from penstock.io.arguments import (
    check_patterns,
    check_step,
    decode_path,
    encode_metadata,
    to_native,
)
from penstock.reports import LoadReport, SaveReport, VerifyResult

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed import ProcessGroup

    from penstock.checkpoint.saving.groups import Files
    from penstock.options import Options


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
    groups: Mapping[str, str] | None = None,
    files: Files | None = None,
) -> SaveReport:
    """Saves a state durably: when this returns, a crash or power cut cannot take it away.

    The state is any nesting of dicts, lists, tuples and sets over tensors, NumPy arrays, anything
    with DLPack or the buffer protocol, and plain values: None, bool, int of any size, float
    (nan and inf included), complex, str, bytes, NumPy scalars and dtypes, `torch.Size`,
    `torch.dtype`, `torch.device`, deques, dates and times, paths, `Decimal`, `UUID`. So are sparse
    and nested tensors, and subclasses that PyTorch takes apart, such as torchao's quantized ones:
    the tensors that they are made of are stored. Values of other classes, enums and dataclasses
    among them, take `register_type`. Types, dictionary order, keys that are no text, and ties
    between tensors come back as they were. What could not come back as it was is refused.
    Exceptions, on purpose: of a tensor the elements, dtype and shape are kept, not its device,
    ``requires_grad`` or attributes, and strides only of a view whose base is saved as well; a
    `torch.nn.Parameter` comes back as a tensor; and tensors that share elements are tied where one
    of them is contiguous and holds the others in its type: else they come back independent, and
    `SaveReport.fallbacks` names them.

    Tensors of the host are read where they are: they must not change during the call. Tensors that
    an optimizer of `penstock.offload` keeps in files are not read: the files become part of the
    checkpoint by a second name, which takes no room and no time.

    Where `torch.distributed` is initialized, all ranks call this with the same arguments and make
    one checkpoint together, on a file system that they share. Each writes what it holds of every
    `DTensor`; what several hold is written once, and so is a plain tensor that is the same on
    several ranks, in every element. Other plain tensors, and whatever is in `PerRank`, are kept for
    each rank, and so is everything else (arrays, byte strings, plain values), and vectors of up to
    64 KiB of ``uint8``: states of random generators. Either all ranks return or all raise. A rank
    that waits for others to come warns after some seconds (`PenstockWarning`), and says for whom.

    Args:
        path: The checkpoint's directory; made if missing, its parents too.
        state: What to save: a state, or a `Training`.
        overwrite: Replace a complete checkpoint at the path. It stays loadable until the new one
            is committed.
        step: The training step, recorded beside the state.
        metadata: A note of plain JSON, readable with `penstock.inspect`.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.
        process_group: The ranks that save together; None for all, if there are any.
        no_dist: Save alone, whatever ranks there are: as one of them, or each to a path of its own.
        groups: Tensors that readers of models are to find, such as ``{"model": ""}``: those below
            the name, as `penstock.inspect` shows names, lie in shards of their own, under the
            names that the model has for them (``module.`` in front and ``_orig_mod`` are taken out
            where nothing lies beside them). The group ``""`` gets an index beside the shards, by
            which ``from_pretrained`` and others load the directory. Others are for
            `penstock.export`. Where ranks hold pieces of its tensors there is no index, and
            `SaveReport.fallbacks` says so.
        files: Small files that lie beside the shards, and are verified and deleted with them:
            contents or paths by name, or a directory, of which all but the weights are taken
            (``config.json``, those of the tokenizer). Of many ranks, those of the first count.

    Returns:
        What was written and how.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False; or the
            directory is a store.
        RankError: Another rank failed, died, hangs, saves something else, or holds another copy of
            a replicated `DTensor`. Or a launcher says that there are several ranks, and
            `torch.distributed` has no process group, not yet or not any more.
        UnsupportedStateError: A leaf cannot be stored, or a group has no tensors or two of one
            name; the message names it.
        ValueError: Two groups have one name, or a file's name is not one that may lie there.
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
    destination = Destination(
        path=where,
        step=step,
        metadata=note,
        overwrite=bool(overwrite),
        groups=Groups.check(groups),
        files=read_files(files),
    )
    check_no_store(where)
    ranks = find_ranks(process_group, no_dist=no_dist, to_save=True)
    if ranks is None:
        with call("stall", "save", where):
            return save_alone(destination, state, settings, progress)
    enter = observed("save", ends=False)(ranks.enter)
    label, seconds = destination.label, settings["rank_timeout_seconds"]
    with (
        entered(lambda: enter(label, seconds, step)) as together,
        call("stall", "save", where),
    ):
        return save_together(destination, state, together, settings, progress)


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
    plain: bool = False,
) -> Any:
    """Loads a state; every byte handed out has been checked against its digest.

    Ranks load each for itself, and any number of them what any number has saved. A `DTensor` in
    ``into`` is filled with what this rank holds of it, and only that is read, however the tensor
    was laid out when it was saved. Without ``into``, every tensor comes back whole. Of what was
    kept for each rank, the own value comes back; beyond the ranks that saved, that of the rank
    modulo their number.

    Args:
        path: The checkpoint's directory.
        into: A `Training` to restore, or a state of the same structure whose tensors and arrays
            are filled in place and whose plain values are replaced. What comes in the place of
            tensors in files goes into new files. Everything is compared before anything is
            written: tensors that share memory in ``into`` have to be tied in the checkpoint, and
            in a `Training` at least equal there. Tensors that are tied in the checkpoint alone fill
            two that are apart with the same elements. If reading fails half-way
            (`CorruptCheckpointError`, `StorageError`), the contents of the targets of a state are
            undefined, and a `Training` is as it was.
        keys: Names of the leaves to load as `penstock.inspect` shows them, or patterns of `fnmatch`
            over names, such as ``"model.*"`` (``*`` also matches dots). A name is the leaf's path
            with dots between; characters of a key that a pattern would take for something else have
            a backslash in front. Only their bytes are read. The result keeps the structure:
            containers that are left without a leaf are dropped, lists and tuples close up. With
            ``into``, only these leaves are touched. The only leaf of a state that is no container
            is called ``"value"``.
        device: Where new tensors shall be, as for `torch.Tensor.to`; None for the host. Arrays stay
            on the host. A CUDA device copies what was verified to tensors that are allocated there
            at first, after all that the current stream has queued; for other devices the state is
            read to the host, and PyTorch copies it.
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
        plain: Load values of registered classes (`register_type`) and tensors that are made of
            others as dictionaries of what is stored of them, without the classes; the member
            ``"(type)"`` names the class. ``keys`` may name their leaves then.

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
        CorruptCheckpointError: The checkpoint is damaged, or makes no sense.
        FormatVersionError: A newer Penstock wrote it.
        StateMismatchError: A key matches nothing, ``into`` does not fit, or what ranks saved apart
            makes no single state, as where pipeline stages use the same keys.
        MissingDependencyError: The state holds values of a package that is not installed, or that
            the version of it here does not have, such as a dtype; or of a class that nobody has
            registered in this process.
        DeviceError: A GPU, or its driver, failed; the current stream of one is being captured into
            a graph; or this is a fork of a process that has used CUDA.
        ValueError: ``device`` cannot be used, or it or ``plain`` is given with ``into``.
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
        keys=check_patterns(keys),
        device=device,
        progress=progress,
        allow_partial=bool(allow_partial),
        rank=rank,
        is_plain=bool(plain),
    )
    loaded = read(decode_path(path), wanted, options)
    state = deliver(loaded, wanted)
    for message in loaded.warnings:
        warnings.warn(message, PenstockWarning, stacklevel=2)
    if report is not None:
        report(loaded.report)
    return state


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
        with telling(where):
            opened = _native.open(where)
        return describe(opened, where)


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
        FormatVersionError: A newer Penstock wrote it.
        StorageError: The operating system failed an operation.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"w": np.zeros(3)})
        >>> penstock.verify(path).ok
        True
    """
    where = decode_path(path)
    with call("stall", "verify", where):
        return _verify(where, to_native(options), progress)


@observed("verify")
def _verify(where: str, options: dict[str, Any], progress: bool | Progress) -> VerifyResult:
    with shown(progress, "verifying") as update, telling(where):
        fields = _native.verify(where, options=options, progress=update)
    problems = problems_of(where, fields["problems"])
    return VerifyResult(**{**fields, "path": where, "problems": problems})
