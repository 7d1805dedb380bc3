"""What a save links to instead of reading it: files of tensors, as the native module takes them."""

from __future__ import annotations

import math
import os
from hashlib import blake2b
from typing import TYPE_CHECKING

from penstock.errors import StorageError, UnsupportedStateError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from penstock import _native
    from penstock.tensors.file_tensor import FileTarget, FileTensor
    from penstock.tensors.memory import GlobalBox

_PAGE_BYTES = 4096


class Linker:
    """Gathers the files of a state, each once, and the tensors in them.

    Attributes:
        linked: The files and the tensors; each file with who holds it.
    """

    def __init__(self) -> None:
        self.linked: _native._Linked = ([], [])
        self._index_of: dict[int, int] = {}

    def add(self, tensor: FileTensor, name: str, box: GlobalBox | None = None) -> None:
        """Adds a tensor.

        Args:
            tensor: The tensor.
            name: Its name in the part.
            box: What it is of a global tensor, if it is a box.

        Raises:
            UnsupportedStateError: The format has no place for its type.
        """
        files, tensors = self.linked
        held = tensor.file
        # Held by the list, so that no other object can get its id.
        index = self._index_of.setdefault(id(held), len(files))
        if index == len(files):
            files.append((held.path, held.nbytes, list(held.chunks), held))
        dtype, item_bytes = type_of(tensor, name)
        shape = tuple(tensor.shape)
        tensors.append((name, dtype, shape, item_bytes, index, tensor.offset, tensor.label, box))


def place_of(tensor: FileTensor) -> object:
    """The same for tensors that are one and the same."""
    return (id(tensor.file), tensor.offset, tensor.label, tensor.dtype, tuple(tensor.shape))


def mark_of(tensor: FileTensor, name: str) -> int:
    """A 64-bit number that stands for a tensor and a page of its elements, from its middle.

    Digests of its file do not tell whether ranks hold the same tensor: they are of chunks, in which
    it may lie in another place, beside others. And what has run apart differs nearly everywhere.

    Args:
        tensor: The tensor.
        name: What all ranks call it.

    Raises:
        StorageError: The file cannot be read.
    """
    dtype, item_bytes = type_of(tensor, name)
    shape = tuple(tensor.shape)
    nbytes = math.prod(shape) * item_bytes
    middle = nbytes // 2
    path = tensor.file.path
    try:
        with open(path, "rb", buffering=0) as file:
            page = os.pread(
                file.fileno(), min(nbytes - middle, _PAGE_BYTES), tensor.offset + middle
            )
    except OSError as error:
        message = f"cannot read {path}, which holds {name}: {error.strerror}"
        raise StorageError(message, path=path, errno=error.errno) from error
    data = f"{name}\0{dtype}\0{shape}\0".encode("utf-8", "surrogatepass") + page
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def type_of(tensor: FileTensor | FileTarget, name: str) -> tuple[str, int]:
    """Name of the type of the elements, and bytes of one.

    Raises:
        UnsupportedStateError: The format has no place for it.
    """
    known = dtypes.torch_names().get(tensor.dtype)
    if known is None:
        raise UnsupportedStateError(
            f"{name}: a {tensor.dtype} tensor in a file cannot be stored", key=name
        )
    return known
