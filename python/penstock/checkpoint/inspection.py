"""`CheckpointInfo`: describes the contents of a checkpoint, without its tensor data."""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checkpoint.loading.leaf_names import LeafNames, name_chars_max
from penstock.checkpoint.state import tree
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.plain import plain
from penstock.checkpoint.state.references import is_data, reference
from penstock.checkpoint.state.scalars import TreeError
from penstock.checkpoint.state.tree import part_name
from penstock.checkpoint.view.numbering import NO_FILE
from penstock.checkpoint.view.partial import is_missing
from penstock.checkpoint.view.view import may_share, view
from penstock.common.file_names import FileNames
from penstock.common.report_lines import aligned, counted, first_of, in_bytes
from penstock.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from penstock import _native
    from penstock.checkpoint.view.view import View


class FileInfo(NamedTuple):
    """One file of a checkpoint.

    Attributes:
        name: Its name inside the checkpoint's directory.
        bytes: Its size.
    """

    name: str
    bytes: int


class PieceInfo(NamedTuple):
    """A block of a tensor that many ranks saved.

    Attributes:
        start: Index of its first element.
        shape: Its dimensions.
        file: The file that holds its bytes.
        begin: Offset of its first byte in that file.
        end: Offset of the byte after its last.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One stored tensor or array.

    Attributes:
        name: Its name, which every call accepts: dotted, and escaped where necessary.
        dtype: Its element type, such as ``"bfloat16"``; NumPy's own types such as ``"numpy:<U5"``.
        shape: Its dimensions.
        file: The file that holds its bytes; empty if it has pieces.
        begin: Offset of its first byte in that file; 0 if it has pieces.
        end: Offset of the byte after its last; its size in bytes if it has pieces.
        rank: The rank that owns it, if many saved together; None if ranks share it. For a tensor
            that only some ranks share and that has no place in a single state, the first rank that
            stores a part.
        pieces: The pieces from which it is assembled, if many ranks saved it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    rank: int | None = None
    pieces: tuple[PieceInfo, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of the data, in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingInfo:
    """A tensor that could not be salvaged, or the lost structure and plain values of a rank.

    Attributes:
        name: Its name.
        dtype: Its element type; empty for a rank's structure and plain values.
        shape: Its dimensions.
        reason: Why it is missing.
        rank: The rank that owns it, if many saved together; None if ranks share it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    reason: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The contents of a checkpoint.

    Attributes:
        path: The checkpoint's directory.
        id: Identity of the save that wrote it.
        step: The step it was saved as, if any.
        created: When the save was committed, in UTC, such as ``"2026-01-01T00:00:00Z"``.
        writer: The program that wrote it.
        format_version: The version of its format.
        world_size: Number of ranks that wrote it.
        bytes: Bytes of all files.
        tensor_bytes: Bytes of tensor data.
        files: All files, the manifest first.
        tensors: All stored tensors, in the order of the state; for values stored for each rank,
            those of all ranks.
        aliases: Further names of stored tensors and of views into them -> the tensor's name.
        metadata: The ``metadata=`` given to `penstock.save`.
        partial: Whether it holds only the leaves that `penstock.salvage` recovered from a damaged
            checkpoint.
        source_id: Identity of that damaged checkpoint, if known.
        unverified: Whether the salvage could not check anything.
        missing: Tensors that could not be salvaged, further names included.
    """

    path: str
    id: str
    step: int | None
    created: str
    writer: str
    format_version: int
    world_size: int
    bytes: int
    tensor_bytes: int
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...]
    aliases: dict[str, str]
    metadata: dict[str, Any]
    partial: bool
    source_id: str | None
    unverified: bool
    missing: tuple[MissingInfo, ...]
    _tree: str = field(repr=False)

    def __str__(self) -> str:
        ranks = f" on {counted(self.world_size, 'rank')}" if self.world_size > 1 else ""
        tensors = [f"{one.name}: {one.dtype} {one.shape}" for one in self.tensors]
        names = FileNames(self.path, (one.reason for one in self.missing))
        missing = [names.short(f"{one.name}: {one.reason}") for one in self.missing]
        return aligned(
            ("checkpoint", self.path + (", partial" if self.partial else "")),
            ("step", "" if self.step is None else str(self.step)),
            ("saved", f"{self.created} by {self.writer}{ranks}"),
            ("files", f"{len(self.files):,}, {in_bytes(self.bytes)}"),
            ("tensors", f"{len(self.tensors):,}, {in_bytes(self.tensor_bytes)}"),
            ("metadata", json.dumps(self.metadata) if self.metadata else ""),
            *first_of([("tensor", text) for text in tensors]),
            *first_of([("missing", text) for text in missing]),
        )

    def values(self) -> dict[str, Any]:
        """Returns the plain leaves of the state by name: all except tensors and arrays.

        Long byte strings, which are stored like tensors, are left out as well. Values of classes,
        and tensors that consist of others, appear as their stored members, as in
        ``penstock.load(path, plain=True)``.

        Raises:
            CorruptCheckpointError: The state's tree is malformed, or the names of its leaves would
                need far more memory than the tree.

        Example:
            >>> import penstock, tempfile
            >>> path = tempfile.mkdtemp() + "/ckpt"
            >>> report = penstock.save(path, {"step": 7, "lr": [0.1, 0.2]})
            >>> penstock.inspect(path).values()
            {'step': 7, 'lr.0': 0.1, 'lr.1': 0.2}
        """
        builder = Builder((), (), {})

        def is_plain(node: tree.Node) -> bool:
            return not is_data(node) and not is_missing(node)

        with tree.reading(self.path, part_name(self.files)):
            leaves = tree.named(plain(tree.parse(self._tree)), name_chars_max(self._tree))
            found = [(name, builder.build(node)) for name, node in leaves if is_plain(node)]
        return dict(found)


def describe(checkpoint: _native.Checkpoint, path: str) -> CheckpointInfo:
    """Describes the open checkpoint at a path."""
    files = tuple(FileInfo(name, nbytes) for name, nbytes in checkpoint.files())
    names = LeafNames.of(checkpoint)
    tensors, aliases = _tensors(checkpoint, path, names)
    source_id, unverified = checkpoint.partial or (None, False)
    return CheckpointInfo(
        path=path,
        id=checkpoint.id,
        step=checkpoint.step,
        created=checkpoint.created,
        writer=checkpoint.writer,
        format_version=checkpoint.format_version,
        world_size=checkpoint.world_size,
        bytes=sum(file.bytes for file in files),
        tensor_bytes=checkpoint.nbytes,
        files=files,
        tensors=tensors,
        aliases=aliases,
        metadata=_metadata(checkpoint, path, files[0].name),
        partial=checkpoint.partial is not None,
        source_id=source_id,
        unverified=unverified,
        missing=missing_of(checkpoint, names),
        _tree=checkpoint.tree,
    )


def missing_of(checkpoint: _native.Checkpoint, names: LeafNames) -> tuple[MissingInfo, ...]:
    """Returns the tensors and states that a checkpoint lacks."""
    return tuple(
        MissingInfo(
            name=names.of_missing(number, row),
            dtype=row.dtype,
            shape=row.shape,
            reason=row.reason,
            rank=row.rank,
        )
        for number, row in enumerate(checkpoint.missing())
    )


def _tensors(
    checkpoint: _native.Checkpoint, path: str, names: LeafNames
) -> tuple[tuple[TensorInfo, ...], dict[str, str]]:
    """Returns the tensors of a checkpoint, and their further names."""
    rows = checkpoint.tensors()
    pieces: dict[str, list[PieceInfo]] = {}
    boxes = set()
    storing: dict[str, int] = {}
    firsts = [first for first, _ in checkpoint.offsets()]

    def rank_of(index: int) -> int:
        return bisect.bisect_right(firsts, index) - 1

    missing = {row.name for row in checkpoint.missing() if row.kind == "shared"}
    for box in checkpoint.boxes():
        row = rows[box.index]
        boxes.add(box.index)
        if box.tensor in missing:
            continue
        piece = PieceInfo(box.start, row.shape, row.file, row.begin, row.end)
        pieces.setdefault(box.tensor, []).append(piece)
        storing.setdefault(box.tensor, rank_of(box.index))
    is_alone = checkpoint.world_size == 1
    aliases = {
        names.aliases.get(number, name): names.tensors.get(index, rows[index].name)
        for number, (name, index, _) in enumerate(checkpoint.aliases())
    }
    own = [
        TensorInfo(
            name=names.tensors.get(index, row.name),
            dtype=row.dtype,
            shape=row.shape,
            file=row.file,
            begin=row.begin,
            end=row.end,
            rank=None if is_alone else rank_of(index),
        )
        for index, row in enumerate(rows)
        if index not in boxes
    ]
    if not may_share(checkpoint, has_boxes=bool(boxes)):
        return tuple(own), aliases
    with tree.reading(path, part_name(checkpoint.files())):
        seen = view(checkpoint, 0)
        shared, further = _shared(seen, pieces)
    apart = _apart(seen, pieces, storing)
    return (*shared, *apart, *own), {**aliases, **further}


def _shared(
    seen: View, pieces: dict[str, list[PieceInfo]]
) -> tuple[list[TensorInfo], dict[str, str]]:
    """Returns the tensors that are assembled from pieces, under their names in the state."""
    found: dict[int, TensorInfo] = {}
    aliases: dict[str, str] = {}
    for name, leaf in tree.leaves(plain(seen.node)):
        if not is_data(leaf):
            continue
        index, window = reference(leaf, seen.tensors, seen.aliases)
        if index not in seen.wholes:
            continue
        if index in found or window is not None:
            stored = found[index].name if index in found else seen.tensors[index].name
            aliases[name] = stored
            continue
        whole = seen.tensors[index]
        found[index] = TensorInfo(
            name=name,
            dtype=whole.dtype,
            shape=whole.shape,
            file=whole.file,
            begin=whole.begin,
            end=whole.end,
            pieces=tuple(sorted(pieces.get(seen.wholes[index], ()))),
        )
    return list(found.values()), aliases


def _apart(
    seen: View, pieces: dict[str, list[PieceInfo]], storing: dict[str, int]
) -> list[TensorInfo]:
    """Returns assembled tensors that are not in the state, under their names in parts."""
    return [
        TensorInfo(
            name=name,
            dtype=stored.dtype,
            shape=stored.shape,
            file=NO_FILE,
            begin=0,
            end=sum(piece.end - piece.begin for piece in pieces[name]),
            rank=storing[name],
            pieces=tuple(sorted(pieces[name])),
        )
        for name, stored in seen.unreached.items()
    ]


def _metadata(checkpoint: _native.Checkpoint, path: str, file: str) -> dict[str, Any]:
    try:
        return tree.parse_metadata(checkpoint.metadata)
    except TreeError as error:
        raise CorruptCheckpointError(
            f"{path}/{file}: {error}; restore this checkpoint from a copy", path=path, file=file
        ) from error
