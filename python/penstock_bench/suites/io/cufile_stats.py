"""Which way cuFile went, by its own counters: with nvidia-fs, from peer to peer, or by neither."""

from __future__ import annotations

import ctypes
from typing import Self

_LIBRARY = "libcufile.so.0"
_LEVEL = 3
_GPUS_MAX = 16


class _Status(ctypes.Structure):
    """``CUfileError_t``."""

    _fields_ = [("error", ctypes.c_int), ("driver_error", ctypes.c_int)]


_READS = (
    "bytes", "rate", "utilization", "duration", "total", "p2p", "nvfs", "posix", "unaligned",
    "routed", "sparse", "inline", "errors",
)  # fmt: skip
_WRITES = (
    "bytes", "rate", "utilization", "duration", "total", "p2p", "nvfs", "posix", "unaligned",
    "routed", "errors",
)  # fmt: skip
_BUFFERS = ("registered", "ok", "failed", "freed", "bytes")


class _Gpu(ctypes.Structure):
    """``CUfilePerGpuStats_t`` of cuFile 1.15 on."""

    _fields_ = [
        ("uuid", ctypes.c_char * 16),
        *((f"reads_{name}", ctypes.c_uint64) for name in _READS),
        *((f"writes_{name}", ctypes.c_uint64) for name in _WRITES),
        *((f"buffers_{name}", ctypes.c_uint64) for name in _BUFFERS),
    ]


class _Level3(ctypes.Structure):
    """``CUfileStatsLevel3_t``: level 2 first, of 21 pairs, 22 numbers and two histograms of 32."""

    _fields_ = [
        ("level_2", ctypes.c_uint64 * (2 * 21 + 22 + 2 * 32)),
        ("gpus", ctypes.c_uint32),
        ("of_gpus", _Gpu * _GPUS_MAX),
    ]


class CufileStats:
    """Counters from a moment on."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._before = self._counts()

    @classmethod
    def begin(cls) -> Self | None:
        """Counts from now on; None where cuFile has no such counters.

        A cuFile without the symbols is older than 1.15; one that refuses was not initialised.
        """
        try:
            library = ctypes.CDLL(_LIBRARY)
            for name in ("cuFileSetStatsLevel", "cuFileStatsStart", "cuFileGetStatsL3"):
                getattr(library, name).restype = _Status
        except (OSError, AttributeError):
            return None
        if library.cuFileSetStatsLevel(_LEVEL).error or library.cuFileStatsStart().error:
            return None
        return cls(library)

    def _counts(self) -> dict[str, int]:
        found = _Level3()
        # Room behind it, should a later release have more GPUs.
        room = ctypes.create_string_buffer(2 * ctypes.sizeof(found))
        if self._library.cuFileGetStatsL3(room).error:
            return {}
        ctypes.memmove(ctypes.byref(found), room, ctypes.sizeof(found))
        gpus = found.of_gpus[: min(found.gpus, _GPUS_MAX)]
        return {
            way: sum(getattr(gpu, f"{kind}_{way}") for gpu in gpus for kind in ("reads", "writes"))
            for way in ("p2p", "nvfs", "posix")
        }

    def since(self) -> dict[str, int]:
        """Requests of each way since it began: ``p2p``, ``nvfs``, ``posix``."""
        return {way: count - self._before.get(way, 0) for way, count in self._counts().items()}

    def is_compat(self) -> bool:
        """Whether any went through memory of the host."""
        return self.since().get("posix", 0) > 0

    def report(self) -> str:
        """The counters, in words."""
        return ", ".join(f"{count} {way}" for way, count in self.since().items()) or "no counters"
