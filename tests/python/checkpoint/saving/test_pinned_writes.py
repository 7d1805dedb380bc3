"""Saves without a copy of memory that the kernel writes through pages pinned before the save.

Such writes cause no page fault, so no watch of pages sees them. Devices write so, too.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading

import numpy as np
import pytest

import penstock

MIB = 1 << 20
HUGE = 2 * MIB
BYTES = 32 * MIB

# System calls, operations and offsets of <linux/io_uring.h>.
SETUP, ENTER, REGISTER = 425, 426, 427
REGISTER_BUFFERS = 0
READ_FIXED = 4
GETEVENTS = 1
SQES_OFFSET = 0x10000000


class PinnedReader:
    """Reads files into registered memory, one request at a time."""

    def __init__(self, memory: np.ndarray) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memory = memory
        parameters = (ctypes.c_char * 120)()
        self._ring_fd = self._call(SETUP, 8, parameters)
        fields = struct.unpack("<10I", parameters.raw[:40])
        self._sq = struct.unpack("<8I", parameters.raw[40:72])
        self._cq = struct.unpack("<8I", parameters.raw[80:112])
        size = max(self._sq[6] + fields[0] * 4, self._cq[5] + fields[1] * 16)
        self._ring = mmap.mmap(self._ring_fd, size, flags=mmap.MAP_SHARED)
        self._entries = mmap.mmap(
            self._ring_fd, fields[0] * 64, flags=mmap.MAP_SHARED, offset=SQES_OFFSET
        )
        vector = (ctypes.c_uint64 * 2)(memory.ctypes.data, memory.nbytes)
        self._call(REGISTER, self._ring_fd, REGISTER_BUFFERS, vector, 1)

    def _call(self, number, *arguments):
        result = self._libc.syscall(number, *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def _number(self, offset):
        return struct.unpack_from("<I", self._ring, offset)[0]

    def read(self, file: int, offset: int, at: int, nbytes: int) -> int:
        """Reads bytes of a file from an offset to a place in the memory; returns how many."""
        tail = self._number(self._sq[1])
        slot = tail & self._number(self._sq[2])
        address = self._memory.ctypes.data + at
        fields = (READ_FIXED, 0, 0, file, offset, address, nbytes, 0, 1, 0, 0, 0, 0, 0)
        entry = struct.pack("<BBHiQQIIQHHiQQ", *fields)
        self._entries[slot * 64 : slot * 64 + 64] = entry
        struct.pack_into("<I", self._ring, self._sq[6] + 4 * slot, slot)
        struct.pack_into("<I", self._ring, self._sq[1], (tail + 1) & 0xFFFFFFFF)
        self._call(ENTER, self._ring_fd, 1, 1, GETEVENTS, None, 0)
        head = self._number(self._cq[0])
        place = self._cq[5] + 16 * (head & self._number(self._cq[2]))
        result = struct.unpack_from("<i", self._ring, place + 8)[0]
        struct.pack_into("<I", self._ring, self._cq[0], head + 1)
        return result

    def close(self) -> None:
        self._ring.close()
        self._entries.close()
        os.close(self._ring_fd)


def aligned(nbytes):
    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE
    tensor = whole[start : start + nbytes]
    tensor[:] = 1
    return tensor


def test_a_tensor_that_a_ring_fills_meanwhile_is_torn_and_not_damaged(disk_path):
    tensor = aligned(BYTES)
    if penstock.save(disk_path / "probe", {"w": tensor}).zero_copy_bytes == 0:
        pytest.skip("saves copy here")
    try:
        reader = PinnedReader(tensor)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.ENOMEM):
            raise
        pytest.skip(f"no ring with registered memory: {error}")
    content = np.random.default_rng(0).integers(0, 256, 9 * MIB, dtype=np.uint8)
    (disk_path / "content").write_bytes(content.tobytes())
    source = os.open(disk_path / "content", os.O_RDONLY)
    assert reader.read(source, 0, 0, MIB) == MIB
    assert np.array_equal(tensor[:MIB], content[:MIB])
    stopped = threading.Event()

    def write():
        turn = 0
        while not stopped.is_set():
            # No content comes twice during a save: a value that changes back is not found.
            turn = (turn + 1) % 2048
            for at in range(0, BYTES, MIB):
                reader.read(source, turn * 4096, at, MIB)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(8):
            path = disk_path / f"saved{number}"
            penstock.save(path, {"w": tensor})
            assert penstock.load(path)["w"].nbytes == BYTES
    finally:
        stopped.set()
        writer.join()
        reader.close()
        os.close(source)
