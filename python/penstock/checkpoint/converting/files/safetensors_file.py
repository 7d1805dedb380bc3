"""Maps safetensors files to memory: accelerate's weights, and the ends of DCP's files."""

from __future__ import annotations

import os

import torch

from penstock.io.files.safetensors_files import Described, dtype_of, read_header
from penstock.tensors.dtypes import any_torch_dtype


def read_safetensors(file: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file, by name."""
    return read_at(file, 0)[0]


def read_at(file: str, start: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns tensors and notes of safetensors data between an offset and the end of a file."""
    with open(file, "rb") as opened:
        header = read_header(opened, file, start)
    nbytes = os.path.getsize(file)
    data = torch.from_file(file, shared=False, size=nbytes, dtype=torch.uint8)
    found = {name: _tensor(data, file, name, one) for name, one in header.tensors.items()}
    return found, header.metadata


def _tensor(data: torch.Tensor, file: str, name: str, described: Described) -> torch.Tensor:
    dtype = any_torch_dtype(dtype_of(file, name, described))
    found = data[described.begin : described.end]
    if found.data_ptr() % dtype.itemsize or found.storage_offset() % dtype.itemsize:
        # Old writers started the data wherever the header ended.
        found = found.clone()
    return found.view(dtype).reshape(described.shape)
