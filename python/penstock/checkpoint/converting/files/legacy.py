"""`Legacy`: a file of PyTorch before 1.6, which is several pickles followed by the storages.

It has no checksums, so only its structure can reveal damage.
"""

from __future__ import annotations

import os
import pickle
from typing import IO, TYPE_CHECKING, Any

import torch

from penstock.checkpoint.converting.files.archive import check_id, damaged, room, storage_of, typed
from penstock.errors import UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.converting.files.plain import Unpickler

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT_BYTES = 8


class Legacy:
    """An open file."""

    has_sums = False

    def __init__(self, opened: IO[bytes], what: str) -> None:
        self._opened = opened
        self._what = what
        self._nbytes = os.fstat(opened.fileno()).st_size
        self._roots: dict[str, tuple[bytearray, torch.dtype]] = {}
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}

    def load(self, unpickler: Callable[[IO[bytes], Callable[[Any], Any]], Unpickler]) -> Any:
        """Unpickles the file into memory."""
        self._opened.seek(0)
        self._roots.clear()
        self._storages.clear()
        magic = unpickler(self._opened, _no_storage).load()
        if type(magic) is not int or magic != _MAGIC:
            if self._opened.tell() < self._nbytes:
                raise damaged(self._what, "it begins with another number")
            raise UnsupportedStateError(
                f"{self._what} is a pickle and not by torch.save: unpickle it, and pass what it "
                "holds to penstock.save",
                key="value",
            )
        protocol = unpickler(self._opened, _no_storage).load()
        if protocol != _PROTOCOL:
            raise damaged(self._what, f"its version is {protocol!r:.40}")
        # It describes the machine; storages are little endian in any case.
        unpickler(self._opened, _no_storage).load()
        value = unpickler(self._opened, self._load_storage).load()
        keys = unpickler(self._opened, _no_storage).load()
        if sorted(keys) != sorted(self._roots):
            raise damaged(self._what, "its storages are others than its tensors take")
        for key in keys:
            self._fill(key)
        return value

    def _load_storage(self, pid: Any) -> Any:
        check_id(pid, self._what)
        typename, *data = pid
        if typename == "module":
            # A class with its source code, which is not needed.
            return data[0]
        kind, key, _location, count, view = data
        dtype = kind.dtype or torch.uint8
        content, _ = self._roots.setdefault(key, (self._room(count * dtype.itemsize), dtype))
        begin, size = (0, count) if view is None else view[1:]
        begin, end = begin * dtype.itemsize, (begin + size) * dtype.itemsize
        if not 0 <= begin <= end <= len(content):
            raise damaged(self._what, f"storage {key} ends before a part of it")
        part = self._storages.get((key, begin, end))
        if part is None:
            # Parts of one storage share its memory.
            part = self._storages[key, begin, end] = storage_of(content)[begin:end]
        return typed(part, dtype)

    def _room(self, nbytes: int) -> bytearray:
        if not 0 <= nbytes <= self._nbytes:
            raise damaged(self._what, f"a storage of {nbytes} bytes does not fit into it")
        return room(nbytes, self._what)

    def _fill(self, key: str) -> None:
        content, dtype = self._roots[key]
        count = int.from_bytes(self._opened.read(_COUNT_BYTES), "little")
        if count * dtype.itemsize != len(content):
            raise damaged(self._what, f"storage {key} is of another size")
        if content and self._opened.readinto(content) != len(content):  # type: ignore[attr-defined]
            raise damaged(self._what, f"storage {key} is cut")


def _no_storage(pid: Any) -> Any:
    raise pickle.UnpicklingError(f"no storage belongs here: {pid!r:.40}")
