"""`StateImport`: imports state into new files, many tensors at a time."""

from __future__ import annotations

import contextlib
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from penstock import _native
from penstock.errors import PenstockError, StateMismatchError
from penstock.io.digested_file import sync
from penstock.io.files.digests import combined
from penstock.io.files.seals import seal_chunks
from penstock.offload.optim.layout import label
from penstock.offload.optim.state_dict import PIECE_BYTES, pieces
from penstock.tensors import dtypes
from penstock.tensors.file_tensor import CHUNK_BYTES, FileTarget, FileTensor, Filler, HeldFile
from penstock.tensors.native_rows import TensorSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.io.digested_file import DigestedFile, ReservedFile
    from penstock.io.transfer import Transfer
    from penstock.offload.optim.chunk_pipeline import ChunkPipeline
    from penstock.offload.optim.layout import ParameterEntry, StateSegment
    from penstock.tensors.file_tensor import ReadBoxes

_Run: TypeAlias = "tuple[Any, StateSegment, int, int]"
"""Bytes to write, their segment, the file in it, and the offset there."""
_PIECES = 2
"""Pieces in memory: one is read while the one before is written."""


class _SegmentImport:
    """The files of a segment while they are written.

    Attributes:
        rooms: A file for each moment.
        parts: Written ranges of each file: begin, end and digest.
        covered: Ranges of each file whose bytes are there, in memory or written.
        chunks: Chunks of sealed files, by file and offset, some bytes of which are there.
        numbers: For each moment, numbers of the parameters that are written.
    """

    def __init__(self, rooms: list[ReservedFile]) -> None:
        self.rooms = rooms
        self.parts: list[list[tuple[int, int, int]]] = [[] for _ in rooms]
        self.covered: list[list[tuple[int, int]]] = [[] for _ in rooms]
        self.chunks: dict[tuple[int, int], _PartialChunk] = {}
        self.numbers: list[set[int]] = [set() for _ in rooms]

    @property
    def recorded(self) -> list[list[Any]]:
        """All lists of ranges."""
        return [*self.parts, *self.covered]


class _PartialChunk:
    """A chunk of a sealed file in memory, until all of its bytes are there.

    A chunk is sealed once, whole, and tensors come in any order.
    """

    def __init__(self, nbytes: int) -> None:
        torch = dtypes.import_torch()
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._missing_bytes = nbytes

    def add(self, content: Any, at: int) -> bool:
        """Copies bytes to a place; returns whether the chunk is whole."""
        self.memory[at : at + content.numel()] = content
        self._missing_bytes -= content.numel()
        return not self._missing_bytes


class _ImportedState(Protocol):
    """The parts of a `penstock.offload.optim.state.StoredState` that an import needs."""

    is_sealed: bool
    pipeline: ChunkPipeline

    def take(self, segment: StateSegment) -> ReservedFile:
        """A file of a segment's size to write."""
        ...

    def segment_of(self, number: int) -> StateSegment:
        """The segment that a parameter's moments are in."""
        ...

    def held(self, room: ReservedFile, chunks: Sequence[int]) -> DigestedFile:
        """The written file, with the digests of its chunks."""
        ...


class StateImport(Filler):
    """Files filled with tensors in any order, which become a generation when all are written.

    Args:
        state: The state of the files.

    Attributes:
        state: The state of the files.
    """

    def __init__(self, state: _ImportedState) -> None:
        self.state = state
        self._reserved: set[tuple[int, str]] = set()
        self._segments: dict[StateSegment, _SegmentImport] = {}
        self._whole: dict[StateSegment, list[DigestedFile]] = {}
        self._finished: dict[StateSegment, list[DigestedFile]] | None = None
        self._writes: deque[Transfer] = deque()
        self._is_broken = False

    @property
    def is_finished(self) -> bool:
        """Whether no more tensors can be added."""
        return self._finished is not None or self._is_broken

    def has(self, number: int, moment: str) -> bool:
        """Whether a moment of a parameter is written."""
        segment = self.state.segment_of(number)
        if segment in self._whole:
            return True
        segment_import = self._segments.get(segment)
        return (
            segment_import is not None
            and number in segment_import.numbers[segment.moments.index(moment)]
        )

    def reserve(self, number: int, moment: str) -> bool:
        """Reserves the place of a moment of a parameter; returns whether it was free."""
        key = number, moment
        is_free = not (self.is_finished or key in self._reserved or self.has(number, moment))
        self._reserved.add(key)
        return is_free

    def fill(self, targets: Sequence[ImportTarget], read: ReadBoxes) -> list[FileTensor]:
        """Writes tensors, a piece of memory at a time; see `Filler.fill`."""
        self.put([(one.entry.number, one.moment) for one in targets], read)
        return [self.tensor(one.entry.number, one.moment, one.like) for one in targets]

    def put(self, wanted: Sequence[tuple[int, str]], read: ReadBoxes) -> None:
        """Writes tensors, each given by its parameter's number and moment; see `Filler.fill`."""
        torch = dtypes.import_torch()
        if self._finished is not None:
            raise AssertionError("nothing comes behind the end")
        self._check_whole()
        places = []
        for number, moment in wanted:
            segment = self.state.segment_of(number)
            self._segment_import(segment)
            places.append((segment, number, segment.moments.index(moment)))
        before = [
            (ranges, len(ranges)) for one in self._segments.values() for ranges in one.recorded
        ]
        try:
            for piece in pieces(places, self._order(places)):
                self._drain(_PIECES - 1)
                memory = torch.empty(piece.nbytes, dtype=torch.uint8, device="cpu")
                read(memory, piece.boxes)
                self._write(
                    (memory[run.place : run.place + run.nbytes], run.segment, run.file, run.offset)
                    for run in piece.runs
                )
        except BaseException:
            self._discard()
            for ranges, count in before:
                del ranges[count:]
            if self.state.is_sealed:
                self._drop({segment for segment, _, _ in places})
            raise
        for segment, number, file in places:
            self._segments[segment].numbers[file].add(number)

    def _order(self, places: Sequence[tuple[StateSegment, int, int]]) -> list[int] | None:
        """The order of tensors in their files, in which few chunks are in memory, for sealing."""
        if not self.state.is_sealed:
            return None
        ranks = {segment: rank for rank, segment in enumerate(self._segments)}

        def place(target: int) -> tuple[int, int, int]:
            segment, number, file = places[target]
            return ranks[segment], file, segment.index_of(number)

        return sorted(range(len(places)), key=place)

    def _drop(self, segments: Iterable[StateSegment]) -> None:
        """Drops files after a failure: their chunks may be sealed, and are not sealed again."""
        for segment in segments:
            # With tensors of earlier calls in them they are lost, and with them the import.
            self._is_broken |= any(self._segments[segment].numbers)
            del self._segments[segment]

    def _check_whole(self) -> None:
        if self._is_broken:
            raise PenstockError("an earlier load into these files has failed: load the state again")

    def take(self, segment: StateSegment, files: list[DigestedFile]) -> None:
        """Takes over files that hold all of a segment already.

        Args:
            segment: The segment.
            files: A file for each of its moments.
        """
        self._whole[segment] = files

    def tensor(self, number: int, moment: str, like: Any) -> FileTensor:
        """A written moment of a parameter; ``like`` is the parameter, if it is a `DTensor`."""
        segment = self.state.segment_of(number)
        index = segment.index_of(number)
        entry = segment.entries[index]
        held = ImportedFile(self, segment, segment.moments.index(moment))
        name = label(number, moment)
        return FileTensor(held, segment.starts[index], name, entry.dtype, entry.shape, like)

    def finish(self) -> dict[StateSegment, list[DigestedFile]]:
        """Completes and syncs the files; parameters that were not written are zeros."""
        if self._finished is None:
            self._check_whole()
            try:
                for segment, segment_import in self._segments.items():
                    self._complete(segment, segment_import)
                self._drain(0)
            except BaseException:
                self._discard()
                self._is_broken = self.state.is_sealed
                raise
            finished = dict(self._whole)
            for segment, segment_import in self._segments.items():
                for room in segment_import.rooms:
                    sync(room.path)
                finished[segment] = [
                    self.state.held(room, _chunks(parts))
                    for room, parts in zip(segment_import.rooms, segment_import.parts, strict=True)
                ]
            self._finished = finished
        return self._finished

    def _segment_import(self, segment: StateSegment) -> _SegmentImport:
        found = self._segments.get(segment)
        if found is None:
            rooms = [self.state.take(segment) for _ in segment.moments]
            found = self._segments[segment] = _SegmentImport(rooms)
        return found

    def _complete(self, segment: StateSegment, segment_import: _SegmentImport) -> None:
        """Writes headers, and zeros where no parameter was written."""
        torch = dtypes.import_torch()
        there = set().union(*segment_import.numbers)
        for file, (moment, numbers) in enumerate(
            zip(segment.moments, segment_import.numbers, strict=True)
        ):
            if missing := there - numbers:
                name = label(min(missing), moment)
                raise StateMismatchError(
                    f"the state has no {name!r}: it is of another optimizer", key=name
                )
            header = torch.frombuffer(bytearray(segment.headers[file]), dtype=torch.uint8)
            gaps = _gaps(segment_import.covered[file], header.numel(), segment.nbytes)
            self._write([(header, segment, file, 0)])
            for begin, end in gaps:
                for at in range(begin, end, PIECE_BYTES):
                    self._drain(_PIECES - 1)
                    count = min(PIECE_BYTES, end - at)
                    zeros = torch.zeros(count, dtype=torch.uint8, device="cpu")
                    self._write([(zeros, segment, file, at)])

    def _write(self, runs: Iterable[_Run]) -> None:
        """Starts to write bytes to their files, and records their digests."""
        runs = list(runs)
        for flat, segment, file, offset in runs:
            covered = self._segments[segment].covered[file]
            covered.append((offset, offset + flat.numel()))
        if self.state.is_sealed:
            runs = [part for run in runs for part in self._sealed(*run)]
            if not runs:
                return
        sources: list[TensorSource] = []
        cuts: list[tuple[list[tuple[int, int, int]], int, int]] = []
        requests = []
        for flat, segment, file, offset in runs:
            segment_import = self._segments[segment]
            address, end = flat.data_ptr() - offset, offset + flat.numel()
            ends = range((offset // CHUNK_BYTES + 1) * CHUNK_BYTES, end, CHUNK_BYTES)
            for low, high in pairwise([offset, *ends, end]):
                cuts.append((segment_import.parts[file], low, high))
                place = (high - low,), address + low, None, 1
                sources.append(TensorSource("part", "uint8", *place, flat, None, None))
            requests.append((flat, segment_import.rooms[file].path, offset))
        for (parts, low, high), digest in zip(cuts, _native.digests(sources), strict=True):
            parts.append((low, high, digest))
        self._writes.append(self.state.pipeline.writes.write_all(requests))

    def _sealed(self, flat: Any, segment: StateSegment, file: int, offset: int) -> Iterator[_Run]:
        """Seals whole chunks in place, and those of which these bytes are the last."""
        segment_import = self._segments[segment]
        seal = segment_import.rooms[file].seal
        if seal is None:
            raise AssertionError("a file of a sealed state has a key")
        at, end = offset, offset + flat.numel()
        while at < end:
            begin = at // CHUNK_BYTES * CHUNK_BYTES
            chunk_end = min(begin + CHUNK_BYTES, segment.nbytes)
            if at == begin and chunk_end <= end:
                stop = end if end == segment.nbytes else end // CHUNK_BYTES * CHUNK_BYTES
                memory = flat[at - offset : stop - offset]
            else:
                stop = min(chunk_end, end)
                chunk = segment_import.chunks.get((file, begin))
                if chunk is None:
                    chunk = _PartialChunk(chunk_end - begin)
                    segment_import.chunks[file, begin] = chunk
                memory = None
                if chunk.add(flat[at - offset : stop - offset], at - begin):
                    memory = segment_import.chunks.pop((file, begin)).memory
            if memory is not None:
                seal_chunks(seal, memory, begin)
                yield memory, segment, file, begin
            at = stop

    def _drain(self, count: int) -> None:
        while len(self._writes) > count:
            self._writes.popleft().result()

    def _discard(self) -> None:
        """Waits for writes in flight: their files may be reused next."""
        while self._writes:
            with contextlib.suppress(PenstockError):
                self._writes.popleft().result()


class ImportedFile(HeldFile):
    """A file that is being filled; reading it completes the import."""

    def __init__(self, state_import: StateImport, segment: StateSegment, index: int) -> None:
        self.state_import = state_import
        self._segment = segment
        self._index = index

    @property
    def _file(self) -> DigestedFile:
        return self.state_import.finish()[self._segment][self._index]

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
        """Fills a contiguous tensor from an offset on; see `HeldFile.read`."""
        self._file.read(memory, offset)

    def target(self, tensor: FileTensor) -> FileTarget:
        """The target of a load that replaces one of its tensors."""
        return self._file.target(tensor)


class ImportTarget(FileTarget):
    """The target of a load: one moment of a parameter.

    Attributes:
        entry: The parameter.
        moment: Name of the moment.
    """

    def __init__(
        self, state_import: StateImport, entry: ParameterEntry, moment: str, like: Any
    ) -> None:
        self.filler = state_import
        self.entry = entry
        self.moment = moment
        self.dtype = entry.dtype
        self.shape = entry.shape
        self.like = like


def _gaps(covered: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The ranges of a file between begin and end that are not covered."""
    edges = [(begin, begin), *sorted(covered), (end, end)]
    return [(one[1], other[0]) for one, other in pairwise(edges) if one[1] < other[0]]


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
