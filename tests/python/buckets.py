"""A real server of S3's protocol for a test: VersityGW, whose objects are files of a directory."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALLED = Path(__file__).resolve().parents[2] / ".cache/versitygw-v1.8.0/versitygw"

_STARTING_SECONDS_MAX = 60

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class Bucket:
    """A bucket of a server of its own.

    Attributes:
        url: Of the bucket.
        endpoint: Where the server answers.
        files: The directory whose files are the objects.
    """

    url = "s3://bucket"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = root / "bucket"
        self.files.mkdir(parents=True)
        self.endpoint = ""
        self._server: subprocess.Popen[bytes] | None = None

    def names(self, key: str = "") -> list[str]:
        """Keys below one, from there on."""
        below = self.files / key
        return sorted(
            str(path.relative_to(below))
            for path in below.rglob("*")
            if path.is_file() and ".sgwtmp" not in path.parts
        )

    def start(self) -> None:
        """Starts the server, where it was before if it was."""
        address = self.endpoint.removeprefix("http://") or _free_address()
        keys = {"ROOT_ACCESS_KEY_ID": "key", "ROOT_SECRET_ACCESS_KEY": "secret"}
        self._server = subprocess.Popen(
            [program(), "--port", address, "posix", self.root],
            env=os.environ | keys,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = f"http://{address}"
        host, _, port = address.rpartition(":")
        for _ in range(50 * _STARTING_SECONDS_MAX):
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                assert self._server.poll() is None, "the server ended"
                time.sleep(0.02)
            else:
                return
        raise AssertionError("the server does not answer")

    def stop(self) -> None:
        """Kills the server, as a crash of its machine would."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()


def program() -> Path:
    """The server; skips where there is none."""
    found = Path(os.environ.get("PENSTOCK_VERSITYGW") or _INSTALLED)
    if not found.exists():
        pytest.skip("VersityGW is not installed: `make objects-server` does it with Go")
    return found


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def serving(root: Path) -> Iterator[Bucket]:
    """A bucket with its server."""
    bucket = Bucket(root)
    try:
        bucket.start()
        yield bucket
    finally:
        bucket.stop()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket that the environment leads to."""
    with serving(tmp_path / "server") as serving_one:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", serving_one.endpoint)
        # What the test before had is another server's.
        penstock.set_remote(serving_one.url, None)
        yield serving_one
        penstock.set_remote(serving_one.url, None)
