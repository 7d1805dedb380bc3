"""`penstock.offload`: invalid arguments raise a named error, and do no harm."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from conftest import mounted
from penstock.errors import StorageError, TransferError, UnsupportedPathError, UnsupportedStateError
from penstock.offload import TensorIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HANG_SECONDS = 120


@pytest.fixture
def io() -> Iterator[TensorIO]:
    with TensorIO() as io:
        yield io


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    return path


@pytest.mark.parametrize("offset", [9_000, 10_000, 1 << 40])
def test_a_file_that_ends_before(io: TensorIO, file: Path, offset: int) -> None:
    with pytest.raises(TransferError, match="the file ends before") as caught:
        io.read(bytearray(2_000), file, offset).result(HANG_SECONDS)
    assert caught.value.path == os.fspath(file)
    assert caught.value.offset >= 9_000
    assert caught.value.errno is not None


def test_what_is_no_file(io: TensorIO, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, error in [
        ("none", FileNotFoundError),
        (".", IsADirectoryError),
        ("fifo", StorageError),
        ("none/file", FileNotFoundError),
    ]:
        for call in (io.read, io.write):
            if call == io.write and name == "none":
                continue
            with pytest.raises(StorageError) as caught:
                call(bytearray(10), tmp_path / name)
            assert caught.value.errno is not None, error
    with pytest.raises(StorageError):
        io.read(bytearray(10), 12345)
    with pytest.raises(StorageError):
        io.read(bytearray(10), -1)
    reading, writing = os.pipe()
    for end in (reading, writing):
        with pytest.raises(StorageError, match="not a regular file"):
            io.read(bytearray(10), end)
        os.close(end)
    with pytest.raises(UnsupportedPathError):
        io.read(bytearray(10), "s3://bucket/key")
    with pytest.raises(TypeError):
        io.read(bytearray(10), None)


def test_offsets(io: TensorIO, file: Path) -> None:
    for offset in (-1, 1 << 63, 1 << 70):
        with pytest.raises(ValueError, match="offset"):
            io.read(bytearray(10), file, offset)
        with pytest.raises(ValueError, match="offset"):
            io.write(bytearray(10), file, offset)
    for offset in (1.0, "1", None, True):
        with pytest.raises(TypeError, match="offset"):
            io.read(bytearray(10), file, offset)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offset"):
        io.read(bytearray(10), file, np.float64(8))  # type: ignore[arg-type]
    # Beyond the largest file of a file system.
    with pytest.raises(StorageError):
        io.write(bytearray(10), file, (1 << 63) - 2).result(HANG_SECONDS)
    assert file.stat().st_size == 10_000


def test_tensors_without_memory_to_read_into(io: TensorIO, file: Path) -> None:
    conjugate = torch.zeros(4, dtype=torch.complex64).conj()
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    refused: list[Any] = [
        torch.zeros(4, device="meta"),
        torch.zeros(4).to_sparse(),
        torch.zeros(1).expand(5),
        conjugate,
        read_only,
        b"bytes",
        np.array([object()]),
        np.lib.stride_tricks.as_strided(np.zeros(4), (4, 4), (8, 8)),
    ]
    freed = torch.zeros(100)
    freed.untyped_storage().resize_(0)
    refused.append(freed)
    for tensor in refused:
        with pytest.raises(UnsupportedStateError):
            io.read(tensor, file)
    for other in (3, None, "text", [1, 2]):
        with pytest.raises(TypeError):
            io.read(other, file)
    # They are valid sources of a write.
    io.write(conjugate, file).result(HANG_SECONDS)
    io.write(torch.zeros(1).expand(5), file).result(HANG_SECONDS)
    io.write(read_only, file).result(HANG_SECONDS)


def test_a_file_without_permission(io: TensorIO, file: Path) -> None:
    with file.open("rb") as opened, pytest.raises(ValueError, match="read only"):
        io.write(b"abc", opened)
    if os.geteuid() != 0:
        file.chmod(0o444)
        with pytest.raises(PermissionError):
            io.write(b"abc", file)
    elif subprocess.run(["chattr", "+i", file], capture_output=True).returncode == 0:
        try:
            with pytest.raises(StorageError):
                io.write(b"abc", file)
        finally:
            subprocess.run(["chattr", "-i", file], check=True)


def test_no_more_descriptors(io: TensorIO, file: Path) -> None:
    """Each error names the requested file and the remedy."""
    opened = io.open(file, "w")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, hard))
    try:
        calls: list[Any] = [lambda: io.read(bytearray(10), file)]
        if opened.is_direct:
            # A write of less than a page goes through the page cache.
            calls.append(lambda: io.write(b"abc", opened, 3))
        for call in calls:
            with pytest.raises(StorageError, match="ulimit -n") as caught:
                call()
            assert caught.value.errno == errno.EMFILE
            assert caught.value.path == os.fspath(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(held[0])


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_device_that_is_full(tmp_path: Path, io: TensorIO, kind: str) -> None:
    with mounted(kind, tmp_path / "disk", 16 << 20) as disk:
        path = disk / "file"
        io.write(b"abc", path).result(HANG_SECONDS)
        assert _number_of_failure(io, path) == errno.ENOSPC
        # Collects the traceback, which refers to the open file.
        gc.collect()
        assert path.read_bytes()[:3] == b"abc"


def _number_of_failure(io: TensorIO, path: Path) -> int | None:
    with pytest.raises(StorageError, match="free space") as caught:
        io.write(np.zeros(32 << 20, np.uint8), path, 3).result(HANG_SECONDS)
    return caught.value.errno


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"extent_bytes": 1000}, ValueError),
        ({"extent_bytes": 4097}, ValueError),
        ({"extent_bytes": 1 << 31}, ValueError),
        ({"queue_depth": 0}, ValueError),
        ({"queue_depth": 5000}, ValueError),
        ({"io_threads": 0}, ValueError),
        ({"io_threads": 1.5}, TypeError),
        ({"staging_bytes": 1}, ValueError),
        ({"staging_bytes": 4 << 20, "extent_bytes": 4 << 20}, ValueError),
        ({"engine": "libaio"}, ValueError),
        ({"direct": True}, TypeError),
        ({"weight": 0}, ValueError),
        ({"weight": 1001}, ValueError),
    ],
    ids=str,
)
def test_settings(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(settings))):
        TensorIO(**settings)


def test_a_closed_one(file: Path) -> None:
    io = TensorIO()
    io.close()
    io.close()
    with pytest.raises(ValueError, match="closed"):
        io.read(bytearray(10), file)
    with pytest.raises(ValueError, match="closed"):
        io.write(bytearray(10), file)


def test_a_time_that_is_no_number(io: TensorIO, file: Path) -> None:
    transfer = io.read(bytearray(10), file)
    for wait in (transfer.result, io.wait):
        with pytest.raises(ValueError, match="timeout"):
            wait(float("nan"))
    assert transfer.result(float("inf")).nbytes == 10


def test_a_mode(io: TensorIO, file: Path) -> None:
    with pytest.raises(ValueError, match="mode"):
        io.open(file, "a")  # type: ignore[arg-type]
