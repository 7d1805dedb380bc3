"""Reads directories in DCP's native format into the nested state that their metadata describes.

Items are read here instead of by DCP's reader, which checks no checksums and accepts the classes of
only one PyTorch version. Each item is a ``torch.save`` file within a file, or, if DCP was
configured with ``SerializationFormat.SAFETENSORS``, all tensors of a file form one safetensors file
at its end.
"""

from __future__ import annotations

import io
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.checkpoint.converting.distributed.dcp_metadata import read_metadata
from penstock.checkpoint.converting.files.archive import no_room
from penstock.checkpoint.converting.files.nested import filled
from penstock.checkpoint.converting.files.safetensors_file import read_at
from penstock.checkpoint.loading.dcp_files import (
    METADATA,
    check_files,
    check_finished,
    check_pieces,
    metadata_of_ranks,
)
from penstock.errors import (
    CorruptCheckpointError,
    MissingDependencyError,
    UnsupportedStateError,
)
from penstock.io.files.safetensors_files import SNIFFED_BYTES, begins_header

if TYPE_CHECKING:
    from penstock.checkpoint.converting.distributed.dcp_metadata import (
        Metadata,
        StorageLocation,
        TensorChunk,
        TensorEntry,
    )
    from penstock.checkpoint.converting.files.pickles import Pickles

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
"""Keys under which DCP records, in safetensors files, the piece of a tensor that they hold."""


def read_dcp(path: str, pickles: Pickles) -> dict[str, Any]:
    """Returns the nested state with whole tensors; all of it in memory."""
    names = os.listdir(path)
    if METADATA not in names:
        check_finished(path, names)
        if metadata_of_ranks(names):
            raise UnsupportedStateError(
                f"{path}: its ranks have saved without each other (use_collectives=False): load it "
                "with as many ranks by torch.distributed.checkpoint.load, and save that anew",
                key=METADATA,
            )
    metadata = read_metadata(os.path.join(path, METADATA), pickles)
    check_files(path, metadata.places)
    items = _Items(path, metadata, pickles)

    def value_of(name: str) -> Any:
        entry = metadata.entries[name]
        return items.value(name) if entry is None else items.tensor(name, entry)

    state: dict[str, Any] = filled(metadata.nest, value_of)
    return state


class _Items:
    """Reads the items of a checkpoint."""

    def __init__(self, path: str, metadata: Metadata, pickles: Pickles) -> None:
        self._path = path
        self._metadata = metadata
        self._pickles = pickles
        self._safetensors: dict[str, _Safetensors] = {}

    def value(self, name: str) -> Any:
        """Returns a value that is not a tensor."""
        place = self._place(name, None)
        return self._pickles.read_item(self._content(place), f"{self._path} ({name})")

    def tensor(self, name: str, entry: TensorEntry) -> torch.Tensor:
        """Returns a whole tensor, assembled from its pieces."""
        check_pieces(self._path, name, entry.size, entry.pieces, is_whole=True)
        if len(entry.pieces) == 1 and entry.pieces[0].sizes == entry.size:
            return self._piece(name, entry, entry.pieces[0]).contiguous()
        whole = self._room(name, entry)
        for piece in dict.fromkeys(entry.pieces):
            target = whole
            for dim, (begin, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                target = target.narrow(dim, begin, size)
            target.copy_(self._piece(name, entry, piece))
        return whole

    def _room(self, name: str, entry: TensorEntry) -> torch.Tensor:
        try:
            return torch.empty(entry.size, dtype=entry.dtype)
        except RuntimeError as error:
            raise no_room(f"{self._path} ({name})", f"a tensor of {list(entry.size)}") from error

    def _piece(self, name: str, entry: TensorEntry, piece: TensorChunk) -> torch.Tensor:
        place = self._place(name, piece.offsets)
        if self._is_safetensors(place):
            found = self._of_safetensors(name, piece, place)
        else:
            what = f"{self._path} ({name})"
            found = self._pickles.read_item(self._content(place), what)
        if not isinstance(found, torch.Tensor):
            raise self._damaged(name, f"it holds a {type(found).__name__}")
        if (found.dtype, tuple(found.shape)) != (entry.dtype, piece.sizes):
            raise self._damaged(name, f"it holds {list(found.shape)} of {found.dtype}")
        return found.detach()

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> StorageLocation:
        place = self._metadata.places.get((name, offsets))
        if place is None:
            raise self._damaged(name, "its metadata does not say where it lies")
        return place

    def _content(self, place: StorageLocation) -> io.BytesIO:
        with open(os.path.join(self._path, place.relative_path), "rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        return _decoded(content, place, self._path) if place.transforms else content

    def _is_safetensors(self, place: StorageLocation) -> bool:
        if place.transforms:
            return False
        with open(os.path.join(self._path, place.relative_path), "rb") as file:
            file.seek(place.offset)
            # A tensor written by torch.save begins with a zip archive instead.
            return begins_header(file.read(SNIFFED_BYTES))

    def _of_safetensors(
        self, name: str, piece: TensorChunk, place: StorageLocation
    ) -> torch.Tensor:
        path = os.path.join(self._path, place.relative_path)
        found = self._safetensors.get(place.relative_path)
        if found is None:
            tensors, notes = read_at(path, place.offset)
            try:
                pieces = {
                    key: tuple(one[_OFFSETS]) for key, one in json.loads(notes[_SHARDING]).items()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._damaged(name, f"{_SHARDING} is missing or broken: {error}") from error
            found = self._safetensors[place.relative_path] = _Safetensors(tensors, pieces)
        offsets = found.pieces.get(name)
        if offsets != piece.offsets or name not in found.tensors:
            # Names are unique: of a rank's several pieces of one tensor, only the last is left.
            raise CorruptCheckpointError(
                f"{path}: the piece of {name} at {list(piece.offsets)} is missing: DCP has written "
                f"the one at {list(offsets or ())} over it; take an earlier checkpoint",
                path=path,
            )
        return found.tensors[name]

    def _damaged(self, name: str, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}: {name} is damaged: {why}", path=self._path, tensor=name
        )


class _Safetensors(NamedTuple):
    """The safetensors data at the end of a file."""

    tensors: dict[str, torch.Tensor]
    pieces: dict[str, tuple[int, ...]]


def _decoded(content: io.BytesIO, place: StorageLocation, path: str) -> io.BytesIO:
    """Decodes the bytes of an item that DCP has encoded, for example by Zstandard."""
    try:
        # Available from PyTorch 2.7 on.
        from torch.distributed.checkpoint._extension import ExtensionRegistry

        for extension in ExtensionRegistry().from_descriptor_list(place.transforms):
            content = io.BytesIO(extension.transform_from(content).read(-1))  # type: ignore[attr-defined]
    except (ImportError, ValueError) as error:
        raise MissingDependencyError(
            f"{path}: its items are encoded as {', '.join(place.transforms)}, which takes PyTorch "
            f"2.7 or newer, and the package zstandard: {error}",
            name="zstandard",
        ) from error
    return content
