"""`Archive`: a ``torch.save`` file, which is a zip archive with a member per storage.

One reader finds a member, checks its checksum, which PyTorch ignores, and returns its bytes: the
same bytes for every writer of archives. Uncompressed members stay in the mapped file. Compressed
ones are unpacked into memory.
"""

from __future__ import annotations

import errno
import io
import math
import struct
import sys
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Any

import torch

from penstock.errors import CorruptCheckpointError, StorageError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.converting.files.plain import Unpickler

START = b"PK\x03\x04"
"""The first bytes of a zip archive."""

_PICKLE = "data.pkl"
_LOCAL_BYTES = 30
_IS_ENCRYPTED = 1
_ALIGNMENT = 16
_ORDER_BYTES_MAX = 64
_CHUNK_BYTES = 64 << 20


class Archive:
    """An open archive; ``data`` is all of it, in memory or mapped, and never written back."""

    def __init__(self, opened: IO[bytes], data: torch.Tensor, what: str) -> None:
        self._what = what
        self._opened = opened
        self._storage = data.untyped_storage()
        content: Any = data.numpy()
        self._view = memoryview(content)
        try:
            self._zip = zipfile.ZipFile(opened)
        except NotImplementedError as error:
            raise UnsupportedStateError(
                f"{what}: it is a zip archive of a newer version, or damaged ({error}): unpack it, "
                "and pack it anew with plain zip",
                key=_PICKLE,
            ) from error
        except (zipfile.BadZipFile, ValueError, OverflowError, struct.error) as error:
            raise damaged(what, error) from error
        members = self._zip.infolist()
        self._members = {one.filename: one for one in members}
        if len(self._members) != len(members):
            raise damaged(what, "two of its members have one name")
        self.has_sums = any(one.CRC for one in members)
        self._root = _root(self._members, what)
        self._is_swapped = self._byte_order() != sys.byteorder
        self._storages: dict[str, torch.UntypedStorage] = {}

    def load(self, unpickler: Callable[[IO[bytes], Callable[[Any], Any]], Unpickler]) -> Any:
        """Unpickles the archive."""
        return unpickler(io.BytesIO(self._member(_PICKLE)), self._load_storage).load()

    def stored(self) -> dict[str, memoryview]:
        """Returns the bytes of each member by its whole name; refuses compressed members."""
        if sum(one.file_size for one in self._members.values()) > len(self._view):
            raise damaged(self._what, "its members share bytes, or are compressed")
        found = {}
        for name, entry in self._members.items():
            begin = self._begin(name.removeprefix(self._root))
            if begin is None:
                raise damaged(self._what, f"its member {name} is compressed")
            found[name] = self._view[begin : begin + entry.file_size]
        return found

    def _byte_order(self) -> str:
        # An archive without the note is little endian, as for PyTorch.
        is_noted = f"{self._root}byteorder" in self._members
        if is_noted and self._entry("byteorder").file_size > _ORDER_BYTES_MAX:
            raise damaged(self._what, "its byte order is longer than a word")
        order = bytes(self._member("byteorder")) if is_noted else b"little"
        if order not in (b"little", b"big"):
            raise damaged(self._what, f"its byte order is {order[:20]!r}")
        return order.decode()

    def _load_storage(self, pid: Any) -> Any:
        check_id(pid, self._what)
        typename, kind, key, _location, count = pid
        if typename != "storage":
            raise ValueError(f"it refers to a {typename}")
        name, dtype = f"data/{key}", kind.dtype or torch.uint8
        nbytes = count * dtype.itemsize
        storage = self._storages.get(key)
        if storage is None:
            if self._is_swapped and kind.dtype is None:
                raise UnsupportedStateError(
                    f"{self._what}: {name} holds tensors of a type that PyTorch does not note, in "
                    "the byte order of another machine: save them there as another type",
                    key=name,
                )
            storage = self._storages[key] = self._read(name, dtype, nbytes)
        if storage.nbytes() != nbytes:
            raise self._misfit(name, storage.nbytes(), nbytes)
        return typed(storage, dtype)

    def _read(self, name: str, dtype: torch.dtype, nbytes: int) -> torch.UntypedStorage:
        entry = self._entry(name)
        if entry.file_size != nbytes:
            raise self._misfit(name, entry.file_size, nbytes)
        begin = self._begin(name)
        if begin is not None and begin % _ALIGNMENT == 0 and not self._is_swapped:
            part: torch.UntypedStorage = self._storage[begin : begin + nbytes]
            return part
        storage = storage_of(self._member(name))
        if self._is_swapped:
            storage.byteswap(dtype)  # type: ignore[no-untyped-call]
        return storage

    def _member(self, name: str) -> bytearray:
        """Returns the bytes of a member as they were written."""
        entry, begin = self._entry(name), self._begin(name)
        if begin is not None:
            return bytearray(self._view[begin : begin + entry.file_size])
        content, filled = room(entry.file_size, self._what), 0
        try:
            with self._zip.open(entry) as member:
                while part := member.read(_CHUNK_BYTES):
                    content[filled : filled + len(part)] = part
                    filled += len(part)
        except (NotImplementedError, RuntimeError) as error:
            # This Python lacks the compression method.
            raise self._unsupported(name, str(error)) from error
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, struct.error) as error:
            raise damaged(self._what, error) from error
        if filled != entry.file_size:
            raise self._misfit(name, filled, entry.file_size)
        return content

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self._members.get(self._root + name)
        if entry is None:
            raise damaged(self._what, f"its member {name} is missing")
        if entry.flag_bits & _IS_ENCRYPTED:
            raise self._unsupported(name, "it is encrypted")
        if not 0 <= entry.header_offset <= len(self._view) - _LOCAL_BYTES:
            raise damaged(self._what, f"{name} lies outside of it")
        return entry

    def _begin(self, name: str) -> int | None:
        """Returns an uncompressed member's offset, its checksum checked; None if compressed."""
        entry = self._entry(name)
        if entry.compress_type != zipfile.ZIP_STORED:
            return None
        header = self._view[entry.header_offset : entry.header_offset + _LOCAL_BYTES]
        if header[: len(START)] != START:
            raise damaged(self._what, f"{name} does not begin where the archive says")
        names_bytes = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        begin = entry.header_offset + _LOCAL_BYTES + names_bytes
        end = begin + entry.file_size
        if entry.compress_size != entry.file_size or end > len(self._view):
            raise damaged(self._what, f"{name} does not end where the archive says")
        # If all sums are 0, the writer was configured to compute none.
        if self.has_sums and _sum(self._view[begin:end]) != entry.CRC:
            raise damaged(self._what, f"the checksum (CRC-32) of {name} is another one")
        return begin

    def _misfit(self, name: str, found: int, wanted: int) -> CorruptCheckpointError:
        return damaged(self._what, f"{name} has {found} bytes instead of {wanted}")

    def _unsupported(self, name: str, why: str) -> UnsupportedStateError:
        return UnsupportedStateError(
            f"{self._what}: its member {name} cannot be read ({why}): unpack the archive, and pack "
            "it anew with plain zip",
            key=name,
        )


def _root(names: dict[str, Any], what: str) -> str:
    """Returns the directory of the pickle within the archive, with a slash; or nothing."""
    if any(name.rpartition("/")[2] == "constants.pkl" for name in names):
        raise UnsupportedStateError(
            f"{what} is an archive of TorchScript (torch.jit.save), which holds code: load it with "
            f"torch.jit.load({what!r}), and penstock.save(directory, module.state_dict())",
            key="constants.pkl",
        )
    found = [name for name in names if name.rpartition("/")[2] == _PICKLE]
    if len(found) == 1:
        return found[0].removesuffix(_PICKLE)
    if names and all(name.endswith(".npy") for name in names):
        raise UnsupportedStateError(
            f"{what} is an archive of NumPy: penstock.save(directory, dict(numpy.load({what!r}))) "
            "makes a checkpoint of it",
            key=next(iter(names)),
        )
    raise UnsupportedStateError(
        f"{what} is a zip archive with {len(found) or 'no'} {_PICKLE}, so none of torch.save: load "
        "it with the library that wrote it, and pass its tensors to penstock.save",
        key=_PICKLE,
    )


def _sum(view: memoryview) -> int:
    found = 0
    for part in range(math.ceil(len(view) / _CHUNK_BYTES)):
        found = zlib.crc32(view[part * _CHUNK_BYTES : (part + 1) * _CHUNK_BYTES], found)
    return found


def storage_of(content: bytearray) -> torch.UntypedStorage:
    """Creates a storage over bytes."""
    if not content:
        return torch.zeros(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """Wraps a storage for the functions that rebuild tensors."""
    kind: Any = torch.storage.TypedStorage
    return kind(wrap_storage=storage, dtype=dtype, _internal=True)


def room(nbytes: int, what: str) -> bytearray:
    """Allocates memory for a part of a file."""
    try:
        return bytearray(nbytes)
    except MemoryError as error:
        part = f"{nbytes} bytes of it, which are not mapped"
        remedy = ", or save it again with torch.save, which does not compress"
        raise no_room(what, part, remedy) from error


def no_room(what: str, part: str, remedy: str = "") -> StorageError:
    """Returns the error for a part of a file that exceeds the memory."""
    return StorageError(
        f"{what}: there is no memory for {part}: read it on a machine with more{remedy}",
        path=what,
        errno=errno.ENOMEM,
    )


def check_id(pid: Any, what: str) -> None:
    """Refuses the textual storage ids of pickle protocol 0."""
    if isinstance(pid, str):
        raise UnsupportedStateError(
            f"{what} was saved with pickle_protocol=0, which keeps no tensors that PyTorch or "
            "anything else can read: save it again without",
            key="pickle_protocol",
        )


def damaged(what: str, why: object) -> CorruptCheckpointError:
    """Returns the error for a damaged ``torch.save`` file."""
    first = str(why).partition("\n")[0][:200]
    return CorruptCheckpointError(
        f"{what} is cut, damaged or not of torch.save: {first}", path=what
    )
