"""`FileTensor`: a leaf of a state whose elements lie in a file instead of in memory.

An optimizer that keeps its moments on storage has such leaves in its ``state_dict``. A save does
not read them: their file gets a second name in the checkpoint, by a hard link. So the file has to
be what a shard of a checkpoint is (`docs/format.md`, 5), and never changes as long as somebody
holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    ReadBoxes: TypeAlias = "Callable[[Any, Sequence[FileBox]], None]"

CHUNK_BYTES = 1 << 20
"""What a digest of a file is of; `docs/format.md`, 2.2."""


class HeldFile(ABC):
    """A safetensors file on stable storage, with header and padding as a shard has them.

    It is there under its path, and nobody changes it, as long as this object lives.

    Attributes:
        path: The file.
        nbytes: Its size.
        chunks: CRC-64/NVME of each `CHUNK_BYTES` of it; the last ones may be fewer.
    """

    path: str
    nbytes: int
    chunks: Sequence[int]

    @abstractmethod
    def read(self, memory: Any, offset: int) -> None:
        """Reads what fills a contiguous tensor, and compares it with the digests.

        Raises:
            TransferError: It cannot be read.
            CorruptCheckpointError: It is damaged.
        """

    @abstractmethod
    def target(self, tensor: FileTensor) -> FileTarget:
        """Where a load puts what comes in the place of one of its tensors."""


class FileTensor:
    """A tensor in a file: row-major, without gaps.

    Pickled, as by `torch.save`, it is the tensor that `read` gives.

    Attributes:
        file: The file.
        offset: Of its first byte.
        label: Its name in the file's header.
        dtype: A `torch.dtype`.
        shape: Its sizes, on this rank.
        like: The `DTensor` whose local part it belongs to, if it is a part of something.
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
        """The tensor, in memory of its own; of a `DTensor`, what this rank holds.

        Raises:
            TransferError: It cannot be read.
            CorruptCheckpointError: It is damaged.
        """
        import torch

        memory = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.file.read(memory, self.offset)
        return memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"FileTensor({tuple(self.shape)}, {self.dtype}, {self.file.path!r}, {self.offset})"


class FileTarget:
    """Where a load puts a tensor that is to lie in a file.

    Attributes:
        filler: Whoever fills it, together with others of its own.
        dtype: A `torch.dtype`.
        shape: Its sizes, on this rank.
        like: The `DTensor` whose local part it belongs to, if it is a part of something.
    """

    filler: Filler
    dtype: Any
    shape: tuple[int, ...]
    like: Any = None


class FileBox(NamedTuple):
    """What of a tensor is read into memory at a time, row-major and without gaps.

    Attributes:
        target: Index of the tensor among those that are filled.
        start: Index of the first element, counted within its `shape`.
        shape: Sizes.
        place: Where it begins in the memory, in bytes: where elements of its type may lie.
    """

    target: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: int


class Filler(ABC):
    """Fills targets of its own, of small ones many with one read."""

    @abstractmethod
    def fill(self, targets: Sequence[Any], read: ReadBoxes) -> list[FileTensor]:
        """Writes tensors, a piece of memory at a time.

        Args:
            targets: Each once; best in the order in which they are stored.
            read: Reads and verifies boxes of them, all at once: into a flat tensor of bytes on the
                CPU, where it changes nothing else.

        Returns:
            The tensors, in the order of the targets.
        """
