"""`import_model`: a checkpoint around the safetensors files that are there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.api import save
from penstock.checkpoint.saving.groups import IN_PLACE, INDEX
from penstock.checkpoint.saving.wrappers import final_names
from penstock.common.found import check_fetched
from penstock.common.progress import shown
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedStateError,
)
from penstock.io.arguments import decode_local_path
from penstock.io.digests import chunk_digests
from penstock.io.file_marks import FileMark
from penstock.io.safetensors_header import header_of
from penstock.io.tensor_io import TensorIO
from penstock.options import Options
from penstock.tensors.dtypes import import_torch
from penstock.tensors.file_tensor import CHUNK_BYTES, FileTarget, FileTensor, HeldFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checkpoint.saving.groups import Files
    from penstock.common.progress import Progress
    from penstock.io.extents import Stored
    from penstock.reports import SaveReport

_PIECE_BYTES = 64 * CHUNK_BYTES
"""What is read at a time, while what was read before is digested."""
_BOXES = "penstock.boxes"
"""Where metadata says that tensors are pieces; `docs/format.md`, 5.2."""


def import_model(
    directory: str | os.PathLike[str] | bytes,
    path: str | os.PathLike[str] | bytes,
    *,
    key: str = "model",
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    files: Files | None = None,
    overwrite: bool = False,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> SaveReport:
    """Makes a checkpoint of a directory of safetensors files: they are digested, and linked to.

    The files get a second name in the checkpoint, so whoever changes one of them in place damages
    that; programs that write a new file and rename it do not. Where they cannot have one (another
    file system) their blocks are shared, or they are copied. The names of tensors are kept, so the
    checkpoint's directory loads with ``from_pretrained`` as the other one does.

    Args:
        directory: With safetensors files: those that its index lists, or all where it has none.
        path: The checkpoint's directory; made if missing, its parents too.
        key: Under which the state has the tensors.
        step: The training step, recorded beside the state.
        metadata: A note of plain JSON.
        files: Small files to put beside; None for those of the directory, such as ``config.json``.
        overwrite: Replace a complete checkpoint at the path.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function of bytes done and in all.

    Returns:
        What was written and how: `SaveReport.linked_bytes` are those that got a second name.

    Raises:
        CheckpointNotFoundError: There is no safetensors file, one of the index is missing, or
            there is a pointer of Git LFS in its place.
        CorruptCheckpointError: A file is not what its header says, or changes while it is read.
        UnsupportedStateError: A tensor has a type or a shape that no tensor of PyTorch has, or a
            file holds pieces of tensors.
        MissingDependencyError: This PyTorch lacks the type of a tensor.
        CheckpointExistsError: A complete checkpoint is at ``path`` and ``overwrite`` is False.
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
    tensors: dict[str, FileTensor] = {}
    total_bytes = sum(header.mark.nbytes for header in headers.values())
    done_bytes = 0
    choice = options or Options()
    moving = TensorIO(engine=choice.engine, direct=choice.direct)
    with shown(progress, "digesting") as update, moving as io:
        for one, (stored, mark, _) in headers.items():

            def tell(nbytes: int, before: int = done_bytes) -> None:
                if update is not None:
                    update(before + nbytes, total_bytes)

            held = _Held(one, mark.nbytes, _digests(io, one, mark, tell))
            done_bytes += mark.nbytes
            for name, tensor in stored.items():
                if name in tensors:
                    raise CorruptCheckpointError(
                        f"{name!r} is in {tensors[name].file.path} and in {one}: move away the "
                        "file that is not of this model",
                        path=source,
                        file=os.path.basename(one),
                        tensor=name,
                    )
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


class _Held(HeldFile):
    """A file that a save links to; it reads no byte of it."""

    def __init__(self, path: str, nbytes: int, chunks: list[int]) -> None:
        self.path = path
        self.nbytes = nbytes
        self.chunks = chunks

    def read(self, memory: Any, offset: int) -> None:
        raise AssertionError("it is linked to")

    def target(self, tensor: FileTensor) -> FileTarget:
        raise AssertionError("nothing is loaded into it")


def _tensor(held: _Held, name: str, stored: Stored) -> FileTensor:
    return FileTensor(held, stored.offset, name, stored.dtype, tuple(stored.shape))


def check_no_pieces(path: str, metadata: Mapping[str, str]) -> None:
    """Refuses a file whose tensors are parts of larger ones, as shards of many ranks are.

    Args:
        path: The file.
        metadata: Of its header.

    Raises:
        UnsupportedStateError: It is one.
    """
    if _BOXES in metadata:
        raise UnsupportedStateError(
            f"{path}: it holds pieces of tensors: penstock.load puts them together, from the"
            " checkpoint that the file is of",
            key=os.path.basename(path),
        )


def _paths(directory: str) -> tuple[list[str], set[str]]:
    """The files of the model, by the names that they really have, and the tensors of the index."""
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


def _digests(io: TensorIO, path: str, mark: FileMark, tell: Any) -> list[int]:
    """Digests of all chunks of a file, of which a piece is read while another one is digested."""
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
            tell(at)
        pending = begun
    try:
        with open(path, "rb") as file:
            # A checkpoint is on stable storage, and may be all there is after a power cut.
            os.fsync(file.fileno())
            is_same = FileMark.of(os.fstat(file.fileno())) == mark
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}", path=path, errno=error.errno
        ) from error
    if not is_same:
        raise CorruptCheckpointError(
            f"{path} has changed while it was read: import it when nobody writes to it",
            path=os.path.dirname(path),
            file=os.path.basename(path),
        )
    return chunks
