"""`Linker`: collects the files of tensors that a save links instead of reading them."""

from __future__ import annotations

import math
import os
from hashlib import blake2b
from typing import TYPE_CHECKING

from penstock.errors import StorageError, UnsupportedStateError
from penstock.tensors import dtypes
from penstock.tensors.native_rows import GlobalBox, Linked, LinkedFile, LinkedTensor

if TYPE_CHECKING:
    from penstock.tensors.file_tensor import FileTarget, FileTensor

_PAGE_BYTES = 4096


class Linker:
    """Collects the files of a state, each once, and the tensors in them.

    Attributes:
        linked: The files and the tensors; each file with the object that holds it.
    """

    def __init__(self) -> None:
        self.linked = Linked([], [])
        self._index_of: dict[int, int] = {}

    def add(self, tensor: FileTensor, name: str, box: GlobalBox | None = None) -> None:
        """Adds a tensor; a box comes with its global tensor and the position in it."""
        files, tensors = self.linked
        held = tensor.file
        # The list keeps the file alive, so that no other object gets its id.
        index = self._index_of.setdefault(id(held), len(files))
        if index == len(files):
            files.append(LinkedFile(held.path, held.nbytes, list(held.chunks), held, held.sealer))
        dtype, item_bytes = type_of(tensor, name)
        shape = tuple(tensor.shape)
        place = (index, tensor.offset, tensor.label)
        tensors.append(LinkedTensor(name, dtype, shape, item_bytes, *place, box))


def place_of(tensor: FileTensor) -> object:
    """Returns a key that is equal for references to the same tensor."""
    return (id(tensor.file), tensor.offset, tensor.label, tensor.dtype, tuple(tensor.shape))


def mark_of(tensor: FileTensor, name: str) -> int:
    """Returns a 64-bit fingerprint of a tensor and one page of its elements, from its middle.

    Digests of its file cannot show whether ranks hold the same tensor: they cover chunks, in which
    the tensor may be at another place, beside other tensors. Tensors that have diverged differ
    almost everywhere, so one page suffices.
    """
    dtype, item_bytes = type_of(tensor, name)
    shape = tuple(tensor.shape)
    nbytes = math.prod(shape) * item_bytes
    middle = nbytes // 2
    path = tensor.file.path
    if tensor.file.sealer is not None:
        # Each rank has sealed its file with another key.
        return _mark(name, dtype, shape, _opened_page(tensor, middle, nbytes))
    try:
        with open(path, "rb", buffering=0) as file:
            page = os.pread(
                file.fileno(), min(nbytes - middle, _PAGE_BYTES), tensor.offset + middle
            )
    except OSError as error:
        message = f"cannot read {path}, which holds {name}: {error.strerror}"
        raise StorageError(message, path=path, errno=error.errno) from error
    return _mark(name, dtype, shape, page)


def _opened_page(tensor: FileTensor, middle: int, nbytes: int) -> bytes:
    memory = bytearray(min(nbytes - middle, _PAGE_BYTES))
    if memory:
        torch = dtypes.import_torch()
        tensor.file.read(torch.frombuffer(memory, dtype=torch.uint8), tensor.offset + middle)
    return bytes(memory)


def _mark(name: str, dtype: str, shape: tuple[int, ...], page: bytes) -> int:
    data = f"{name}\0{dtype}\0{shape}\0".encode("utf-8", "surrogatepass") + page
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def type_of(tensor: FileTensor | FileTarget, name: str) -> tuple[str, int]:
    """Returns the name of the element type, and the bytes of an element."""
    known = dtypes.torch_names().get(tensor.dtype)
    if known is None:
        raise UnsupportedStateError(
            f"{name}: a {tensor.dtype} tensor in a file cannot be stored", key=name
        )
    return known
