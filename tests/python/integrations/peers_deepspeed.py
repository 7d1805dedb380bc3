"""DeepSpeed on Penstock's ops, for `make peers-deepspeed`: ZeRO-Infinity, and failing storage."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import mounted

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
OURS = (str(Path(sys.executable).with_name("penstock")), "deepspeed", "--", sys.executable)
THEIRS = (sys.executable,)
MIB = 1 << 20
_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN, from the kernel's headers."""


def _train(directory: Path, device: str) -> dict[str, Any]:
    done = subprocess.run(
        [*OURS, HERE / "zero_infinity.py", directory, device],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_training_from_storage_is_training_from_memory(tmp_path: Path) -> None:
    """Each loss has the same bits.

    docs/deepspeed.md compares those after a resume from storage: they differ from the first ones
    with DeepSpeed's own ops as well.
    """
    (tmp_path / "nvme").mkdir()
    (tmp_path / "cpu").mkdir()
    stored, held = _train(tmp_path / "nvme", "nvme"), _train(tmp_path / "cpu", "cpu")
    assert stored["losses"] == held["losses"]
    assert len(set(stored["losses"])) == 4
    assert held["resumed"] == held["losses"][2:]
    assert stored["swapped_bytes"] > 64 << 20
    assert held["swapped_bytes"] == 0


def _file(directory: Path) -> Path:
    path = directory / "tensor"
    path.write_bytes(b"\x07" * MIB)
    os.sync()
    return path


@contextmanager
def _plain(directory: Path) -> Iterator[Path]:
    yield _file(directory)


@contextmanager
def _unreadable(directory: Path) -> Iterator[Path]:
    """Yields a file on btrfs with one page that does not match its checksum."""
    with mounted("btrfs", directory / "disk", 256 * MIB) as disk:
        _file(disk)
    image = (directory / "disk").with_suffix(".img")
    content = image.read_bytes()
    with image.open("r+b") as file:
        file.seek(content.index(b"\x07" * MIB) + MIB // 2)
        file.write(b"\x08")
    subprocess.run(["mount", "-o", "loop", image, directory / "disk"], check=True)
    try:
        yield directory / "disk" / "tensor"
    finally:
        subprocess.run(["umount", directory / "disk"], check=True)


@contextmanager
def _gone(directory: Path) -> Iterator[Path]:
    """Yields a file on a file system that has been shut down, as if its disk had vanished."""
    with mounted("ext4", directory / "disk", 64 * MIB) as disk:
        path = _file(disk)
        fd = os.open(disk, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", 2))
        finally:
            os.close(fd)
        yield path


@contextmanager
def _full(directory: Path) -> Iterator[Path]:
    with mounted("ext4", directory / "disk", 16 * MIB) as disk:
        yield disk / "tensor"


def _limit() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 4096, MIB + 4096))


@pytest.mark.parametrize(
    ("fault", "storage", "ours"),
    [
        ("a page that cannot be read", _unreadable, "raised TransferError"),
        ("a disk that is gone", _gone, "raised StorageError"),
        ("a disk that is full", _full, "raised StorageError"),
        ("a limit of the file's size", _plain, "raised StorageError"),
        ("an offset off the blocks, read", _plain, "right"),
        ("an offset off the blocks, written", _plain, "right"),
        ("a size off the blocks", _plain, "right"),
        ("a file that ends before", _plain, "raised TransferError"),
        ("nothing under way", _plain, "raised PenstockError"),
    ],
)
def test_what_fails_raises(
    tmp_path: Path, record_property: Any, fault: str, storage: Any, ours: str
) -> None:
    """Also prints the outcome of DeepSpeed's own op, if it can be compiled."""
    outcomes = []
    for command, name in ((OURS, "ours"), (THEIRS, "theirs")):
        directory = tmp_path / name
        directory.mkdir()
        with storage(directory) as path:
            done = subprocess.run(
                [*command, HERE / "faults.py", fault, path],
                capture_output=True,
                text=True,
                preexec_fn=_limit if "limit" in fault else None,
            )
        aborted = f"ended with code {done.returncode}: {done.stderr[-300:]}"
        outcomes.append(done.stdout.splitlines()[-1] if done.returncode == 0 else aborted)
    record_property("theirs", outcomes[1])
    sys.stdout.write(f"{fault}: ours: {outcomes[0]}; theirs: {outcomes[1]}\n")
    assert outcomes[0] == ours
