"""Finds the byte ranges of a model's weights in safetensors files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from penstock.errors import CheckpointNotFoundError, CorruptCheckpointError, storage_errors
from penstock.io.files.extents import TensorExtent, Weights
from penstock.io.files.file_marks import FileMark
from penstock.io.files.safetensors_files import dtype_of, read_header
from penstock.tensors import dtypes


class FileHeader(NamedTuple):
    """The tensors of a file, and the file's mark.

    Attributes:
        tensors: Byte ranges by name.
        mark: The file's mark, to detect changes.
        metadata: The writer's notes.
    """

    tensors: dict[str, TensorExtent]
    mark: FileMark
    metadata: dict[str, str]


def weights_of(directory: str) -> Weights:
    """Returns all tensors of the safetensors files in a directory."""
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        raise CheckpointNotFoundError(
            f"{directory}: no safetensors file is there: name a directory that has some",
            path=directory,
        )
    tensors: dict[str, TensorExtent] = {}
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
    """Returns the tensors of one safetensors file."""
    name = os.fspath(path)
    with storage_errors("read", name), path.open("rb") as file:
        mark = FileMark.of(os.fstat(file.fileno()))
        header = read_header(file, name)
    tensors = {
        label: TensorExtent(
            name, one.begin, one.shape, dtypes.any_torch_dtype(dtype_of(name, label, one))
        )
        for label, one in header.tensors.items()
    }
    return FileHeader(tensors, mark, header.metadata)
