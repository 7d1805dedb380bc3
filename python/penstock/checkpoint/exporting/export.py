"""`export`: writes a checkpoint's model as a directory for other libraries."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from penstock import _native
from penstock.checkpoint.exporting.chosen import group_of, shards_of, weights_of
from penstock.checkpoint.exporting.directory import replace
from penstock.checkpoint.exporting.job import CONFIG, Job, floats
from penstock.checkpoint.exporting.models import MetaModel
from penstock.checkpoint.exporting.sealed_files import sealed_files
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.checkpoint.loading.path_kind import check_unsealing
from penstock.checkpoint.saving.groups import IN_PLACE, INDEX, read_files
from penstock.common.option_kinds import Number
from penstock.common.progress import shown
from penstock.errors import CorruptCheckpointError, SealedError, StateMismatchError, StorageError
from penstock.options import Options
from penstock.reports import ExportReport
from penstock.sealing.unsealing import Unsealing
from penstock.tensors import dtypes
from penstock.tensors.arguments import decode_local_path, decode_path, to_native
from penstock.tensors.memory import of_array, to_source

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from penstock.checkpoint.saving.groups import Files
    from penstock.common.progress import Progress
    from penstock.sealing import Identities, Key

SHARD_BYTES = 5_000_000_000
"""Shard size of transformers' `save_pretrained` over many versions."""
MEMORY_BYTES = 4 << 30
_BYTES = Number(1, (1 << 63) - 1, "bytes", is_open=False)


def export(
    path: str | os.PathLike[str] | bytes,
    out: str | os.PathLike[str] | bytes | None = None,
    *,
    group: str | None = None,
    key: str | None = None,
    dtype: torch.dtype | str | None = None,
    unfuse: bool | None = None,
    files: Files | None = None,
    hard_link: bool = False,
    check: bool = True,
    shard_bytes: int = SHARD_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    unseal: bool = False,
    identities: Identities | Key | Iterable[Key] | None = None,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> ExportReport:
    """Writes a checkpoint's model to a directory that ``from_pretrained`` and others load.

    A group that was saved as such (``groups=`` of `penstock.save`), complete and in the requested
    types, is not read: where the file system shares blocks (XFS, btrfs), or with ``hard_link``, the
    directory takes no space. Otherwise tensors are read, verified, assembled from the pieces of all
    ranks, converted, and written, one block at a time.

    Args:
        path: The checkpoint's directory.
        out: The directory to create; it appears completely or not at all. None for the checkpoint's
            own directory, in which the index and the small files beside the shards are restored.
        group: The group to export; None for the one named ``""``, if there is one.
        key: Dotted name of the part to export, if it is no group; None for ``"model"`` and similar
            keys, or for a state of tensors only.
        dtype: Type for floating-point tensors; None to keep theirs.
        unfuse: Whether to split tensors that transformers fuses (experts) into their published
            form, which vLLM expects. None: if ``config.json`` is of such a model and transformers
            is installed. Nothing can then be linked.
        files: Small files to add; see `penstock.save`. None for those saved with the checkpoint.
        hard_link: Whether to hard-link the checkpoint's files. Changing an exported file in place
            then changes the checkpoint, which `penstock.verify` detects but nothing can undo.
        check: Whether to compare names with the model of ``config.json``, if transformers is
            installed.
        shard_bytes: Largest size of a written file, except for larger tensors.
        memory_bytes: Memory for data being read and written, of which 48 MiB are enough. More is
            used if a row of a tensor needs it, or if a tensor split by ``unfuse`` is no block of
            its fused tensor.
        unseal: Whether a sealed checkpoint is written in the clear, which also takes
            ``identities``. Small files that were sealed with it are written, too.
        identities: Keys that open a sealed checkpoint; see `penstock.load`. A clear one is then
            refused.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar, or a function called with the bytes done and the total bytes.

    Returns:
        The directory's contents, how they were written, and whether ``config.json`` is missing,
        which ``from_pretrained`` requires.

    Raises:
        CheckpointExistsError: ``out`` exists and is not an empty directory.
        CheckpointNotFoundError: Nothing is stored at ``path``.
        StateMismatchError: There is no such group or key, or ``config.json`` is of another model.
        CorruptCheckpointError: The data read is damaged.
        TamperedError: Somebody without the key has changed a sealed checkpoint.
        SealedError: The checkpoint is sealed, and ``unseal`` is False, there are no ``identities``,
            or no ``out`` is given.
        NotSealedError: ``identities`` are given and the checkpoint is clear.
        ValueError: An argument is out of range.
        TypeError: An argument has the wrong type.
        StorageError: The operating system failed an operation.

    Example:
        >>> import penstock, tempfile, torch
        >>> root = tempfile.mkdtemp()
        >>> state = {"model": {"w": torch.ones(3)}, "step": 7}
        >>> report = penstock.save(f"{root}/step-7", state)
        >>> penstock.export(f"{root}/step-7", f"{root}/exported").files
        ('model.safetensors',)
    """
    began = time.perf_counter()
    if group is not None and key is not None:
        raise ValueError("group and key: pass one of them")
    _BYTES.check("shard_bytes", shard_bytes)
    _BYTES.check("memory_bytes", memory_bytes)
    choices = (group, key, dtype, unfuse, files)
    if out is None and (hard_link or any(choice is not None for choice in choices)):
        raise ValueError("out: name a directory to export to; in place nothing can be chosen")
    # An export in place writes files with other names.
    where = decode_local_path(path) if out is None else decode_path(path)
    target = None if out is None else os.path.abspath(decode_local_path(out))
    settings = to_native(options)
    check_unsealing(where, unseal=unseal, identities=identities, unseal_by="unseal=True")
    checkpoint = OpenCheckpoint(where, unsealing=Unsealing.of(identities))
    try:
        if target is None:
            return _in_place(checkpoint, began)
        if files is not None:
            small = dict(read_files(files))
        elif checkpoint.native.recipients is not None:
            small = sealed_files(checkpoint, settings)
        else:
            small = _beside(checkpoint)
        model = MetaModel.of(small.get(CONFIG)) if check or unfuse is not False else None
        with checkpoint.reading():
            checkpoint.view_as(0)
        job = Job(
            checkpoint=checkpoint,
            out=target,
            kind=None if dtype is None else _floating(dtype),
            beside=small,
            model=model if check else None,
            fused=model if _unfuses(model, unfuse) else None,
            settings=settings,
            options=options or Options(),
            shard_bytes=shard_bytes,
            memory_bytes=memory_bytes,
            began=began,
        )
        name = group_of(checkpoint, group, key)
        with checkpoint.reading():
            weights = weights_of(checkpoint, name, key)
        shards = None if name is None else shards_of(checkpoint, name)
        made: ExportReport | None = None
        if shards is not None and job.takes(shards, weights):
            made = job.link(shards, is_hard=hard_link)
        if made is None:
            with shown(progress, "exporting") as update:
                made = job.write(weights, update)
        return dataclasses.replace(made, renamed=sum(one.is_renamed for one in weights))
    finally:
        checkpoint.release()


def _in_place(checkpoint: OpenCheckpoint, began: float) -> ExportReport:
    """Restores the index and the small files in the checkpoint's own directory."""
    path = checkpoint.path
    if checkpoint.native.recipients is not None:
        raise SealedError(
            f"{path} is sealed: clear files would lie beside sealed shards; name a directory to "
            "export to",
            path=path,
        )
    small = _beside(checkpoint, with_index=True)
    shards = shards_of(checkpoint, IN_PLACE)
    if INDEX not in small or shards is None:
        raise StateMismatchError(
            f"{path} has no index of its own, or one that other readers would misread: save it "
            "with groups={'model': ''}, or name a directory to export to",
            path=path,
        )
    for name, content in small.items():
        replace(path, name, content)
    return ExportReport(
        path=path,
        tensors=len(shards.file_of),
        tensor_bytes=shards.total_bytes,
        bytes_written=0,
        way="in place",
        files=(*shards.files, *small),
        seconds=time.perf_counter() - began,
    )


def _beside(checkpoint: OpenCheckpoint, *, with_index: bool = False) -> dict[str, bytes]:
    """Returns the small files that were saved with a checkpoint, by name."""
    found = _saved_beside(checkpoint.path, checkpoint.id)
    return {name: content for name, content in found.items() if with_index or name != INDEX}


def _floating(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a type to cast to."""
    found = dtypes.torch_dtypes().get(dtype) if isinstance(dtype, str) else dtype
    if found not in floats():
        raise ValueError(f"dtype={dtype!r}: must be float16, bfloat16, float32 or float64")
    return found


def _unfuses(model: MetaModel | None, unfuse: bool | None) -> bool:
    if unfuse and model is None:
        raise StateMismatchError(
            "unfuse: only a config.json of a model that transformers knows tells what is fused: "
            "pass it in files, with transformers installed"
        )
    return model is not None and unfuse is not False and (unfuse is True or model.is_fused)


_ALL_BYTES = (1 << 64) - 1


def _saved_beside(path: str, checkpoint_id: str) -> dict[str, bytes]:
    """Returns the small files of a checkpoint (`docs/format.md`, 3.7) by name, verified."""
    try:
        manifest = json.loads(_content(path, _native.MANIFEST))
    except RecursionError:
        # Metadata that is nested endlessly, with a correct digest.
        raise _damaged(path, _native.MANIFEST, "it nests too deeply") from None
    if manifest["id"] != checkpoint_id:
        raise CorruptCheckpointError(
            f"{path} was replaced while it was read: try again", path=path, file=_native.MANIFEST
        )
    found = {}
    for row in manifest.get("beside", ()):
        content = _content(path, row["file"])
        if len(content) != row["bytes"] or _digest(content) != row["digest"]:
            raise _damaged(path, row["file"], "its bytes are not what was saved")
        found[row["name"]] = content
    return found


def _content(path: str, name: str) -> bytes:
    where = os.path.join(path, name)
    try:
        return _native.read_start(where, _ALL_BYTES)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise _damaged(path, name, "it is missing") from error
        raise


def _digest(content: bytes) -> str:
    source = to_source(of_array(np.frombuffer(content, np.uint8), "file"), "file")
    return f"crc64nvme:{_native.digests([source])[0]:016x}"


def _damaged(path: str, name: str, detail: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {name}: {detail}; files= of penstock.export gives others",
        path=path,
        file=name,
    )
