"""`CheckpointInfo`: the contents of a checkpoint, without its tensor data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.common.file_names import FileNames
from penstock.common.report_lines import aligned, counted, first_of, in_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


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
        recipients: For whom it is sealed; None if it is not sealed.
        is_closed: Whether it is sealed and was opened without identities. Then it shows no tensors
            and no metadata.
        previous: Ids of the checkpoints that its writer knew before it, newest first, at most 144.
            Sealed and signed steps of a `CheckpointStore` list them. Nobody vouches for them where
            neither a key nor a signature was checked.
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
    _values: Callable[[], dict[str, Any]] = field(repr=False, compare=False)
    recipients: tuple[str, ...] | None = None
    is_closed: bool = False
    previous: tuple[str, ...] = ()

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
            ("sealed", self._seal),
            (
                "tensors",
                "sealed"
                if self.is_closed
                else f"{len(self.tensors):,}, {in_bytes(self.tensor_bytes)}",
            ),
            ("metadata", json.dumps(self.metadata) if self.metadata else ""),
            *first_of([("tensor", text) for text in tensors]),
            *first_of([("missing", text) for text in missing]),
        )

    @property
    def _seal(self) -> str:
        """The recipients as text; empty for a clear checkpoint."""
        if self.recipients is None:
            return ""
        return f"for {', '.join(self.recipients) or 'nobody: its wraps were removed'}"

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
        return self._values()
