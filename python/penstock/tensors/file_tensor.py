"""`FileTensor`: a leaf of a state whose elements are in a file instead of in memory.

The ``state_dict`` of an optimizer that keeps its moments on storage has such leaves. A save does
not read them, but hard-links their file into the checkpoint. The file must therefore have the form
of a checkpoint's shard (`docs/format.md`, 5), and must not change while it is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._native import BlockSealer, FileSeal

    ReadBoxes: TypeAlias = "Callable[[Any, Sequence[FileBox]], None]"

CHUNK_BYTES = 1 << 20
"""Bytes of a file that one digest covers; `docs/format.md`, 2.2."""


class HeldFile(ABC):
    """A safetensors file on stable storage, with the header and padding of a shard.

    It exists at its path, unchanged, as long as this object lives.

    Attributes:
        path: The path of the file.
        nbytes: The size of the file.
        chunks: CRC-64/NVME of each `CHUNK_BYTES` of the file; the last chunk may be shorter.
        sealer: Its key, if it is sealed by blocks or by chunks: only a sealed save may link it.
    """

    path: str
    nbytes: int
    chunks: Sequence[int]
    sealer: BlockSealer | FileSeal | None = None

    @abstractmethod
    def read(self, memory: Any, offset: int) -> None:
        """Fills a contiguous tensor from the file, and checks the digests of the bytes and tags."""

    @abstractmethod
    def target(self, tensor: FileTensor) -> FileTarget:
        """Returns the place where a load stores a replacement for one of the file's tensors."""


class FileTensor:
    """A tensor in a file: row-major, without gaps.

    Pickled, for example by `torch.save`, it becomes the tensor that `read` returns.

    Attributes:
        file: The file.
        offset: Offset of the first byte.
        label: The tensor's name in the file's header.
        dtype: A `torch.dtype`.
        shape: Its sizes, on this rank.
        like: The `DTensor` of which this is the local part; None for a plain tensor.
    """

    __slots__ = ("dtype", "file", "label", "like", "offset", "shape")

    def __init__(
        self,
        file: HeldFile,
        offset: int,
        label: str,
        dtype: Any,
        shape: tuple[int, ...],
        like: Any = None,
    ) -> None:
        self.file = file
        self.offset = offset
        self.label = label
        self.dtype = dtype
        self.shape = shape
        self.like = like

    def read(self) -> Any:
        """Reads the tensor into new memory; of a `DTensor`, this rank's part."""
        import torch

        memory = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.file.read(memory, self.offset)
        return memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"FileTensor({tuple(self.shape)}, {self.dtype}, {self.file.path!r}, {self.offset})"


class FileTarget:
    """A tensor in a file that a load replaces; derived classes know the place.

    Attributes:
        filler: Stores the new values of all its targets together.
        dtype: A `torch.dtype`.
        shape: Its sizes, on this rank.
        like: The `DTensor` of which this is the local part; None for a plain tensor.
    """

    filler: Filler
    dtype: Any
    shape: tuple[int, ...]
    like: Any = None


class FileBox(NamedTuple):
    """A box of a tensor that is read into memory at once, row-major and without gaps.

    Attributes:
        target: Index of the tensor among the targets.
        start: Index of the first element within the tensor's `shape`.
        shape: The sizes of the box.
        place: Offset of the box in the memory, in bytes, aligned for its element type.
    """

    target: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: int


class Filler(ABC):
    """Fills its targets, combining many small ones into one read."""

    @abstractmethod
    def fill(self, targets: Sequence[Any], read: ReadBoxes) -> list[FileTensor]:
        """Stores tensors, one block of memory at a time.

        Args:
            targets: Each target once, preferably in stored order.
            read: Reads and verifies boxes of the targets, all at once, into a flat tensor of bytes
                on the CPU; it changes no other bytes of that tensor.

        Returns:
            The tensors, in the order of the targets.
        """
