"""A proxy that paces connections as a store of objects does, and counts their bytes.

A process of its own: it says at which port it listens, then for each line that it reads the counts
so far. Each connection has a rate in each direction, all together have another, and the first byte
of an answer comes late. Bytes are moved by `os.splice`, which copies none of them to this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Imported under its name from here. `penstock_bench.harness.options` has it with much else.
_ROOT = Path(__file__).resolve().parents[3]

# At 90 MB/s every 1.5 ms: few enough wake-ups for a processor, and short beside the latency.
_CHUNK_BYTES = 128 << 10
# Buffers of a connection in the kernel: small, so that the client feels its rate.
_SOCKET_BYTES = 256 << 10
# A sleep ends late. So much is made up for.
_SLACK_SECONDS = 0.01


@dataclass(frozen=True)
class Limits:
    """How a store is paced; None for as fast as it goes. MB is 10**6 bytes.

    Rates are those of each connection, up to the store and down from it, and of all together.
    The latency is how late the first byte of an answer is.
    """

    up: float | None = None
    down: float | None = None
    up_in_all: float | None = None
    down_in_all: float | None = None
    latency_seconds: float = 0.0


class Pace:
    """A rate, as a schedule: when which bytes may go on."""

    def __init__(self, mb_per_second: float) -> None:
        self._seconds_per_byte = 1 / (mb_per_second * 1e6)
        self._next = 0.0
        self._lock = threading.Lock()

    def admit(self, nbytes: int, now: float) -> float:
        """The time from when on the next bytes may go on."""
        with self._lock:
            begin = max(self._next, now - _SLACK_SECONDS)
            self._next = begin + nbytes * self._seconds_per_byte
            return self._next


class Direction:
    """All connections in one direction."""

    def __init__(self, each: float | None, in_all: float | None) -> None:
        self._each = each
        self._in_all = Pace(in_all) if in_all else None
        self._lock = threading.Lock()
        self.nbytes = 0

    def paces(self) -> list[Pace]:
        """The limits of a new connection."""
        own = Pace(self._each) if self._each else None
        return [pace for pace in (own, self._in_all) if pace]

    def count(self, nbytes: int) -> None:
        """Adds what went through."""
        with self._lock:
            self.nbytes += nbytes


class _Proxy:
    def __init__(self, target: tuple[str, int], limits: Limits) -> None:
        self._target = target
        self._latency_seconds = limits.latency_seconds
        self.up = Direction(limits.up, limits.up_in_all)
        self.down = Direction(limits.down, limits.down_in_all)
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        # A connection inherits it; set later it would be too late for the first bytes.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self.connections += 1
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            server.connect(self._target)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Set by whoever sends a request on: what comes then begins an answer.
            asked = threading.Event()
            ends = threading.Barrier(2)
            for job in (
                (client, server, self.up, asked, ends, False),
                (server, client, self.down, asked, ends, True),
            ):
                threading.Thread(target=self._forward, args=job, daemon=True).start()

    def _forward(
        self,
        source: socket.socket,
        target: socket.socket,
        direction: Direction,
        asked: threading.Event,
        ends: threading.Barrier,
        is_answer: bool,
    ) -> None:
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 2 * _CHUNK_BYTES)
        paces = direction.paces()
        try:
            while nbytes := os.splice(source.fileno(), writing, _CHUNK_BYTES):
                now = time.monotonic()
                due = max((pace.admit(nbytes, now) for pace in paces), default=now)
                if not is_answer:
                    asked.set()
                elif asked.is_set():
                    asked.clear()
                    due = max(due, now + self._latency_seconds)
                if due > now:
                    time.sleep(due - now)
                direction.count(nbytes)
                while nbytes:
                    nbytes -= os.splice(reading, target.fileno(), nbytes)
        except OSError:
            # One of the two has hung up: the other one shall hear of it.
            with contextlib.suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        os.close(reading)
        os.close(writing)
        # The last one closes both: a reused descriptor would be another connection.
        if ends.wait() == 0:
            source.close()
            target.close()


class Proxy:
    """A proxy in front of an address, from ``with`` to the end of the block."""

    def __init__(self, target: tuple[str, int], limits: Limits, cores: Sequence[int]) -> None:
        self._target = target
        self._limits = limits
        self._cores = cores

    def __enter__(self) -> Proxy:
        told = json.dumps([*self._target, asdict(self._limits)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        os.sched_setaffinity(self._process.pid, self._cores)
        self.endpoint = f"http://127.0.0.1:{int(self._read())}"
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def counts(self) -> dict[str, int]:
        """Bytes ``up`` and ``down``, and ``connections``, since the beginning."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._read())
        return found

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def _main() -> None:
    host, port, limits = json.loads(sys.argv[1])
    proxy = _Proxy((host, port), Limits(**limits))
    threading.Thread(target=proxy.serve, daemon=True).start()
    _say(str(proxy.port))
    for _ in sys.stdin:
        up, down = proxy.up.nbytes, proxy.down.nbytes
        _say(json.dumps({"up": up, "down": down, "connections": proxy.connections}))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
