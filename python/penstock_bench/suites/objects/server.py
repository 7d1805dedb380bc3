"""A server of S3's protocol on this machine: VersityGW, whose objects are files of a directory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import click
import psutil

from penstock_bench.harness.options import ROOT, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BUCKET = "bucket"
REGION = "us-east-1"
KEY, SECRET = "key", "secret"

# Connections are kept, as S3 keeps them: without the flag each request would have one of its own.
# Tags of objects are made of the checksums that clients send, not of a second digest, MD5.
FLAGS = ("--keep-alive", "--quiet")
STORAGE_FLAGS = ("--data-integrity-etag",)

# Words of a line of its log, which has the format of S3: owner, bucket, two words of time, address,
# requester, id of the request, operation, key, request, status, error, bytes sent and of the
# object, milliseconds.
_WORD_OPERATION, _WORD_MILLISECONDS = 7, 14

_STARTS = 5
_START_SECONDS = 30


def program() -> Path:
    """VersityGW.

    Raises:
        click.ClickException: It is not installed.
    """
    named = os.environ.get("PENSTOCK_VERSITYGW")
    if named:
        return ROOT / named
    installed = sorted((ROOT / ".cache").glob("versitygw-*/versitygw"))
    if not installed:
        raise click.ClickException("VersityGW is not installed: make objects-server, with Go")
    return installed[-1]


class Server:
    """A server, from ``with`` to the end of the block.

    Objects are files, in a directory each bucket.
    """

    def __init__(self, directory: Path, cores: Sequence[int]) -> None:
        self._directory = directory
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory.with_name(f"{directory.name}.log")

    def __enter__(self) -> Server:
        (self._directory / BUCKET).mkdir(parents=True)
        for _ in range(_STARTS):
            # Somebody else may take a port that is free just now.
            self.address = ("127.0.0.1", free_port())
            if self._start():
                return self
        raise click.ClickException(f"{program()} does not start")

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> bool:
        host, port = self.address
        command = [str(program()), "--port", f"{host}:{port}", *FLAGS]
        command += ["--access-log", str(self._log), "posix", *STORAGE_FLAGS, str(self._directory)]
        environment = {**os.environ, "ROOT_ACCESS_KEY_ID": KEY, "ROOT_SECRET_ACCESS_KEY": SECRET}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # Its later threads inherit the affinity.
        os.sched_setaffinity(self._process.pid, self._cores)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(self.address, timeout=1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return True
        self.__exit__()
        return False

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the server so far."""
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def endpoint(self) -> str:
        """Its URL."""
        host, port = self.address
        return f"http://{host}:{port}"

    def files(self, key: str) -> list[Path]:
        """The files that are the objects below a key."""
        found = (self._directory / BUCKET / key).rglob("*")
        return sorted(path for path in found if path.is_file())

    def remove(self, key: str) -> None:
        """Removes all objects below a key, without asking the server."""
        shutil.rmtree(self._directory / BUCKET / key, ignore_errors=True)

    def answered(self, without: str) -> list[tuple[str, float]]:
        """The requests that were answered since this was last asked: their kinds, and seconds.

        Those to keys, or for lists of them, that have some text in them do not count.
        """
        if not self._log.exists():
            return []
        lines = self._log.read_text().splitlines()
        # The server appends, so it goes on where the file ends now.
        os.truncate(self._log, 0)
        found = []
        for line in lines:
            words = line.split(" ")
            if len(words) > _WORD_MILLISECONDS and without not in line:
                name = words[_WORD_OPERATION].removeprefix("s3_")
                found.append((name, int(words[_WORD_MILLISECONDS]) / 1e3))
        return found
