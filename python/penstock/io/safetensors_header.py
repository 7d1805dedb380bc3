"""Tensors of safetensors files, as the bytes of a model's weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from penstock.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from penstock.io.extents import Stored, Weights
from penstock.io.file_marks import FileMark
from penstock.io.safetensors_files import dtype_of, read_header
from penstock.tensors import dtypes


class FileHeader(NamedTuple):
    """The contents of a file's header, and the file's mark.

    Attributes:
        tensors: By name.
        mark: What tells whether the file has changed.
        metadata: Notes of whoever wrote it.
    """

    tensors: dict[str, Stored]
    mark: FileMark
    metadata: dict[str, str]


def weights_of(directory: str) -> Weights:
    """All tensors of the safetensors files in a directory.

    Raises:
        CheckpointNotFoundError: There are none, or pointers of Git LFS in their place.
        CorruptCheckpointError: A file is not what its header says, or a tensor is in two.
        UnsupportedStateError: A tensor has a type or a shape that no tensor of PyTorch has.
        MissingDependencyError: This PyTorch lacks the type of one.
        StorageError: A file cannot be read.
    """
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        raise CheckpointNotFoundError(
            f"{directory}: no safetensors file is there: name a directory that has some",
            path=directory,
        )
    tensors: dict[str, Stored] = {}
    marks: dict[str, FileMark] = {}
    for path in paths:
        header = header_of(path)
        marks[os.fspath(path)] = header.mark
        for name, one in header.tensors.items():
            if name in tensors:
                raise CorruptCheckpointError(
                    f"{name!r} is in {tensors[name].path} and in {path}: move away the file that"
                    " is not of this model",
                    path=directory,
                    file=path.name,
                    tensor=name,
                )
            tensors[name] = one
    return Weights(tensors, marks)


def header_of(path: Path) -> FileHeader:
    """The tensors of one file.

    Raises:
        CheckpointNotFoundError: It is a pointer of Git LFS.
        CorruptCheckpointError: It is not what its header says.
        UnsupportedStateError: A tensor has a type or a shape that no tensor of PyTorch has.
        MissingDependencyError: This PyTorch lacks the type of one.
        StorageError: It cannot be read.
    """
    name = os.fspath(path)
    try:
        with path.open("rb") as file:
            mark = FileMark.of(os.fstat(file.fileno()))
            header = read_header(file, name)
    except CheckpointNotFoundError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}", path=name, errno=error.errno
        ) from error
    tensors = {
        label: Stored(
            name, one.begin, one.shape, dtypes.any_torch_dtype(dtype_of(name, label, one))
        )
        for label, one in header.tensors.items()
    }
    return FileHeader(tensors, mark, header.metadata)
