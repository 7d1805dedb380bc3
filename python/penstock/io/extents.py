"""Where in which file the bytes of each weight lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.io.file_marks import FileMark


class Run(NamedTuple):
    """Bytes that lie together in a file.

    Attributes:
        path: The file.
        offset: Of the first byte.
        nbytes: How many.
    """

    path: str
    offset: int
    nbytes: int


class Arrangement(NamedTuple):
    """How a parameter has the elements of a stored tensor.

    Attributes:
        view: The sizes that the stored ones are looked at with, in the same order.
        order: Of those dimensions, as the parameter has them.
        shape: The sizes of the parameter.
    """

    view: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes of one tensor, contiguous, in row-major order.

    Attributes:
        path: The file.
        offset: Of the first byte.
        shape: Its sizes.
        dtype: A `torch.dtype`.
        arrangement: How the model has it, where that is not as it is stored.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: Any
    arrangement: Arrangement | None = None

    @property
    def runs(self) -> Sequence[Run]:
        """Where its bytes lie, in their order."""
        return (Run(self.path, self.offset, self.nbytes),)

    @property
    def shape_in_model(self) -> tuple[int, ...]:
        """The sizes that the model has it with."""
        return self.shape if self.arrangement is None else self.arrangement.shape

    def fill(self, target: Any, values: Any) -> None:
        """Has a tensor of the model hold what is stored.

        Args:
            target: Of `shape_in_model`, contiguous.
            values: The stored elements, of `shape`.
        """
        if self.arrangement is None:
            target.copy_(values)
            return
        view, order, _ = self.arrangement
        arranged = values.view(view).permute(order)
        target.view(arranged.shape).copy_(arranged)

    def part(self, begin: int, shape: tuple[int, ...]) -> Stored:
        """What is stored from a byte of it on, as it is stored.

        Args:
            begin: The byte.
            shape: The sizes of the part.
        """
        return Stored(self.path, self.offset + begin, shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def end(self) -> int:
        """Behind the last byte."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Joined(Stored):
    """A tensor whose bytes lie in several places, as of one that many ranks have saved.

    Attributes:
        places: Where they lie, in their order; `path` and `offset` are of the first ones.
    """

    places: tuple[Run, ...] = ()

    @property
    def runs(self) -> Sequence[Run]:
        """Where its bytes lie, in their order."""
        return self.places

    def part(self, begin: int, shape: tuple[int, ...]) -> Stored:
        """What is stored from a byte of it on, as it is stored."""
        end = begin + math.prod(shape) * int(self.dtype.itemsize)
        found, passed = [], 0
        for run in self.places:
            first, last = max(begin - passed, 0), min(end - passed, run.nbytes)
            if first < last:
                found.append(Run(run.path, run.offset + first, last - first))
            passed += run.nbytes
        if not found:
            return Stored(self.path, self.offset, shape, self.dtype)
        path, offset, _ = found[0]
        if len(found) == 1:
            return Stored(path, offset, shape, self.dtype)
        return Joined(path, offset, shape, self.dtype, places=tuple(found))


class Piece(NamedTuple):
    """A tensor of the files that is a part of a parameter.

    Attributes:
        name: In the files.
        stored: Its bytes.
    """

    name: str
    stored: Stored


@dataclass(frozen=True, slots=True)
class Composed:
    """A parameter that several tensors of the files make up.

    Attributes:
        shape_in_model: Its sizes.
        slabs: What makes up each of its parts along the first dimension, one row behind the other.
    """

    shape_in_model: tuple[int, ...]
    slabs: tuple[tuple[Piece, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(piece.stored.nbytes for slab in self.slabs for piece in slab)


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors that there are, and what was known of their files when they were looked at.

    Attributes:
        tensors: By name.
        marks: Of each file by its path, what tells whether it has changed: see `FileMark`.
        digests: Of the files' bytes, where there are any.
    """

    tensors: Mapping[str, Stored | Composed]
    marks: Mapping[str, FileMark]
    digests: Digests | None = None


class Digests(Protocol):
    """What bytes of files are compared with when they are read for the first time.

    Attributes:
        chunk_bytes: So many bytes of a file have one digest, from its beginning on.
    """

    chunk_bytes: int

    def check(self, path: str, start: int, pieces: Sequence[Any], wanted: tuple[int, int]) -> None:
        """Compares bytes of a file with their digests.

        Args:
            path: The file.
            start: Where in it they begin; a chunk does there.
            pieces: Tensors of bytes that hold them one behind the other, up to the end of a chunk.
            wanted: Of the bytes of the file those that are computed with.

        Raises:
            CorruptCheckpointError: They are not what was stored.
        """
