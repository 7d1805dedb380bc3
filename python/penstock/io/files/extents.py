"""Byte ranges of weights in files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.io.files.file_marks import FileMark


class FileRange(NamedTuple):
    """A contiguous byte range of a file.

    Attributes:
        path: The path of the file.
        offset: Offset of the first byte.
        nbytes: Number of bytes.
    """

    path: str
    offset: int
    nbytes: int


class Arrangement(NamedTuple):
    """A view and permutation that turn a stored tensor into a parameter.

    Attributes:
        view: Sizes of a view of the stored elements, in stored order.
        order: The permutation of that view's dimensions.
        shape: The sizes of the parameter.
    """

    view: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """One contiguous tensor in row-major order.

    Attributes:
        path: The path of the file.
        offset: Offset of the first byte.
        shape: The stored sizes.
        dtype: A `torch.dtype`.
        arrangement: The conversion to the model's layout; None if the layouts are equal.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: Any
    arrangement: Arrangement | None = None

    @property
    def runs(self) -> Sequence[FileRange]:
        """The byte ranges of the tensor, in order."""
        return (FileRange(self.path, self.offset, self.nbytes),)

    @property
    def shape_in_model(self) -> tuple[int, ...]:
        """The sizes of the tensor in the model."""
        return self.shape if self.arrangement is None else self.arrangement.shape

    def fill(self, target: Any, values: Any) -> None:
        """Copies elements of shape `shape` into a contiguous tensor of shape `shape_in_model`."""
        if self.arrangement is None:
            target.copy_(values)
            return
        view, order, _ = self.arrangement
        arranged = values.view(view).permute(order)
        target.view(arranged.shape).copy_(arranged)

    def part(self, begin: int, shape: tuple[int, ...]) -> TensorExtent:
        """Returns a part of the stored tensor from an offset in bytes, in stored layout."""
        return TensorExtent(self.path, self.offset + begin, shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """The size of the tensor, in bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def end(self) -> int:
        """Offset of the byte after the tensor."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class JoinedExtent(TensorExtent):
    """A tensor whose bytes are split over several places, such as one saved by many ranks.

    Attributes:
        places: The byte ranges in order; `path` and `offset` are those of the first.
    """

    places: tuple[FileRange, ...] = ()

    @property
    def runs(self) -> Sequence[FileRange]:
        """The byte ranges of the tensor, in order."""
        return self.places

    def part(self, begin: int, shape: tuple[int, ...]) -> TensorExtent:
        """Returns a part of the stored tensor, in stored layout."""
        end = begin + math.prod(shape) * int(self.dtype.itemsize)
        found, passed = [], 0
        for run in self.places:
            first, last = max(begin - passed, 0), min(end - passed, run.nbytes)
            if first < last:
                found.append(FileRange(run.path, run.offset + first, last - first))
            passed += run.nbytes
        if not found:
            return TensorExtent(self.path, self.offset, shape, self.dtype)
        path, offset, _ = found[0]
        if len(found) == 1:
            return TensorExtent(path, offset, shape, self.dtype)
        return JoinedExtent(path, offset, shape, self.dtype, places=tuple(found))


class ParameterPart(NamedTuple):
    """A stored tensor that forms a part of a parameter."""

    name: str
    stored: TensorExtent


@dataclass(frozen=True, slots=True)
class Composed:
    """A parameter that is composed of several stored tensors.

    Attributes:
        shape_in_model: The sizes of the parameter.
        slabs: The stored tensors of each part along the first dimension, in row order.
    """

    shape_in_model: tuple[int, ...]
    slabs: tuple[tuple[ParameterPart, ...], ...]

    @property
    def nbytes(self) -> int:
        """The size of all stored parts, in bytes."""
        return sum(piece.stored.nbytes for slab in self.slabs for piece in slab)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights in a set of files, with the files' marks at that time.

    Attributes:
        tensors: The weights by name.
        marks: The mark of each file by path, to detect changes; see `FileMark`.
        digests: Digests of the files' bytes; None if there are none.
        chunks: Opens the files' chunks; None if they are not sealed.
    """

    tensors: Mapping[str, TensorExtent | Composed]
    marks: Mapping[str, FileMark]
    digests: Digests | None = None
    chunks: SealedChunks | None = None


class SealedChunks(Protocol):
    """Chunks of sealed files, which are opened after every read.

    Attributes:
        chunk_bytes: Size of each chunk, counted from the file's beginning.
    """

    chunk_bytes: int

    def open(self, path: str, start: int, pieces: Sequence[Any], wanted: tuple[int, int]) -> None:
        """Opens bytes of a file in place.

        Args:
            path: The path of the file.
            start: Offset of the bytes, which begins a chunk.
            pieces: Tensors of bytes with the contents, in order, up to the end of a chunk.
            wanted: The byte range of the file that the caller uses.

        Raises:
            TamperedError: A chunk does not open; `check` tells whether it is damaged.
        """

    def check(self, path: str, start: int, pieces: Sequence[Any], wanted: tuple[int, int]) -> None:
        """Compares sealed bytes with their digests, as `Digests.check` does."""


class Digests(Protocol):
    """Digests that file bytes are checked against at their first read.

    Attributes:
        chunk_bytes: Size of each digested chunk, counted from the file's beginning.
        is_signed: Whether bytes are compared with signed hashes, too, and so at every read.
    """

    chunk_bytes: int
    is_signed: bool

    def check(self, path: str, start: int, pieces: Sequence[Any], wanted: tuple[int, int]) -> None:
        """Checks bytes of a file against their digests.

        Args:
            path: The path of the file.
            start: Offset of the bytes, which begins a chunk.
            pieces: Tensors of bytes with the contents, in order, up to the end of a chunk.
            wanted: The byte range of the file that the caller uses.
        """
