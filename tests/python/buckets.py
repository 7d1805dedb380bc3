"""Real servers of buckets for tests.

VersityGW speaks S3 and stores objects as files of a directory; Azurite emulates Azure's Blob
Storage.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import leftovers
import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALLED = Path(__file__).resolve().parents[2] / ".cache/versitygw-v1.8.0/versitygw"

_STARTING_SECONDS_MAX = 60

_OPERATION = re.compile(r" s3_(\w+) ")
"""Matches the operation in a line of the server's log."""

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class Bucket:
    """A bucket on a server of its own.

    Attributes:
        url: URL of the bucket.
        endpoint: Address of the server.
        files: The directory whose files are the objects.
    """

    url = "s3://bucket"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = root / "bucket"
        self.files.mkdir(parents=True)
        self.endpoint = ""
        self._log = root.with_name(f"{root.name}.log")
        self._server: subprocess.Popen[bytes] | None = None

    def names(self, key: str = "") -> list[str]:
        """Returns the keys below a key, relative to it."""
        below = self.files / key
        return sorted(
            str(path.relative_to(below))
            for path in below.rglob("*")
            if path.is_file() and ".sgwtmp" not in path.parts
        )

    def requests(self) -> list[str]:
        """Returns the operations of all requests so far, in order."""
        return _OPERATION.findall(self._log.read_text())

    def start(self) -> None:
        """Starts the server, on the same port as before if it ran before."""
        address = self.endpoint.removeprefix("http://") or _free_address()
        keys = {"ROOT_ACCESS_KEY_ID": "key", "ROOT_SECRET_ACCESS_KEY": "secret"}
        self._server = subprocess.Popen(
            [program(), "--port", address, "--access-log", self._log, "posix", self.root],
            env=os.environ | keys,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = f"http://{address}"
        host, _, port = address.rpartition(":")
        _await(self._server, host, port)

    def stop(self) -> None:
        """Kills the server, as a crash of its machine would."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()


def program() -> Path:
    """Returns the server's program, or skips the test without it."""
    found = Path(os.environ.get("PENSTOCK_VERSITYGW") or _INSTALLED)
    if not found.exists():
        pytest.skip("VersityGW is not installed: `make objects-server` does it with Go")
    return found


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


_AZURITE = (
    Path(__file__).resolve().parents[2]
    / ".cache/azurite-3.37.0/node_modules/azurite/dist/src/blob/main.js"
)

ACCOUNT, ACCOUNT_KEY = "penstock", "c2VjcmV0"


class Account:
    """An account of Azure's, in an Azurite of its own.

    Attributes:
        endpoint: Where it answers.
    """

    def __init__(self) -> None:
        program = Path(os.environ.get("PENSTOCK_AZURITE") or _AZURITE)
        node = shutil.which("node")
        if node is None or not program.exists():
            pytest.skip("Azurite is not installed: `make objects-server` does it with npm")
        host, _, port = _free_address().rpartition(":")
        kinds = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        self._server = subprocess.Popen(
            [node, program, *kinds, "--blobHost", host, "--blobPort", port],
            env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = f"http://{host}:{port}/{ACCOUNT}"
        leftovers.lasting.add(self._server.pid)
        _await(self._server, host, port)

    def request(self, verb: str, container: str) -> None:
        """Makes a container or deletes it, by a request as Azure wants it signed."""
        told = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        headers = "".join(f"{name}:{value}\n" for name, value in told.items())
        resource = f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
        # The verb, eleven unsent headers, Azure's headers, and the resource.
        text = verb + "\n" * 12 + headers + resource
        key = base64.b64decode(ACCOUNT_KEY)
        signature = base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()
        told["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        url = f"{self.endpoint}/{container}?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, method=verb, headers=told)).close()

    def stop(self) -> None:
        """Stops the server."""
        self._server.kill()
        self._server.wait()
        leftovers.lasting.discard(self._server.pid)


class Container(NamedTuple):
    """A container.

    Attributes:
        url: Of the container.
        endpoint: Where its account answers.
    """

    url: str
    endpoint: str


def _await(server: subprocess.Popen[bytes], host: str, port: str) -> None:
    """Waits until a server answers."""
    for _ in range(50 * _STARTING_SECONDS_MAX):
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            assert server.poll() is None, "the server ended"
            time.sleep(0.02)
        else:
            return
    raise AssertionError("the server does not answer")


@pytest.fixture(scope="session")
def account() -> Iterator[Account]:
    """An account for all tests: its server takes seconds to start."""
    serving_one = Account()
    yield serving_one
    serving_one.stop()


_numbers = itertools.count()


@pytest.fixture
def container(account: Account, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    """Yields a container that the environment's settings lead to."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    name = f"container-{next(_numbers)}"
    account.request("PUT", name)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", account.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
    yield Container(f"az://{name}", account.endpoint)
    penstock.set_remote(f"az://{name}", None)
    account.request("DELETE", name)


@pytest.fixture(params=["bucket", "container"])
def place(request: pytest.FixtureRequest) -> Bucket | Container:
    """Returns a bucket of S3, and for the next test run a container of Azure."""
    found: Bucket | Container = request.getfixturevalue(request.param)
    return found


@contextmanager
def serving(root: Path) -> Iterator[Bucket]:
    """Yields a bucket with its server."""
    bucket = Bucket(root)
    try:
        bucket.start()
        yield bucket
    finally:
        bucket.stop()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Yields a bucket that the environment's settings lead to."""
    with serving(tmp_path / "server") as serving_one:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", serving_one.endpoint)
        # Drops the client of the previous test's server.
        penstock.set_remote(serving_one.url, None)
        yield serving_one
        penstock.set_remote(serving_one.url, None)
