"""Directories of DCP's own format, read by its reader into the state that its metadata tells of."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.converting.pickles import untrusted
from penstock.converting.safetensors_file import read_at
from penstock.errors import CorruptCheckpointError, PenstockError, UnsupportedStateError
from penstock.loading.dcp_files import METADATA, check_files, check_finished, metadata_of_ranks
from penstock.safetensors_files import SNIFFED_BYTES, begins_header

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.futures import Future

    from penstock.converting.pickles import Pickles

_PLAIN = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.distributed._shard.metadata": {"ShardMetadata"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""What DCP's metadata is made of, by module."""


def read_dcp(path: str, pickles: Pickles) -> dict[str, Any]:
    """The state, nested as it was, with whole tensors; all of it in memory.

    Raises:
        IncompleteCheckpointError: Files are missing or cut.
        UnsupportedStateError: It takes classes to unpickle it, and it is not trusted.
        CorruptCheckpointError: It is damaged.
    """
    names = os.listdir(path)
    if METADATA not in names:
        check_finished(path, names)
        if metadata_of_ranks(names):
            raise UnsupportedStateError(
                f"{path}: its ranks have saved without each other (use_collectives=False): load it "
                "with as many ranks by torch.distributed.checkpoint.load, and save that anew",
                key=METADATA,
            )
    # Not when DCP asks for it, who would keep of an error its message only.
    metadata = _metadata(os.path.join(path, METADATA), pickles)
    check_files(path, metadata.storage_data or {})
    planner = _Planner(path, pickles)
    with warnings.catch_warnings():
        # That this process is alone.
        warnings.simplefilter("ignore")
        try:
            load({}, storage_reader=_Reader(path, metadata), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _own(error, path) from error
    found: dict[str, Any] = planner.original_state_dict
    return found


class _Reader(FileSystemReader):
    """DCP's reader, with metadata that was read already, and tensors that lie in safetensors.

    DCP writes these (``SerializationFormat.SAFETENSORS``), and would read them by `torch.load`: all
    tensors of a file of its own are one file of safetensors, at its end, where each of them is said
    to begin.
    """

    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self._path = path
        self._metadata = metadata
        self._found: dict[str, _Tensors] = {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads items, those that DCP cannot read first."""
        rest = []
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if item.type is LoadItemType.TENSOR and self._is_safetensors(place):
                self._read_tensor(item, place, planner)
            else:
                rest.append(item)
        return super().read_data(replace(plan, items=rest), planner)

    def _is_safetensors(self, place: _StorageInfo) -> bool:
        if place.transform_descriptors:
            return False
        with open(os.path.join(self._path, place.relative_path), "rb") as file:
            file.seek(place.offset)
            # Of a tensor by torch.save there is a zip archive.
            return begins_header(file.read(SNIFFED_BYTES))

    def _read_tensor(self, item: ReadItem, place: _StorageInfo, planner: LoadPlanner) -> None:
        file, index = place.relative_path, item.storage_index
        path = os.path.join(self._path, file)
        if file not in self._found:
            tensors, notes = read_at(path, place.offset)
            self._found[file] = _Tensors(tensors, json.loads(notes[CUSTOM_METADATA_KEY]))
        found = self._found[file]
        offsets = found.pieces[index.fqn][SAVED_OFFSETS_KEY]
        if offsets != list(index.offset or ()):
            # By name: of a rank's pieces of one tensor the last is left.
            raise CorruptCheckpointError(
                f"{path}: the piece of {index.fqn} at {list(index.offset or ())} is missing: DCP "
                f"has written the one at {offsets} over it; take an earlier checkpoint",
                path=path,
            )
        source = narrow_tensor_by_index(
            found.tensors[index.fqn], item.storage_offsets, item.lengths
        )
        target = planner.resolve_tensor(item).detach()
        target.copy_(source)
        planner.commit_tensor(item, target)

    # No `kwargs`: DCP would ask again, for metadata of this rank.
    def read_metadata(self) -> Metadata:
        """What is there."""
        return self._metadata


def _metadata(file: str, pickles: Pickles) -> Metadata:
    with open(file, "rb") as opened:
        reading = _Unpickler(opened)
        try:
            metadata = reading.load()
        except Exception as error:
            # A pickle that is cut or changed raises anything.
            if reading.refused is None:
                raise _damaged(file, error) from error
            if not pickles.trust:
                raise untrusted(file, [reading.refused]) from error
            opened.seek(0)
            metadata = pickle.load(opened)
            pickles.trusted[file] = [reading.refused]
    if not isinstance(metadata, Metadata):
        raise _damaged(file, TypeError(f"it holds a {type(metadata).__name__}"))
    return metadata


def _damaged(file: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{file} is cut or damaged: {error}", path=file)


class _Tensors(NamedTuple):
    """What a file has at its end.

    Attributes:
        tensors: Pieces, by names of tensors.
        pieces: Where they lie in these, as DCP notes it.
    """

    tensors: dict[str, torch.Tensor]
    pieces: dict[str, dict[str, list[int]]]


class _Unpickler(pickle.Unpickler):
    """Makes nothing but the metadata of a checkpoint."""

    refused: str | None = None

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name."""
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        self.refused = f"{module}.{name}"
        raise pickle.UnpicklingError(f"it names {self.refused}")


class _Planner(_EmptyStateDictLoadPlanner):
    """Makes the state of the metadata, and unpickles values as far as they are trusted."""

    def __init__(self, path: str, pickles: Pickles) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path = path
        self._pickles = pickles

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes a value that is no tensor."""
        name = read_item.dest_index.fqn
        found = self._pickles.read_item(value, self._path, name)
        set_element(self.original_state_dict, self.mappings[name], found)


def _own(error: CheckpointException, path: str) -> Exception:
    """What was raised inside of DCP, if it is an error of this package."""
    for failure, _ in error.failures.values():
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, PenstockError):
                return cause
            cause = cause.__cause__ or cause.__context__
    first = next(iter(error.failures.values()))[0]
    return CorruptCheckpointError(f"{path}: DCP cannot read it: {first}", path=path)
