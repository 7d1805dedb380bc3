"""Reads DCP metadata: tensors, their pieces, and the place of each item.

It is a pickle of DCP's own classes, which differ between versions of PyTorch. Records replace them,
so that any version can read the files of any other.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from penstock.checkpoint.converting.files.archive import no_room
from penstock.checkpoint.converting.files.nested import nested
from penstock.checkpoint.converting.files.pickles import calling, untrusted
from penstock.checkpoint.converting.files.plain import Unpickler
from penstock.common.found import of_git_lfs, unfetched
from penstock.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from penstock.checkpoint.converting.files.nested import Nest
    from penstock.checkpoint.converting.files.pickles import Pickles

Offsets: TypeAlias = tuple[int, ...]

_NUMBER_MAX = (1 << 63) - 1


class TensorChunk(NamedTuple):
    """A box of a tensor."""

    offsets: Offsets
    sizes: tuple[int, ...]


class TensorEntry(NamedTuple):
    """A tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]
    pieces: list[TensorChunk]


class StorageLocation(NamedTuple):
    """The place of an item.

    Attributes:
        relative_path: The file's name, in the directory itself.
        offset: Offset of the first byte.
        length: Number of bytes.
        transforms: The encodings of the bytes, such as ``"stream.zstd/1"``.
    """

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]


class Metadata(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        entries: Tensors by their flat names; None for each other value.
        places: The places of items, by name and offsets; the offsets of a value are None.
        nest: The position of each flat name in the nested state.
    """

    entries: dict[str, TensorEntry | None]
    places: dict[tuple[str, Offsets | None], StorageLocation]
    nest: Nest


def read_metadata(file: str, pickles: Pickles) -> Metadata:
    """Reads the metadata in a file."""
    with open(file, "rb") as opened:
        content = opened.read()
    if of_git_lfs(content):
        raise unfetched(file)
    others: set[str] = set()
    unpickler = functools.partial(
        Unpickler, load_storage=_no_storage, others=others, records=_RECORDS
    )
    try:
        record = unpickler(io.BytesIO(content)).load()
    except MemoryError as error:
        raise no_room(file, "a value in it") from error
    except Exception as error:
        # A truncated or modified pickle raises any error, and so does one that needs other names.
        if not others or isinstance(error, EOFError | pickle.UnpicklingError):
            raise _damaged(file, error) from error
    if others:
        if not pickles.trust:
            raise untrusted(file, others)
        with calling(file, others):
            record = unpickler(io.BytesIO(content), is_trusted=True).load()
        pickles.trusted[file] = sorted(others)
    try:
        return _checked(record)
    except (AttributeError, TypeError, ValueError) as error:
        raise _damaged(file, error) from error


def _checked(record: Any) -> Metadata:
    if not isinstance(record, _Record):
        raise TypeError(f"it holds a {type(record).__name__}")
    fields: Any = record
    entries = {_text(name): _entry(one) for name, one in fields.state_dict_metadata.items()}
    places = {}
    for index, one in (fields.storage_data or {}).items():
        offset, length = _numbers((one.offset, one.length))
        transforms = tuple(map(_text, getattr(one, "transform_descriptors", None) or ()))
        origin = None if index.offset is None else _numbers(index.offset)
        places[_text(index.fqn), origin] = StorageLocation(
            _file_name(one.relative_path), offset, length, transforms
        )
    paths = fields.planner_data if isinstance(fields.planner_data, dict) else {}
    nest = nested({name: paths.get(name, (name,)) for name in entries})
    return Metadata(entries, places, nest)


def _entry(record: Any) -> TensorEntry | None:
    if not hasattr(record, "chunks"):
        return None
    pieces = [TensorChunk(_numbers(one.offsets), _numbers(one.sizes)) for one in record.chunks]
    dtype = record.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r:.80} is no type of elements")
    return TensorEntry(dtype, _numbers(record.size), pieces)


def _numbers(found: Any) -> tuple[int, ...]:
    numbers = tuple(found)
    for one in numbers:
        if type(one) is not int or not 0 <= one <= _NUMBER_MAX:
            raise ValueError(f"{one!r:.80} is no size and no offset")
    return numbers


def _text(found: Any) -> str:
    if not isinstance(found, str) or "\0" in found:
        raise TypeError(f"{found!r:.80} is no name")
    return found


def _file_name(found: Any) -> str:
    """Refuses paths to other directories, whose files would be copied to the new checkpoint."""
    name = _text(found)
    if name != os.path.basename(name) or name in ("", os.curdir, os.pardir):
        raise ValueError(f"{name!r:.200} is no name of a file in the directory")
    return name


def _no_storage(pid: Any) -> Any:
    raise pickle.UnpicklingError(f"no storage belongs here: {pid!r:.40}")


def _damaged(file: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{file} is cut or damaged: {error}", path=file)


class _Record:
    """An object of the metadata, with its attributes."""

    def __init__(self, *_arguments: Any) -> None:
        pass

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class _Index(_Record):
    """The key of an item."""

    fqn: str
    offset: torch.Size | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


class _Properties(_Record):
    """Properties of a tensor; its type comes first in every version of PyTorch."""

    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


_PLANNER = "torch.distributed.checkpoint.planner"
_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard"

_RECORDS: dict[str, type] = {
    **dict.fromkeys(
        (
            "pathlib.Path",
            "pathlib.PosixPath",
            "pathlib.PurePosixPath",
            "pathlib._local.PosixPath",
            f"{_SHARDED}.metadata.ShardMetadata",
            f"{_SHARDED}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            f"{_METADATA}.BytesStorageMetadata",
            f"{_METADATA}.ChunkStorageMetadata",
            f"{_METADATA}.Metadata",
            f"{_METADATA}.StorageMeta",
            f"{_METADATA}.TensorStorageMetadata",
            f"{_METADATA}._MEM_FORMAT_ENCODING",
            # Megatron-Core keeps the plans of all ranks there.
            f"{_PLANNER}.BytesIOWriteData",
            f"{_PLANNER}.SavePlan",
            f"{_PLANNER}.TensorWriteData",
            f"{_PLANNER}.WriteItem",
            f"{_PLANNER}.WriteItemType",
        ),
        _Record,
    ),
    f"{_METADATA}.MetadataIndex": _Index,
    f"{_METADATA}.TensorProperties": _Properties,
    f"{_SHARDED}.sharded_tensor.metadata.TensorProperties": _Properties,
}
"""The classes of DCP's metadata, as records that are independent of the version."""
