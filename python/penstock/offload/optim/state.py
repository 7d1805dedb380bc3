"""`StoredState`: the moments of one rank's parameters, generation after generation."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from penstock import _native
from penstock.common.tracing import span
from penstock.io.digested_file import DigestedFile, sync
from penstock.offload.optim.chunk_pipeline import ChunkPipeline, Task, smallest
from penstock.offload.optim.files import StateFiles
from penstock.offload.optim.import_state import ImportTarget, StateImport
from penstock.offload.optim.layout import label, segments_of
from penstock.offload.optim.state_dict import PIECE_BYTES
from penstock.tensors import dtypes
from penstock.tensors.file_tensor import FileTarget, FileTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.io.digested_file import ReservedFile
    from penstock.offload.optim.layout import ParameterEntry, StateSegment, Window

_Prepared = TypeVar("_Prepared")


class StoredState:
    """The moments of parameters, in files of a directory, which are sealed if it says so."""

    def __init__(self, directory: str, memory_bytes: int, *, is_sealed: bool = False) -> None:
        self.files = StateFiles(directory)
        self.pipeline = ChunkPipeline(memory_bytes)
        self.is_sealed = is_sealed
        self._memory_bytes = memory_bytes
        self._segments: list[StateSegment] = []
        self._segment_of: dict[int, StateSegment] = {}
        self._current: dict[StateSegment, list[DigestedFile]] = {}
        self._state_import: weakref.ref[StateImport] | None = None

    def extend(self, entries: Sequence[ParameterEntry]) -> None:
        """Adds parameters."""
        added = segments_of(entries, is_sealed=self.is_sealed)
        if added and (least := smallest(added)) > self._memory_bytes:
            raise ValueError(f"memory_bytes={self._memory_bytes}: {least} is the least that works")
        self._segments += added
        self._segment_of.update((entry.number, one) for one in added for entry in one.entries)

    def segment_of(self, number: int) -> StateSegment:
        """The segment that a parameter belongs to."""
        return self._segment_of[number]

    def entry_of(self, number: int) -> ParameterEntry:
        """The description of a parameter for which its state was made."""
        segment = self._segment_of[number]
        return segment.entries[segment.index_of(number)]

    def file(self, segment: StateSegment, index: int) -> DigestedFile:
        """One of the current files of a segment."""
        return self._current[segment][index]

    def take(self, segment: StateSegment) -> ReservedFile:
        """A file of a segment's size to write; if states are sealed, with a key for this alone.

        A key that is drawn for each writing of a file needs no record of used nonces: whatever a
        crash leaves behind, no later write has its key.
        """
        room = self.files.take(segment.nbytes)
        if self.is_sealed:
            room.seal = _native.FileSeal(segment.nbytes, segment.starts[0])
        return room

    def held(self, room: ReservedFile, chunks: Sequence[int]) -> DigestedFile:
        """Wraps a file that was written and synced, to hold it."""
        return DigestedFile(room, chunks, self.pipeline.reads, self._target_in_place)

    # ---- Generations

    def advance(
        self,
        numbers: Collection[int],
        prepare: Callable[[Task, Window, list[Any]], _Prepared],
        work: Callable[[_Prepared], None],
        commit: Callable[[str], None],
    ) -> None:
        """Makes the next generation, by changing the moments of some parameters.

        Args:
            numbers: Numbers of the parameters.
            prepare: Prepares a window of them; see `ChunkPipeline.run`.
            work: Changes the moments of a window; see `ChunkPipeline.run`.
            commit: Commits the present state as the generation at a path; called once all have
                changed.
        """
        concerned = [
            one for one in self._segments if any(entry.number in numbers for entry in one.entries)
        ]
        moved = sum(len(one.moments) * one.nbytes for one in concerned)
        self.files.check_room(moved)
        tasks = [
            Task(
                one,
                self._current.get(one),
                [self.take(one) for _ in one.moments],
                [[] for _ in one.moments],
            )
            for one in concerned
        ]
        self.pipeline.run(tasks, prepare, work)
        with span("sync"):
            for task in tasks:
                for room in task.targets:
                    sync(room.path)
        made = {
            task.segment: [
                self.held(room, chunks)
                for room, chunks in zip(task.targets, task.chunks, strict=True)
            ]
            for task in tasks
        }
        self._follow({**self._current, **made}, commit)

    def adopt(
        self, files: dict[StateSegment, list[DigestedFile]], commit: Callable[[str], None]
    ) -> None:
        """Makes imported files the next generation, with no others."""
        self._follow(files, commit)

    def _follow(
        self, files: dict[StateSegment, list[DigestedFile]], commit: Callable[[str], None]
    ) -> None:
        # Holds the old files until the new generation has replaced theirs: then they can be reused.
        previous, self._current = self._current, files
        with span("commit"):
            commit(self.files.generation)
        previous.clear()

    # ---- Tensors

    def tensor(self, number: int, moment: str, like: Any) -> FileTensor:
        """A current moment of a parameter; ``like`` is the parameter, if it is a `DTensor`."""
        segment = self._segment_of[number]
        index = segment.index_of(number)
        entry = segment.entries[index]
        file = self._current[segment][segment.moments.index(moment)]
        name = label(number, moment)
        return FileTensor(file, segment.starts[index], name, entry.dtype, entry.shape, like)

    def copy_to(self, tensor: Any, number: int, moment: str) -> None:
        """Copies a current moment of a parameter to a contiguous tensor, a piece at a time."""
        torch = dtypes.import_torch()
        stored = self.tensor(number, moment, None)
        flat, item_bytes = tensor.view(-1), stored.dtype.itemsize
        for at, piece in enumerate(flat.split(PIECE_BYTES // item_bytes)):
            offset = stored.offset + at * PIECE_BYTES
            if piece.is_cpu and piece.dtype == stored.dtype:
                stored.file.read(piece, offset)
            else:
                memory = torch.empty(piece.shape, dtype=stored.dtype, device="cpu")
                stored.file.read(memory, offset)
                piece.copy_(memory)

    def target(self, number: int, moment: str, like: Any) -> FileTarget:
        """The target of a load for a moment, in the import begun since the last `adopt`."""
        state_import = self._state_import() if self._state_import is not None else None
        if state_import is None or not state_import.reserve(number, moment):
            state_import = StateImport(self)
            state_import.reserve(number, moment)
            self._state_import = weakref.ref(state_import)
        return ImportTarget(state_import, self.entry_of(number), moment, like)

    def _target_in_place(self, tensor: FileTensor) -> FileTarget:
        number, _, moment = tensor.label.partition(".")
        return self.target(int(number), moment, tensor.like)

    def close(self) -> None:
        """Releases files, threads and memory; the last generation stays."""
        self._current = {}
        self.pipeline.close()
        self.files.close()
