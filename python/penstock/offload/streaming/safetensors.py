"""Headers of safetensors files: which tensor lies where.

The format is in https://github.com/huggingface/safetensors: eight bytes with the length of the
header, little-endian; the header, a JSON object of ``dtype``, ``shape`` and ``data_offsets`` by
name; the tensors. Its library reads them, but does not say where they lie.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from penstock.offload.streaming.file_mark import FileMark
from penstock.offload.streaming.stored import Stored, Weights
from penstock.state import dtypes

_HEADER_BYTES_MAX = 100_000_000
"""As the library has it."""
_LENGTH_BYTES = 8
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Names of types, as headers have them and as `docs/format.md` does."""


def weights_of(directory: str) -> Weights:
    """All tensors of the safetensors files in a directory.

    Raises:
        CheckpointNotFoundError: There are none.
        CorruptCheckpointError: A file is not what its header says, or a tensor is in two.
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
        found, marks[os.fspath(path)] = header_of(path)
        for name, one in found.items():
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


def header_of(path: Path) -> tuple[dict[str, Stored], FileMark]:
    """The tensors of one file.

    Raises:
        CorruptCheckpointError: It is not what its header says.
        StorageError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            mark = FileMark.of(os.fstat(file.fileno()))
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_HEADER_BYTES_MAX, mark.nbytes - _LENGTH_BYTES):
                raise _broken(path, f"its header would have {length} bytes")
            text = file.read(length)
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}", path=os.fspath(path), errno=error.errno
        ) from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    begin = _LENGTH_BYTES + length
    header.pop("__metadata__", None)
    found = {name: _stored(path, name, entry, begin) for name, entry in header.items()}
    for name, one in found.items():
        if one.end > mark.nbytes:
            raise _broken(path, f"it ends before {name!r} does", name)
    return found, mark


def _stored(path: Path, name: str, entry: Any, begin: int) -> Stored:
    torch = dtypes.import_torch()
    try:
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        kind = str(entry["dtype"])
        is_plain = all(type(one) is int and one >= 0 for one in (first, last, *shape))
    except (TypeError, KeyError, ValueError):
        is_plain = False
    if not is_plain:
        raise _broken(path, f"its header does not say where {name!r} lies", name)
    dtype = getattr(torch, DTYPES.get(kind, ""), None)
    if dtype is None:
        why = f"{name!r} is of the type {kind}, which is not known here"
        raise _broken(path, why, name, "get the file again, or a newer PyTorch or Penstock")
    one = Stored(os.fspath(path), begin + first, shape, dtype)
    if one.nbytes == 0 and max(shape, default=0) >= 1 << 63:
        raise _broken(path, f"{name!r} has the shape {list(shape)}", name)
    if one.nbytes != last - first:
        held = last - first
        raise _broken(path, f"{name!r} has {held} bytes, its shape takes {one.nbytes}", name)
    return one


def _broken(
    path: Path, why: str, name: str | None = None, remedy: str = "get the file again"
) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {why}: {remedy}",
        path=os.fspath(path.parent),
        file=path.name,
        tensor=name,
    )
