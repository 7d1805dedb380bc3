"""`import_model`: makes a checkpoint from existing safetensors files by links."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.api import save
from penstock.checkpoint.exporting.sealed_files import FILES, IMPORT
from penstock.checkpoint.saving.groups import IN_PLACE, INDEX, read_files
from penstock.checkpoint.saving.wrappers import final_names
from penstock.common.found import check_fetched
from penstock.common.progress import shown
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedStateError,
    storage_errors,
)
from penstock.io.files.digests import chunk_digests
from penstock.io.files.file_marks import FileMark
from penstock.io.files.safetensors_header import header_of
from penstock.io.tensor_io import TensorIO
from penstock.options import Options
from penstock.tensors.arguments import decode_local_path
from penstock.tensors.dtypes import import_torch
from penstock.tensors.file_tensor import CHUNK_BYTES, FileTarget, FileTensor, HeldFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checkpoint.saving.groups import Files
    from penstock.common.progress import Progress
    from penstock.io.files.extents import TensorExtent
    from penstock.reports import SaveReport
    from penstock.sealing import Sealing

_PIECE_BYTES = 64 * CHUNK_BYTES
"""Size of each read; it overlaps with the digesting of the previous one."""
_BOXES = "penstock.boxes"
"""Metadata key that marks pieces of tensors; `docs/format.md`, 5.2."""


def import_model(
    directory: str | os.PathLike[str] | bytes,
    path: str | os.PathLike[str] | bytes,
    *,
    key: str = "model",
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    files: Files | None = None,
    overwrite: bool = False,
    sealing: Sealing | None = None,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> SaveReport:
    """Makes a checkpoint from a directory of safetensors files by digesting and linking them.

    The files get a second name in the checkpoint, so a change of one in place damages the
    checkpoint; programs that write a new file and rename it do no harm. Where hard links are
    impossible (another file system), the files' blocks are shared, or they are copied. The names of
    tensors are kept, so the checkpoint's directory loads with ``from_pretrained`` like the
    original.

    With ``sealing`` nothing is linked: tensors and small files are read and sealed, and the
    directory loads with `penstock.load` alone.

    Args:
        directory: A directory with safetensors files: those that its index lists, or all if it has
            none.
        path: The checkpoint's directory; created if missing, with its parents.
        key: The key of the tensors in the state.
        step: The training step, stored with the state.
        metadata: A note of plain JSON.
        files: Small files to add; None for those of the directory, such as ``config.json``.
        overwrite: Replace a complete checkpoint at the path.
        sealing: For whom the checkpoint is sealed; see `penstock.save`. `export` writes the files
            again.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar, or a function called with the bytes done and the total bytes.

    Returns:
        A report of the save; `SaveReport.linked_bytes` are those of hard-linked files.

    Raises:
        CheckpointNotFoundError: There is no safetensors file, one of the index is missing, or one
            is a Git LFS pointer.
        CorruptCheckpointError: A file contradicts its header, or changes while it is read.
        UnsupportedStateError: A tensor has a type or a shape that PyTorch does not support, or a
            file holds pieces of tensors.
        MissingDependencyError: This PyTorch lacks the type of a tensor.
        CheckpointExistsError: A complete checkpoint exists at ``path`` and ``overwrite`` is False.
        StorageError: The operating system failed an operation.

    Example:
        >>> import penstock, tempfile, torch
        >>> from safetensors.torch import save_file
        >>> root = tempfile.mkdtemp()
        >>> save_file({"w": torch.ones(3)}, f"{root}/model.safetensors")
        >>> report = penstock.import_model(root, f"{root}/checkpoint")
        >>> penstock.load(f"{root}/checkpoint")["model"]["w"]
        tensor([1., 1., 1.])
    """
    if type(key) is not str or not key:
        raise ValueError(f"key={key!r}: must be the name that the state has the tensors under")
    source = os.path.abspath(decode_local_path(directory))
    if os.path.realpath(source) == os.path.realpath(decode_local_path(path)):
        raise ValueError(f"{source}: the checkpoint needs a directory of its own")
    paths, listed = _paths(source)
    headers = {one: header_of(Path(one)) for one in paths}
    for one, header in headers.items():
        check_no_pieces(one, header.metadata)
    names = {name for header in headers.values() for name in header.tensors}
    if not listed <= names:
        raise CorruptCheckpointError(
            f"{source}: its files do not have {min(listed - names)}: was the directory copied "
            "whole?",
            path=source,
            file=INDEX,
        )
    if sealing is not None:
        found = _sealed_state(source, paths, key, source if files is None else files)
        note = {IMPORT: {FILES: sorted(found[FILES])}}
        return save(
            path,
            found,
            step=step,
            metadata={**(metadata or {}), **note},
            overwrite=overwrite,
            options=options,
            progress=progress,
            sealing=sealing,
            no_dist=True,
        )
    tensors: dict[str, FileTensor] = {}
    total_bytes = sum(header.mark.nbytes for header in headers.values())
    done_bytes = 0
    choice = options or Options()
    moving = TensorIO(engine=choice.engine, direct=choice.direct)
    with shown(progress, "digesting") as update, moving as io:
        for one, (stored, mark, _) in headers.items():

            def report_bytes(nbytes: int, before: int = done_bytes) -> None:
                if update is not None:
                    update(before + nbytes, total_bytes)

            held = _Held(one, mark.nbytes, _digests(io, one, mark, report_bytes))
            done_bytes += mark.nbytes
            for name, tensor in stored.items():
                if name in tensors:
                    raise _twice(source, name, tensors[name].file.path, one)
                tensors[name] = _tensor(held, name, tensor)
    is_final = all(name == final for name, final in final_names(tensors).items())
    return save(
        path,
        {key: tensors},
        step=step,
        metadata=metadata,
        overwrite=overwrite,
        options=options,
        groups={key: IN_PLACE} if is_final and tensors else None,
        files=source if files is None else files,
        no_dist=True,
    )


def _sealed_state(source: str, paths: list[str], key: str, files: Files) -> dict[str, Any]:
    """Returns the state of a sealed import: tensors, and small files by name.

    Files are mapped to memory, so a tensor is read when it is sealed.
    """
    # Imported late, as it needs PyTorch.
    from penstock.checkpoint.converting.files.safetensors_file import read_safetensors

    if key == FILES:
        raise ValueError(f"key={key!r}: a sealed import has the small files under this name")
    tensors: dict[str, Any] = {}
    places: dict[str, str] = {}
    for one in paths:
        for name, tensor in read_safetensors(one).items():
            if name in tensors:
                raise _twice(source, name, places[name], one)
            tensors[name], places[name] = tensor, one
    return {key: tensors, FILES: dict(read_files(files))}


def _twice(source: str, name: str, first: str, second: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name!r} is in {first} and in {second}: move away the file that is not of this model",
        path=source,
        file=os.path.basename(second),
        tensor=name,
    )


class _Held(HeldFile):
    """A file that a save links without reading it."""

    def __init__(self, path: str, nbytes: int, chunks: list[int]) -> None:
        self.path = path
        self.nbytes = nbytes
        self.chunks = chunks

    def read(self, memory: Any, offset: int) -> None:
        raise AssertionError("it is linked to")

    def target(self, tensor: FileTensor) -> FileTarget:
        raise AssertionError("nothing is loaded into it")


def _tensor(held: _Held, name: str, stored: TensorExtent) -> FileTensor:
    return FileTensor(held, stored.offset, name, stored.dtype, tuple(stored.shape))


def check_no_pieces(path: str, metadata: Mapping[str, str]) -> None:
    """Refuses a file whose tensors are parts of larger ones, such as a shard of many ranks."""
    if _BOXES in metadata:
        raise UnsupportedStateError(
            f"{path}: it holds pieces of tensors: penstock.load puts them together, from the"
            " checkpoint that the file is of",
            key=os.path.basename(path),
        )


def _paths(directory: str) -> tuple[list[str], set[str]]:
    """Returns the paths of the model's files, links resolved, and the tensors in the index."""
    index = os.path.join(directory, INDEX)
    try:
        with open(index, encoding="utf-8") as file:
            weight_map = dict(json.load(file)["weight_map"])
        listed = sorted(set(weight_map.values()))
        if any(os.path.basename(name) != name for name in listed):
            raise ValueError("a file of it lies elsewhere")
    except FileNotFoundError:
        found = sorted(Path(directory).glob("*.safetensors"))
        if not found:
            raise CheckpointNotFoundError(
                f"{directory}: no safetensors file is there: name a directory that has some; "
                "`penstock convert` takes other formats",
                path=directory,
            ) from None
        return [os.path.realpath(path) for path in found], set()
    except OSError as error:
        raise StorageError(
            f"cannot read {index}: {error.strerror}", path=index, errno=error.errno
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        check_fetched(index)
        raise CorruptCheckpointError(
            f"{index}: it is no index of safetensors files", path=directory, file=INDEX
        ) from error
    paths = [os.path.join(directory, os.path.basename(str(name))) for name in listed]
    if not listed:
        raise CheckpointNotFoundError(
            f"{directory}: {INDEX} lists no file: remove it where it is not of this model",
            path=directory,
        )
    missing = [os.path.basename(path) for path in paths if not os.path.exists(path)]
    if missing:
        raise CheckpointNotFoundError(
            f"{directory}: {INDEX} lists {', '.join(missing[:5])}, which "
            f"{'is' if len(missing) == 1 else 'are'} missing: was the directory copied whole?",
            path=directory,
        )
    return [os.path.realpath(path) for path in paths], set(weight_map)


def _digests(io: TensorIO, path: str, mark: FileMark, report_bytes: Any) -> list[int]:
    """Returns the digests of all chunks of a file; reads and digesting overlap."""
    torch = import_torch()
    pieces = [
        (at, min(_PIECE_BYTES, mark.nbytes - at)) for at in range(0, mark.nbytes, _PIECE_BYTES)
    ]
    buffers = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in pieces[:2]]
    chunks: list[int] = []
    pending = None
    for number, (at, nbytes) in enumerate([*pieces, (mark.nbytes, 0)]):
        begun = None
        if nbytes:
            memory = buffers[number % 2][:nbytes]
            begun = (io.read(memory, path, at), memory)
        if pending is not None:
            transfer, memory = pending
            transfer.result()
            chunks += chunk_digests(memory)
            report_bytes(at)
        pending = begun
    with storage_errors("read", path), open(path, "rb") as file:
        # A checkpoint is on stable storage, and may be all that is left after a power cut.
        os.fsync(file.fileno())
        is_same = FileMark.of(os.fstat(file.fileno())) == mark
    if not is_same:
        raise CorruptCheckpointError(
            f"{path} has changed while it was read: import it when nobody writes to it",
            path=os.path.dirname(path),
            file=os.path.basename(path),
        )
    return chunks
