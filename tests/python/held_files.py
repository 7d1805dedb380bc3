"""Files of tensors like those of an optimizer on storage, in a few lines and in memory."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compare import tensor_bytes
from penstock import _native
from penstock.io.files.seals import open_chunks, seal_chunks
from penstock.tensors import dtypes
from penstock.tensors.file_tensor import (
    CHUNK_BYTES,
    FileBox,
    FileTarget,
    FileTensor,
    Filler,
    HeldFile,
)
from penstock.tensors.memory import of_array, to_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.tensors.file_tensor import ReadBoxes

PAGE_BYTES = 4096

STORED = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int64: "I64",
}
"""Names of the types in safetensors."""


class Held(HeldFile):
    """A file of tensors, deleted with this object like an optimizer's.

    Args:
        path: Path of the file.
        tensors: The tensors by their names in the file.
        is_sealed: Whether its chunks are sealed, with a key of its own.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, torch.Tensor], *, is_sealed: bool = False
    ) -> None:
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
        if is_sealed:
            entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
            header = {"penstock.sealed": entry}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % PAGE_BYTES)
        self._data_start = 8 + len(text)
        whole = len(text).to_bytes(8, "little") + text + data
        self.path = str(path)
        self.nbytes = len(whole)
        self._seal = None
        if is_sealed:
            self.sealer = self._seal = _native.FileSeal(len(whole), self._data_start)
            memory = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
            seal_chunks(self._seal, memory, 0)
            whole = memory.numpy().tobytes()
        self.chunks = chunks_of(whole)
        path.write_bytes(whole)

    def tensor(self, label: str, like: Any = None) -> FileTensor:
        """Returns one of its tensors."""
        at, dtype, shape = self._places[label]
        return FileTensor(self, self._data_start + at, label, dtype, shape, like)

    def read(self, memory: Any, offset: int) -> None:
        content = torch.frombuffer(bytearray(Path(self.path).read_bytes()), dtype=torch.uint8)
        if self._seal is not None:
            assert open_chunks(self._seal, content, 0) is None
        memory.view(-1).view(torch.uint8).copy_(content[offset : offset + memory.nbytes])

    def target(self, tensor: FileTensor) -> Target:
        return Target(f"{self.path}.{tensor.label}", tensor.dtype, tensor.shape, tensor.like)

    def __del__(self) -> None:
        if os.path.exists(self.path):
            os.unlink(self.path)


class Target(FileTarget):
    """A target for a tensor, filled a few rows at a time together with other targets.

    Args:
        path: Path of its future file.
        dtype: Type of the elements.
        shape: Sizes on this rank.
        like: The `DTensor` that it belongs to.

    Attributes:
        asked: Indices and sizes that were read, in order.
    """

    def __init__(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], like: Any) -> None:
        self.path = path
        self.filler = FILLER
        self.dtype = dtype
        self.shape = shape
        self.like = like
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def rows(self, first: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns start and sizes of some rows; None after the last one."""
        if not self.shape:
            return None if first else ((), ())
        sizes = (min(count, self.shape[0] - first), *self.shape[1:])
        return ((first, *[0] * (len(sizes) - 1)), sizes) if min(sizes) > 0 else None


class RowsFiller(Filler):
    """Fills several targets together: the first rows of all, then the next ones."""

    ROWS = 3

    def fill(self, targets: Sequence[Target], read: ReadBoxes) -> list[FileTensor]:
        wholes = [torch.empty(one.shape, dtype=one.dtype) for one in targets]
        first = 0
        while boxes := self._boxes(targets, first):
            last = targets[boxes[-1].target].dtype.itemsize * math.prod(boxes[-1].shape)
            memory = torch.zeros(boxes[-1].place + last, dtype=torch.uint8)
            read(memory, boxes)
            for box in boxes:
                whole = wholes[box.target]
                nbytes = math.prod(box.shape) * whole.element_size()
                block = memory[box.place : box.place + nbytes].view(whole.dtype).view(box.shape)
                (whole[first : first + self.ROWS] if box.shape else whole).copy_(block)
                targets[box.target].asked.append((box.start, box.shape))
            first += self.ROWS
        return [
            Held(Path(one.path), {"new": whole}).tensor("new", one.like)
            for one, whole in zip(targets, wholes, strict=True)
        ]

    def _boxes(self, targets: Sequence[Target], first: int) -> list[FileBox]:
        boxes, place = [], 64
        for index, one in enumerate(targets):
            if (rows := one.rows(first, self.ROWS)) is not None:
                boxes.append(FileBox(index, *rows, place))
                # At separate aligned places, where elements of any type may be stored.
                place += -(-math.prod(rows[1]) * one.dtype.itemsize // 64) * 64 + 64
        return boxes


FILLER = RowsFiller()


def chunks_of(data: bytes) -> list[int]:
    """Returns the digests of a file's chunks."""
    pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
    return _native.digests([to_source(of_array(array, "chunk"), "chunk") for array in arrays])


def name_of(tensor: FileTensor) -> str:
    """Returns the format's name for the type of its elements."""
    return dtypes.torch_names()[tensor.dtype][0]
