"""`convert`: saves the checkpoint of another library as a Penstock checkpoint."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.api import save
from penstock.checkpoint.converting.kinds import KINDS, TARGETS
from penstock.checkpoint.loading.path_kind import check_unsealing
from penstock.common.progress import shown
from penstock.errors import (
    CannotSealError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    MissingDependencyError,
    PenstockError,
    StorageError,
    UnsupportedStateError,
)
from penstock.reports import Conversion
from penstock.sealing.unsealing import Unsealing
from penstock.tensors.arguments import check_step, decode_path, to_native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.checkpoint.converting.files.pickles import Pickles
    from penstock.checkpoint.converting.kinds import Kind, Target
    from penstock.common.progress import Progress
    from penstock.options import Options
    from penstock.sealing import Identities, Key, Sealing

_LIGHTNING = "pytorch-lightning_version"


def convert(
    source: str | os.PathLike[str] | bytes,
    path: str | os.PathLike[str] | bytes,
    *,
    kind: Kind | None = None,
    to: Target = "penstock",
    trust: bool = False,
    step: int | None = None,
    overwrite: bool = False,
    sealing: Sealing | None = None,
    unseal: bool = False,
    identities: Identities | Key | Iterable[Key] | None = None,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> Conversion:
    """Saves the checkpoint of another library as a new one, with all tensors bit for bit equal.

    With ``to="megatron"`` it is the other way: a checkpoint that Penstock has stored for
    Megatron-Core becomes one of Megatron-Core's own, in the format ``torch_dist``.

    The state is the one that the library itself loads: for a ``torch.save`` file the result of
    ``torch.load``, for a DCP directory the nested state dict with whole tensors, for DeepSpeed and
    accelerate a dictionary with the contents of each file, by its name. Tensors that share memory
    in the source are tied in the new checkpoint. Files are mapped to memory, compressed ones are
    unpacked into it; all tensors of a DCP checkpoint are in memory at once. For Megatron-Core it is
    the state that `penstock.integrations.megatron` saves.

    Args:
        source: A file or directory of ``torch.save``, Lightning, DCP, DeepSpeed (of one tag, or its
            parent), accelerate or Megatron-Core. It is not changed.
        path: The new checkpoint's directory.
        kind: The kind of source; None to detect it.
        to: The format of the new checkpoint: ``"penstock"``, or ``"megatron"`` for a checkpoint
            that `penstock.integrations.megatron` or this function has saved. That one takes no
            ``kind``, ``step`` and ``overwrite``.
        trust: Whether to unpickle more than tensors, containers and plain values, which runs code
            chosen by the writer of the source; and to store values that the format does not support
            as pickled bytes.
        step: The step to store; None for the step in the source.
        overwrite: Replace a complete checkpoint at the path.
        sealing: For whom the new checkpoint is sealed; see `penstock.save`.
        unseal: With ``to="megatron"``, whether a sealed source is written in the clear, which also
            takes ``identities``.
        identities: Keys that open a sealed source; see `penstock.load`.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Raises:
        CheckpointNotFoundError: The source does not exist, or has another format.
        IncompleteCheckpointError: The source is half-written; the message names the missing files.
        CorruptCheckpointError: The source is truncated or damaged.
        UnsupportedStateError: The source is a pickle of more than tensors and plain values, or
            holds a value that cannot be stored, and ``trust`` is False; or it is an archive of
            TorchScript, NumPy or another format.
        CheckpointExistsError: A complete checkpoint exists at the path and ``overwrite`` is False.
        MissingDependencyError: PyTorch is not installed, or a package whose classes the source
            contains.
        CannotSealError: With ``sealing``, something would stay clear, as of Megatron-Core.
        SealedError: The source is sealed, and ``unseal`` is False or there are no ``identities``.
        StorageError: The operating system failed an operation.

    Example:
        >>> import penstock, tempfile, torch
        >>> root = tempfile.mkdtemp()
        >>> torch.save({"model": {"w": torch.ones(3)}, "epoch": 2}, root + "/model.pt")
        >>> penstock.convert(root + "/model.pt", root + "/ckpt").kind
        'torch'
        >>> penstock.load(root + "/ckpt")
        {'model': {'w': tensor([1., 1., 1.])}, 'epoch': 2}
    """
    began = time.perf_counter()
    origin, where = decode_path(source), decode_path(path)
    to_native(options)
    step = None if step is None else check_step(step)
    _check_apart(origin, where)
    if to not in TARGETS:
        raise ValueError(f"to={to!r}: must be one of {', '.join(TARGETS)}")
    if to == "megatron":
        if kind is not None or step is not None or overwrite:
            raise ValueError("to='megatron' takes no kind, step and overwrite")
        if sealing is not None:
            raise CannotSealError(
                f"{where}: a checkpoint of Megatron-Core's own is clear; leave sealing= out",
                path=where,
            )
        check_unsealing(origin, unseal=unseal, identities=identities, unseal_by="unseal=True")
        unsealing = Unsealing.of(identities)
        return _to_megatron(origin, where, options, progress, began, unsealing)
    if unseal or identities is not None:
        raise ValueError("unseal=, identities=: only to='megatron' reads a Penstock checkpoint")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
    _check_torch()
    # These modules need PyTorch.
    from penstock.checkpoint.converting.files.pickles import Pickles

    pickles = Pickles(bool(trust))
    state, found = _inspected(origin, kind, pickles)
    files, pickled = None, list[str]()
    if found == "megatron":
        state, files = state
    else:
        state, pickled = _storable(origin, state, trust=pickles.trust)
    known = step if step is not None else _step_of(state, found)
    report = save(
        where,
        state,
        overwrite=overwrite,
        step=known,
        metadata={"converted": {"from": found, "pickled": pickled}},
        options=options,
        progress=progress,
        no_dist=True,
        files=files,
        sealing=sealing,
    )
    return Conversion(
        path=where,
        source=origin,
        kind=found,
        step=known,
        checkpoint_id=report.checkpoint_id,
        tensors=report.tensors,
        tensor_bytes=report.tensor_bytes,
        bytes=report.bytes,
        trusted=tuple(sorted({name for names in pickles.trusted.values() for name in names})),
        pickled=tuple(pickled),
        seconds=time.perf_counter() - began,
    )


def _to_megatron(
    source: str,
    path: str,
    options: Options | None,
    progress: bool | Progress,
    began: float,
    unsealing: Unsealing,
) -> Conversion:
    _check_torch()
    # Imported late, as it takes seconds.
    from penstock.checkpoint.converting.distributed.torch_dist import write_torch_dist

    with shown(progress, "converting") as update:
        try:
            written = write_torch_dist(source, path, to_native(options), update, unsealing)
        except OSError as error:
            if isinstance(error, PenstockError):
                raise
            file = str(error.filename or path)
            raise StorageError(
                f"{file}: {error.strerror}: make room there, or convert to another place",
                path=file,
                errno=error.errno,
            ) from error
    return Conversion(
        path=path,
        source=source,
        kind="penstock",
        step=written.step,
        checkpoint_id=written.checkpoint_id,
        tensors=written.tensors,
        tensor_bytes=written.tensor_bytes,
        bytes=written.bytes,
        trusted=(),
        pickled=(),
        seconds=time.perf_counter() - began,
    )


def _inspected(path: str, kind: Kind | None, pickles: Pickles) -> tuple[Any, Kind]:
    """Returns the state at a path, and its kind."""
    from penstock.checkpoint.converting.source import kind_of

    try:
        found = kind or kind_of(path)
        state = _read(path, found, pickles)
    except PenstockError:
        raise
    except OSError as error:
        file = str(error.filename or path)
        if isinstance(error, FileNotFoundError):
            raise CheckpointNotFoundError(
                f"{file}: there is nothing to convert; check the path", path=file
            ) from error
        raise StorageError(f"{file}: {error.strerror}", path=file, errno=error.errno) from error
    if kind is None and found == "torch" and _is_lightning(state):
        found = "lightning"
    return state, found


def _read(path: str, kind: Kind, pickles: Pickles) -> Any:
    from penstock.checkpoint.converting.accelerate import read_accelerate
    from penstock.checkpoint.converting.deepspeed import read_deepspeed
    from penstock.checkpoint.converting.source import EXTRA

    wants_file = kind == "torch"
    if kind != "lightning" and os.path.isdir(path) == wants_file:
        expected = "a file" if wants_file else "a directory"
        raise CheckpointNotFoundError(f"{path}: {kind} checkpoints are {expected}", path=path)
    if kind == "deepspeed":
        return read_deepspeed(path, pickles)
    if kind == "accelerate":
        return read_accelerate(path, pickles)
    if kind == "megatron":
        from penstock.checkpoint.converting.distributed.megatron import read_megatron

        return read_megatron(path, pickles)
    if os.path.isdir(path):
        # Imported late, as it takes seconds.
        from penstock.checkpoint.converting.distributed.dcp import read_dcp

        state = read_dcp(path, pickles)
        # A sharding strategy stores values that are no tensors in a file beside the shards.
        return state if kind == "dcp" else {**state, **pickles.read(os.path.join(path, EXTRA))}
    state = pickles.read(path)
    if kind == "lightning" and not _is_lightning(state):
        raise CheckpointNotFoundError(
            f"{path}: this is no checkpoint of Lightning, as {_LIGHTNING!r} is missing: leave out "
            "what it is, and it is looked at",
            path=path,
        )
    return state


def _storable(source: str, state: Any, *, trust: bool) -> tuple[Any, list[str]]:
    from penstock.checkpoint.converting.storable import with_pickles

    try:
        return with_pickles(state, is_strict=not trust)
    except UnsupportedStateError as error:
        hint = "" if trust else "; or pass trust=True (--trust), and it is stored as pickled bytes"
        raise UnsupportedStateError(f"{source}: {error}{hint}", key=error.key) from None


def _is_lightning(state: Any) -> bool:
    return isinstance(state, dict) and _LIGHTNING in state


def _step_of(state: Any, kind: Kind) -> int | None:
    from penstock.checkpoint.converting.deepspeed import step_of

    found = None
    if kind == "lightning":
        found = state.get("global_step")
    elif kind == "deepspeed":
        found = step_of(state)
    return found if type(found) is int and found >= 0 else None


def _check_apart(source: str, path: str) -> None:
    if os.path.realpath(source) == os.path.realpath(path):
        raise CheckpointExistsError(
            f"{path} is what is to be converted: choose another directory for the new checkpoint",
            path=path,
        )


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "files of other libraries take PyTorch to read: pip install 'penstock[torch]'",
            name="torch",
        ) from error
