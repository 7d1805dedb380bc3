"""`adopt_links`: takes over the files of a generation as they are.

Files whose layout is that of the state's files are linked there, without writing their bytes again.
All are read and compared with their digests, and sealed ones are opened.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import CorruptCheckpointError
from penstock.io.files.digests import chunk_digests
from penstock.io.files.seals import open_chunks, tampered
from penstock.offload.optim.import_state import StateImport
from penstock.tensors import dtypes
from penstock.tensors.memory import of_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from penstock._native import TensorEntry
    from penstock.checkpoint.loading.opened import OpenCheckpoint
    from penstock.io.digested_file import ReservedFile
    from penstock.offload.optim.layout import StateSegment
    from penstock.offload.optim.state import StoredState

_READ_BYTES = 16 << 20


class _GenerationFile(NamedTuple):
    """A file of a generation that may become one of a state."""

    name: str
    header: bytes
    nbytes: int


def adopt_links(
    source: OpenCheckpoint, stored: StoredState, numbers: Mapping[int, object]
) -> StateImport | None:
    """Takes over the files of a generation.

    Returns:
        The files as an import; None if they have another layout or cannot be linked, so that their
        content has to be copied.
    """
    plan = _plan(source, stored, numbers)
    if plan is None:
        return None
    state_import = StateImport(stored)
    for segment, files in plan.items():
        held = []
        for one in files:
            room = stored.files.link(os.path.join(source.path, one.name), one.nbytes)
            if room is None:
                return None
            if stored.is_sealed and (seal := source.native.file_seal(one.name)) is not None:
                room.seal = seal
            elif stored.is_sealed:
                # Sealed with the key of the generation, which another one does not have.
                return None
            if (chunks := _chunks(source, one, room, stored)) is None:
                return None
            held.append(stored.held(room, chunks))
        state_import.take(segment, held)
    return state_import


def _plan(
    source: OpenCheckpoint, stored: StoredState, numbers: Mapping[int, object]
) -> dict[StateSegment, list[_GenerationFile]] | None:
    """The files that make up the segments; None if some are laid out otherwise."""
    rows = {entry.name: entry for entry in source.native.tensors()}
    sizes = dict(source.native.files())
    segments: dict[StateSegment, list[int]] = {}
    for number in numbers:
        segments.setdefault(stored.segment_of(number), []).append(number)
    # Moments that this state has no place for must not be dropped silently.
    if len(rows) != sum(len(one.moments) * len(some) for one, some in segments.items()):
        return None
    plan: dict[StateSegment, list[_GenerationFile]] = {}
    for segment, some in segments.items():
        plan[segment] = []
        for moment, header in zip(segment.moments, segment.headers, strict=True):
            name = _file_of(rows, segment, some, moment)
            if name is None or sizes.get(name) != segment.nbytes:
                return None
            plan[segment].append(_GenerationFile(name, header, segment.nbytes))
    return plan


def _file_of(
    rows: Mapping[str, TensorEntry], segment: StateSegment, numbers: list[int], moment: str
) -> str | None:
    """The one file that holds a moment of all parameters at the segment's offsets; else None."""
    names = set()
    for number in numbers:
        index = segment.index_of(number)
        row = rows.get(f"state.{number}.{moment}")
        if row is None:
            return None
        if segment.entries[index].count:
            if row.begin != segment.starts[index]:
                return None
            names.add(row.file)
    return names.pop() if len(names) == 1 else None


def _chunks(
    source: OpenCheckpoint, one: _GenerationFile, room: ReservedFile, stored: StoredState
) -> list[int] | None:
    """Verifies a file; returns the digests of its chunks, or None if it has another header."""
    path = room.path
    chunks: list[int] = []
    head = b""
    for start, memory in _read_ahead(one, path, stored):
        wanted = (start, start + memory.numel())
        try:
            source.check(one.name, start, [of_tensor(memory, one.name)], wanted)
        except CorruptCheckpointError:
            # The bytes may have been damaged in transit: read them once more.
            stored.pipeline.reads.read(memory, path, start).result()
            source.check(one.name, start, [of_tensor(memory, one.name)], wanted)
        if start < len(one.header):
            head += bytes(memory[: len(one.header) - start].numpy())
        chunks += chunk_digests(memory)
        if room.seal is not None and (at := open_chunks(room.seal, memory, start)) is not None:
            file = os.path.join(source.path, one.name)
            raise tampered(file, one.name, at)
    return chunks if head == one.header else None


def _read_ahead(one: _GenerationFile, path: str, stored: StoredState) -> Iterator[tuple[int, Any]]:
    """Yields the offset and the bytes of each piece of a file, while the next one is read."""
    torch = dtypes.import_torch()
    size = min(_READ_BYTES, one.nbytes)
    memories = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(2)]
    starts = range(0, one.nbytes, _READ_BYTES)
    pieces = [
        (start, memories[index % 2][: min(size, one.nbytes - start)])
        for index, start in enumerate(starts)
    ]
    reading = None
    for index, (start, memory) in enumerate(pieces):
        if reading is None:
            reading = stored.pipeline.reads.read(memory, path, start)
        reading.result()
        if index + 1 < len(pieces):
            following, ahead = pieces[index + 1]
            reading = stored.pipeline.reads.read(ahead, path, following)
            # Its error is raised by `result` in the next round, unless the caller has stopped.
            reading.is_seen = True
        yield start, memory
