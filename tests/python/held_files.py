"""Files of tensors as an optimizer on storage holds them, in a few lines and in memory's time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compare import tensor_bytes
from penstock import _native
from penstock.state import dtypes
from penstock.state.file_tensor import CHUNK_BYTES, FileTarget, FileTensor, HeldFile
from penstock.state.memory import of_array, to_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAGE_BYTES = 4096

STORED = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int64: "I64",
}
"""What safetensors calls a type."""


class Held(HeldFile):
    """A file of tensors; gone with this object, as that of an optimizer is.

    Args:
        path: Where.
        tensors: By their names in the file.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "penstock": "1"}}
        data = b""
        self._places = {}
        for label, tensor in tensors.items():
            piece = tensor_bytes(tensor)
            header[label] = {
                "dtype": STORED[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [len(data), len(data) + len(piece)],
            }
            self._places[label] = (len(data), tensor.dtype, tuple(tensor.shape))
            data += piece
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % PAGE_BYTES)
        self._data_start = 8 + len(text)
        whole = len(text).to_bytes(8, "little") + text + data
        self.path = str(path)
        self.nbytes = len(whole)
        self.chunks = chunks_of(whole)
        path.write_bytes(whole)

    def tensor(self, label: str, like: Any = None) -> FileTensor:
        """One of its tensors."""
        at, dtype, shape = self._places[label]
        return FileTensor(self, self._data_start + at, label, dtype, shape, like)

    def read(self, memory: Any, offset: int) -> None:
        with open(self.path, "rb") as file:
            file.seek(offset)
            read = np.frombuffer(file.read(memory.nbytes), np.uint8).copy()
        memory.view(-1).view(torch.uint8).copy_(torch.from_numpy(read))

    def target(self, tensor: FileTensor) -> Target:
        return Target(f"{self.path}.{tensor.label}", tensor.dtype, tensor.shape, tensor.like)

    def __del__(self) -> None:
        if os.path.exists(self.path):
            os.unlink(self.path)


class Target(FileTarget):
    """A place for a tensor, which is filled a few rows at a time.

    Args:
        path: What its file will be called.
        dtype: Type of the elements.
        shape: Sizes on this rank.
        like: The `DTensor` that it belongs to.

    Attributes:
        asked: Indices and sizes that were read, in order.
    """

    ROWS = 3

    def __init__(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], like: Any) -> None:
        self.path = path
        self.dtype = dtype
        self.shape = shape
        self.like = like
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def fill(self, read: Callable[[Any, tuple[int, ...]], None]) -> FileTensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        if not self.shape:
            read(whole, ())
        rows = self.shape[0] if self.shape and whole.numel() else 0
        for row in range(0, rows, self.ROWS):
            start = (row, *[0] * (len(self.shape) - 1))
            piece = torch.empty_like(whole[row : row + self.ROWS])
            read(piece, start)
            self.asked.append((start, tuple(piece.shape)))
            whole[row : row + self.ROWS] = piece
        return Held(Path(self.path), {"new": whole}).tensor("new", self.like)


def chunks_of(data: bytes) -> list[int]:
    """Digests of the chunks of a file."""
    pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
    return _native.digests([to_source(of_array(array, "chunk"), "chunk") for array in arrays])


def name_of(tensor: FileTensor) -> str:
    """The type of its elements, as the format calls it."""
    return dtypes.torch_names()[tensor.dtype][0]
