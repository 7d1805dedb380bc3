"""File systems in user space, each served by a script, mounted for one test."""

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
    """Mounts a script's view of a directory; skips the test without FUSE.

    Args:
        path: An empty directory: the files are in `behind`, and visible in `fuse`.
        script: Name of the script, beside this file.
        arguments: Its arguments after the directory and the mount point.

    Yields:
        The mount point, and the server with its standard input and output.
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
    """Unmounts once no file is open; a file that stays open fails the test."""
    if not os.path.ismount(point):
        return
    gc.collect()
    deadline = time.monotonic() + _UNMOUNTED_SECONDS_MAX
    while True:
        # A closed ring may keep its files open for a moment.
        done = subprocess.run(["umount", point], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if time.monotonic() > deadline:
            subprocess.run(["umount", "--lazy", point], check=True)
            raise AssertionError(done.stderr)
        time.sleep(0.01)
