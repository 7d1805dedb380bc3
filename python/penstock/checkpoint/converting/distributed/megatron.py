"""Reads directories of Megatron-Core's format ``torch_dist``, which is DCP with files beside it.

The state is the one that `penstock.integrations.megatron` saves: the tensors by their keys, and the
bytes of each object. So the new checkpoint is loaded by Megatron-Core through the plug-in, and
nothing is unpickled. Tensors stay in the mapped files, in the pieces of the ranks that wrote them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import zipfile
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.checkpoint.converting.distributed.dcp_metadata import read_metadata
from penstock.checkpoint.converting.files.archive import damaged
from penstock.checkpoint.converting.files.pickles import mapped_archive
from penstock.checkpoint.loading.dcp_files import METADATA, check_files, check_pieces
from penstock.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedStateError
from penstock.tensors.marks import Boxes

if TYPE_CHECKING:
    from penstock.checkpoint.converting.distributed.dcp_metadata import StorageLocation, TensorEntry
    from penstock.checkpoint.converting.files.pickles import Pickles

CONFIG, COMMON = "metadata.json", "common.pt"
"""The files beside DCP's: the format, and the common state before Megatron-Core 0.19."""

COMMON_OBJECT = "common_state/shard_0_1"
"""The object with the common state, from Megatron-Core 0.19 on: a list of it."""

CONFIG_BYTES_MAX = 1 << 20
"""Bytes read of `CONFIG` to detect the format; Megatron-Core writes about 100."""

COMMON_BYTES_MAX = 1 << 30
"""Largest common object; reading it takes its size in memory two times."""

TENSORS, OBJECTS = "tensors", "objects"
"""The members of the state."""


class Contents(NamedTuple):
    """A checkpoint of Megatron-Core.

    Attributes:
        state: Its tensors and objects.
        files: The files beside them.
    """

    state: dict[str, Any]
    files: dict[str, bytes]


def is_megatron(path: str) -> bool:
    """Whether the files beside DCP's say that Megatron-Core wrote a directory."""
    try:
        with open(os.path.join(path, CONFIG), "rb") as file:
            config = json.loads(file.read(CONFIG_BYTES_MAX))
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("sharded_backend") == "torch_dist"


def read_megatron(path: str, pickles: Pickles) -> Contents:
    """Returns the contents of a directory; tensors are mapped to its files."""
    file = os.path.join(path, METADATA)
    if not os.path.exists(file):
        raise IncompleteCheckpointError(
            f"{path}: {METADATA}, which Megatron-Core writes last, is missing: take an earlier "
            "iteration",
            path=path,
        )
    metadata = read_metadata(file, pickles)
    check_files(path, metadata.places)
    items = _Items(path, metadata.places, pickles)
    tensors = {
        name: items.tensor(name, entry)
        for name, entry in metadata.entries.items()
        if entry is not None
    }
    objects = {
        name: items.object(name) for name, entry in metadata.entries.items() if entry is None
    }
    files = {CONFIG: _read(path, CONFIG)}
    if os.path.exists(os.path.join(path, COMMON)):
        files[COMMON] = _read(path, COMMON)
    elif COMMON_OBJECT in objects:
        files[COMMON] = only_element(objects[COMMON_OBJECT], f"{path} (common)")
    return Contents({TENSORS: tensors, OBJECTS: objects}, files)


class _Items:
    """Maps the items of a directory."""

    def __init__(
        self,
        path: str,
        places: dict[tuple[str, tuple[int, ...] | None], StorageLocation],
        pickles: Pickles,
    ) -> None:
        self._path = path
        self._places = places
        self._pickles = pickles
        self._files: dict[str, Any] = {}

    def tensor(self, name: str, entry: TensorEntry) -> Boxes:
        """Returns a tensor, in the pieces in which it is stored."""
        check_pieces(self._path, name, entry.size, entry.pieces, is_whole=True)
        found = []
        for piece in dict.fromkeys(entry.pieces):
            item = self._item(name, piece.offsets)
            elements = self._pickles.read_mapped(item, f"{self._path} ({name})")
            if not isinstance(elements, torch.Tensor) or (
                (elements.dtype, tuple(elements.shape)) != (entry.dtype, piece.sizes)
            ):
                raise CorruptCheckpointError(
                    f"{self._path}: {name} is damaged: its piece at {list(piece.offsets)} is not "
                    f"{list(piece.sizes)} of {entry.dtype}",
                    path=self._path,
                    tensor=name,
                )
            found.append((piece.offsets, elements.detach()))
        return Boxes(entry.size, entry.dtype, found)

    def object(self, name: str) -> torch.Tensor:
        """Returns the bytes of an object."""
        return self._item(name, None)

    def _item(self, name: str, offsets: tuple[int, ...] | None) -> torch.Tensor:
        place = self._places.get((name, offsets))
        if place is None:
            raise CorruptCheckpointError(
                f"{self._path}: {name} is damaged: its metadata does not say where it lies",
                path=self._path,
                tensor=name,
            )
        if place.transforms:
            raise UnsupportedStateError(
                f"{self._path}: {name} is encoded as {', '.join(place.transforms)}: convert the "
                "tensors alone, with kind='dcp' (--from dcp)",
                key=name,
            )
        if place.relative_path not in self._files:
            file = os.path.join(self._path, place.relative_path)
            # Unlike `mmap`, this keeps no descriptor open: there is a file for each rank.
            mapped = torch.UntypedStorage.from_file(file, False, os.path.getsize(file))
            self._files[place.relative_path] = mapped
        part = self._files[place.relative_path][place.offset : place.offset + place.length]
        return torch.empty(0, dtype=torch.uint8).set_(part)


def _read(path: str, name: str) -> bytes:
    with open(os.path.join(path, name), "rb") as file:
        return file.read()


def only_element(data: torch.Tensor, what: str) -> bytes:
    """Returns the ``torch.save`` file of the only element of a saved list, unpickling nothing.

    Args:
        data: The bytes of the list's file.
        what: Its name in errors.

    Raises:
        CorruptCheckpointError: The file is damaged, or has compressed members, which `torch.save`
            does not write.
        UnsupportedStateError: It is no list of one element as `torch.save` writes it, or is larger
            than `COMMON_BYTES_MAX`.
    """
    if data.nbytes > COMMON_BYTES_MAX:
        raise _unsupported(what, f"it has {data.nbytes} bytes, more than {COMMON_BYTES_MAX}")
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, content in mapped_archive(data, what).stored().items():
            is_pickle = name.rpartition("/")[2] == "data.pkl"
            archive.writestr(name, _without_list(bytes(content), what) if is_pickle else content)
    return made.getvalue()


def _without_list(pickled: bytes, what: str) -> bytes:
    """Leaves out the operations that put an object into a list."""
    found = ((code.name, at) for code, _, at in pickletools.genops(pickled))
    try:
        first = list(islice(found, 4))
        last, is_implicit = deque(first, maxlen=2), False
        for one in found:
            last.append(one)
            is_implicit = is_implicit or one[0] == "MEMOIZE"
    except ValueError as error:
        raise damaged(what, error) from error
    names = [name for name, _ in first]
    # Memo numbers are explicit, so that one fewer changes no other.
    is_list = names[:2] == ["PROTO", "EMPTY_LIST"] and names[2] in ("BINPUT", "LONG_BINPUT")
    if not is_list or [name for name, _ in last] != ["APPEND", "STOP"] or is_implicit:
        raise _unsupported(what, "its pickle is no list of one element as torch.save writes it")
    begin, end = first[3][1], last[0][1]
    return pickled[: first[1][1]] + pickled[begin:end] + pickle.STOP


def _unsupported(what: str, why: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"{what}: {why}: load it with Megatron-Core through penstock.integrations.megatron, and "
        "save it anew",
        key=COMMON_OBJECT,
    )
