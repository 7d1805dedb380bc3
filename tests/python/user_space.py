"""File systems in user space, each with a server of ours, mounted for one test."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOUNTED_SECONDS_MAX = 20
_UNMOUNTED_SECONDS_MAX = 10


@contextmanager
def user_space(
    path: Path, script: str, *arguments: str
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Mounts what a script beside this one serves of a directory; skips where there is no FUSE.

    Args:
        path: An empty directory: the files are in `behind`, and seen in `fuse`.
        script: Its name.
        arguments: Of it, behind the directory and the mount point.

    Yields:
        Where it is mounted, and the server with its standard input and output.
    """
    pytest.importorskip("mfusepy", exc_type=ImportError, reason="no mfusepy: `make places`")
    behind, point = path / "behind", path / "fuse"
    behind.mkdir()
    point.mkdir()
    command: list[str | Path] = [sys.executable, Path(__file__).with_name(script), behind, point]
    command += arguments
    with open(path / "said", "w+") as said:
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        )
        try:
            _await(point, server, said)
            yield point, server
        finally:
            try:
                _unmount(point)
            finally:
                # It has ended by itself, unless something is wrong with it.
                server.kill()
                server.communicate()


def _await(point: Path, server: subprocess.Popen[str], said: IO[str]) -> None:
    deadline = time.monotonic() + _MOUNTED_SECONDS_MAX
    while not os.path.ismount(point):
        if server.poll() is not None or time.monotonic() > deadline:
            said.seek(0)
            pytest.skip(f"no FUSE here (`make places`): {said.read()[-300:]}")
        time.sleep(0.01)


def _unmount(point: Path) -> None:
    """Unmounts, when nobody has a file there any more; what is still held fails the test."""
    if not os.path.ismount(point):
        return
    gc.collect()
    deadline = time.monotonic() + _UNMOUNTED_SECONDS_MAX
    while True:
        # A ring that was closed may hold on to its files for a moment.
        done = subprocess.run(["umount", point], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if time.monotonic() > deadline:
            subprocess.run(["umount", "--lazy", point], check=True)
            raise AssertionError(done.stderr)
        time.sleep(0.01)
