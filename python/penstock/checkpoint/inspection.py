"""Describes the contents of a checkpoint, without its tensor data."""

from __future__ import annotations

import bisect
import functools
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.leaf_names import LeafNames, name_chars_max
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.plain import plain
from penstock.checkpoint.state.tree.references import is_data, reference
from penstock.checkpoint.state.tree.scalars import TreeError
from penstock.checkpoint.state.tree.tree import part_name
from penstock.checkpoint.view.numbering import NO_FILE
from penstock.checkpoint.view.partial import is_missing
from penstock.checkpoint.view.view import may_share, view
from penstock.errors import CorruptCheckpointError, SealedError
from penstock.reports import CheckpointInfo, FileInfo, MissingInfo, PieceInfo, TensorInfo

if TYPE_CHECKING:
    from penstock import _native
    from penstock.checkpoint.view.view import View


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
        recipients=None if checkpoint.recipients is None else tuple(checkpoint.recipients),
        is_closed=checkpoint.is_closed,
        previous=tuple(checkpoint.previous),
        _values=functools.partial(
            _read_values,
            path,
            part_name(checkpoint.files()),
            None if checkpoint.is_closed else checkpoint.tree,
        ),
    )


def _read_values(path: str, part: str | None, text: str | None) -> dict[str, Any]:
    """Returns the plain leaves of a tree by name; see `CheckpointInfo.values`."""
    if text is None:
        raise SealedError(
            f"{path} is sealed, and was inspected without identities; pass identities=, or name "
            "their file in PENSTOCK_IDENTITIES",
            path=path,
        )
    builder = Builder((), (), {})

    def is_plain(node: tree.Node) -> bool:
        return not is_data(node) and not is_missing(node)

    with tree.reading(path, part):
        leaves = tree.named(plain(tree.parse(text)), name_chars_max(text))
        found = [(name, builder.build(node)) for name, node in leaves if is_plain(node)]
    return dict(found)


def missing_of(checkpoint: _native.Checkpoint, names: LeafNames) -> tuple[MissingInfo, ...]:
    """Returns the tensors and states that a checkpoint lacks."""
    return tuple(
        missing_info(row, names.of_missing(number, row))
        for number, row in enumerate(checkpoint.missing())
    )


def missing_info(row: _native.MissingTensor, name: str) -> MissingInfo:
    """Describes a tensor or state that a checkpoint lacks, under a name."""
    return MissingInfo(
        name=name, dtype=row.dtype, shape=row.shape, reason=row.reason, rank=row.rank
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
