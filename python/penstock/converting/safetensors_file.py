"""Files of safetensors, mapped to memory: accelerate keeps weights in them, DCP ends files so."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch

from penstock.errors import CorruptCheckpointError

_HEADER_BYTES_MAX = 100_000_000
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}


def read_safetensors(file: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, by name.

    Raises:
        CorruptCheckpointError: It is none, or cut.
    """
    return read_at(file, 0)[0]


def read_at(file: str, start: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, by name, and the notes of what begins somewhere in a file and ends with it.

    Raises:
        CorruptCheckpointError: It is none, or cut.
    """
    try:
        with open(file, "rb") as opened:
            opened.seek(start)
            header_bytes = int.from_bytes(opened.read(8), "little")
            if header_bytes > _HEADER_BYTES_MAX:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(header_bytes))
        nbytes = os.path.getsize(file)
        data = torch.from_file(file, shared=False, size=nbytes, dtype=torch.uint8)
        data = data[start + 8 + header_bytes :]
        notes = header.pop("__metadata__", {})
        return {name: _tensor(data, entry) for name, entry in header.items()}, notes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{file} is no file of safetensors, cut or damaged: {error}", path=file
        ) from error


def _tensor(data: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    nbytes = math.prod(shape) * dtype.itemsize
    if not 0 <= begin <= end <= data.numel() or end - begin != nbytes:
        raise ValueError(f"{end - begin} bytes at {begin} are none of {shape} of {dtype}")
    found = data[begin:end]
    if found.data_ptr() % dtype.itemsize or found.storage_offset() % dtype.itemsize:
        # Old writers began data wherever the header ended.
        found = found.clone()
    return found.view(dtype).reshape(shape)
