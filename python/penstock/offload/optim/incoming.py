"""`Incoming`: state that comes from elsewhere, a tensor at a time, into files of its own."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.errors import StateMismatchError
from penstock.offload.optim.digests import combined
from penstock.offload.optim.files import sync
from penstock.offload.optim.layout import label
from penstock.state import dtypes
from penstock.state.file_tensor import CHUNK_BYTES, FileTarget, FileTensor, HeldFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.offload.optim.files import Room, StateFile
    from penstock.offload.optim.layout import Entry, Segment
    from penstock.offload.optim.state import StoredState
    from penstock.offload.transfer import Transfer

_PIECE_BYTES = 16 << 20
_PIECES = 2
"""How many are in memory: one is read while the one before is written."""


class _Arriving:
    """The files of a segment, as far as they are written.

    Attributes:
        rooms: One for each moment.
        parts: Of each file, the bytes that are written: where they begin and end, and their digest.
        numbers: Of each moment, the parameters that are there.
    """

    def __init__(self, rooms: list[Room]) -> None:
        self.rooms = rooms
        self.parts: list[list[tuple[int, int, int]]] = [[] for _ in rooms]
        self.numbers: list[set[int]] = [set() for _ in rooms]


class Incoming:
    """Files that are filled with tensors in any order, and become a generation when all are there.

    Args:
        state: Whose files they are.

    Attributes:
        state: The same.
    """

    def __init__(self, state: StoredState) -> None:
        self.state = state
        self._arriving: dict[Segment, _Arriving] = {}
        self._finished: dict[Segment, list[StateFile]] | None = None
        self._writes: deque[Transfer] = deque()

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can come."""
        return self._finished is not None

    def has(self, number: int, moment: str) -> bool:
        """Whether a moment of a parameter was written."""
        segment = self.state.segment_of(number)
        arriving = self._arriving.get(segment)
        return arriving is not None and number in arriving.numbers[segment.moments.index(moment)]

    def put(
        self, number: int, moment: str, read: Callable[[Any, tuple[int, ...]], None]
    ) -> tuple[Segment, int]:
        """Writes a tensor.

        Args:
            number: Of the parameter.
            moment: Which of its moments.
            read: Fills a contiguous tensor from an index on; see `FileTarget.fill`.

        Returns:
            Where it lies: the segment, and the index of the file in it.

        Raises:
            StorageError: There is no room.
            TransferError: It cannot be written.
        """
        torch = dtypes.import_torch()
        if self._finished is not None:
            raise AssertionError("nothing comes behind the end")
        segment = self.state.segment_of(number)
        file = segment.moments.index(moment)
        arriving = self._arriving_of(segment)
        index = segment.index_of(number)
        entry, start = segment.entries[index], segment.starts[index]
        for begin, shape, first in _boxes(entry):
            memory = torch.empty(shape, dtype=entry.dtype, device="cpu")
            read(memory, begin)
            flat = memory.view(-1).view(torch.uint8)
            self._write(arriving, file, flat, start + first * entry.dtype.itemsize)
        arriving.numbers[file].add(number)
        return segment, file

    def finish(self) -> dict[Segment, list[StateFile]]:
        """The files, once nothing more comes: synced; what did not come is zeros.

        Raises:
            StateMismatchError: Of a parameter not all moments came.
            StorageError: The system failed.
        """
        if self._finished is None:
            for segment, arriving in self._arriving.items():
                self._complete(segment, arriving)
            self._drain(0)
            finished = {}
            for segment, arriving in self._arriving.items():
                for room in arriving.rooms:
                    sync(room.path)
                finished[segment] = [
                    self.state.held(room, _chunks(parts))
                    for room, parts in zip(arriving.rooms, arriving.parts, strict=True)
                ]
            self._finished = finished
        return self._finished

    def _arriving_of(self, segment: Segment) -> _Arriving:
        found = self._arriving.get(segment)
        if found is None:
            rooms = [self.state.files.take(segment.nbytes) for _ in segment.moments]
            found = self._arriving[segment] = _Arriving(rooms)
        return found

    def _complete(self, segment: Segment, arriving: _Arriving) -> None:
        """Writes headers and zeros."""
        torch = dtypes.import_torch()
        there = set().union(*arriving.numbers)
        for file, (moment, numbers) in enumerate(
            zip(segment.moments, arriving.numbers, strict=True)
        ):
            if missing := there - numbers:
                name = label(min(missing), moment)
                raise StateMismatchError(
                    f"the state has no {name!r}: it is of another optimizer", key=name
                )
            header = torch.frombuffer(bytearray(segment.headers[file]), dtype=torch.uint8)
            self._write(arriving, file, header, 0)
            for entry, start in zip(segment.entries, segment.starts, strict=True):
                if entry.number not in numbers:
                    for at in range(0, entry.nbytes, _PIECE_BYTES):
                        count = min(_PIECE_BYTES, entry.nbytes - at)
                        zeros = torch.zeros(count, dtype=torch.uint8, device="cpu")
                        self._write(arriving, file, zeros, start + at)

    def _write(self, arriving: _Arriving, file: int, flat: Any, offset: int) -> None:
        ends = range((offset // CHUNK_BYTES + 1) * CHUNK_BYTES, offset + flat.numel(), CHUNK_BYTES)
        cuts = [offset, *ends, offset + flat.numel()]
        pairs = list(pairwise(cuts))
        address = flat.data_ptr() - offset
        digests = _native.digests(
            [
                ("part", "uint8", (end - begin,), address + begin, None, 1, flat, None)
                for begin, end in pairs
            ]
        )
        arriving.parts[file] += [
            (begin, end, digest) for (begin, end), digest in zip(pairs, digests, strict=True)
        ]
        self._drain(_PIECES - 1)
        self._writes.append(
            self.state.passage.writes.write(flat, arriving.rooms[file].path, offset)
        )

    def _drain(self, count: int) -> None:
        while len(self._writes) > count:
            self._writes.popleft().result()


class IncomingFile(HeldFile):
    """A file that is being filled; whoever reads it has it completed.

    Args:
        incoming: What it belongs to.
        segment: Of which it is one.
        index: Which.
    """

    def __init__(self, incoming: Incoming, segment: Segment, index: int) -> None:
        self.incoming = incoming
        self._segment = segment
        self._index = index

    @property
    def _file(self) -> StateFile:
        return self.incoming.finish()[self._segment][self._index]

    @property
    def path(self) -> str:  # type: ignore[override]
        """The file."""
        return self._file.path

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Its size."""
        return self._file.nbytes

    @property
    def chunks(self) -> Sequence[int]:  # type: ignore[override]
        """The digests of its chunks."""
        return self._file.chunks

    def read(self, memory: Any, offset: int) -> None:
        """Reads what fills a contiguous tensor; see `HeldFile.read`."""
        self._file.read(memory, offset)

    def target(self, tensor: FileTensor) -> FileTarget:
        """Where a load puts what comes in the place of one of its tensors."""
        return self._file.target(tensor)


class IncomingTarget(FileTarget):
    """Where a load puts one moment of a parameter.

    Args:
        incoming: Where it comes in.
        entry: The parameter.
        moment: Which of its moments.
        like: The parameter itself, if it is a `DTensor`.
    """

    def __init__(self, incoming: Incoming, entry: Entry, moment: str, like: Any) -> None:
        self._incoming = incoming
        self._entry = entry
        self._moment = moment
        self.dtype = entry.dtype
        self.shape = entry.shape
        self.like = like

    def fill(self, read: Callable[[Any, tuple[int, ...]], None]) -> FileTensor:
        """Writes the tensor, a piece at a time; see `FileTarget.fill`."""
        number = self._entry.number
        segment, file = self._incoming.put(number, self._moment, read)
        start = segment.starts[segment.index_of(number)]
        held = IncomingFile(self._incoming, segment, file)
        name = label(number, self._moment)
        return FileTensor(held, start, name, self.dtype, self.shape, self.like)


def _boxes(entry: Entry) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A tensor, in pieces that lie together: start, shape and first element of each."""
    most = max(_PIECE_BYTES // int(entry.dtype.itemsize), 1)
    if entry.count:
        yield from _boxes_of(entry.shape, most, (), 0)


def _boxes_of(
    shape: tuple[int, ...], most: int, outer: tuple[int, ...], first: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    ones = (1,) * len(outer)
    if math.prod(shape) <= most:
        yield (*outer, *(0,) * len(shape)), (*ones, *shape), first
        return
    inner = math.prod(shape[1:])
    if inner > most:
        for index in range(shape[0]):
            yield from _boxes_of(shape[1:], most, (*outer, index), first + index * inner)
        return
    rows = most // inner
    for begin in range(0, shape[0], rows):
        count = min(rows, shape[0] - begin)
        start = (*outer, begin, *(0,) * (len(shape) - 1))
        yield start, (*ones, count, *shape[1:]), first + begin * inner


def _chunks(parts: list[tuple[int, int, int]]) -> list[int]:
    """The digest of each chunk, from those of its parts."""
    found: list[int] = []
    at = 0
    for begin, end, digest in sorted(parts):
        if begin != at:
            raise AssertionError("all of a file is written once")
        if begin % CHUNK_BYTES == 0:
            found.append(digest)
        else:
            found[-1] = combined(found[-1], digest, end - begin)
        at = end
    return found
