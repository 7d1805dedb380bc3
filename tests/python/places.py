"""File systems on which users keep checkpoints, each mounted for one test."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from user_space import user_space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Place(NamedTuple):
    """A directory on a file system.

    Attributes:
        path: Mount point.
        locks: Whether all users of its directories see locks on them.
        links: Whether it makes hard links.
        renames_new: Whether it renames without replacing.
    """

    path: Path
    locks: bool = True
    links: bool = True
    renames_new: bool = True


def _run(*command: object) -> None:
    """Runs a command; skips the test with the command's output if it fails."""
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"{error}: `make places` installs it")
    if done.returncode:
        pytest.skip(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


@contextmanager
def _mounted(point: Path, *command: object) -> Iterator[None]:
    point.mkdir()
    _run("mount", *command, point)
    try:
        yield
    finally:
        subprocess.run(["umount", point], check=True)


@contextmanager
def _disk(path: Path, kind: str, mib: int) -> Iterator[Place]:
    image, point = path / "image", path / "disk"
    with open(image, "wb") as file:
        file.truncate(mib << 20)
    _run(f"mkfs.{kind}", "-q", image)
    with _mounted(point, "-o", "loop", image):
        yield Place(point)


@contextmanager
def _overlay(
    path: Path, before: Callable[[Path], object], *, is_read_only: bool
) -> Iterator[Place]:
    """Mounts an overlay whose lower layer has files already, like an image."""
    layers = [path / name for name in ("lower", "upper", "work")]
    for layer in layers:
        layer.mkdir()
    lower, upper, work = layers
    before(lower)
    point = path / "merged"
    # Docker's options: a directory of a lower layer cannot be renamed.
    options = f"upperdir={upper},workdir={work},redirect_dir=off"
    if not is_read_only:
        with _mounted(point, "-t", "overlay", "-o", f"lowerdir={lower},{options}", "overlay"):
            yield Place(point)
        return
    fixed = path / "fixed"
    with _mounted(fixed, "--bind", "-o", "ro", lower):
        _run("mount", "-o", "remount,bind,ro", fixed)
        with _mounted(point, "-t", "overlay", "-o", f"lowerdir={fixed},{options}", "overlay"):
            yield Place(point)


@contextmanager
def _linkless(path: Path, answer: str, *, renames_new: bool) -> Iterator[Place]:
    names = "free" if renames_new else "replacing"
    with user_space(path, "linkless.py", answer, names) as (point, _):
        yield Place(point, locks=False, links=False, renames_new=renames_new)


LINKLESS = {
    "fuse EPERM": ("EPERM", True),
    "fuse ENOTSUP": ("ENOTSUP", True),
    "fuse ENOSYS": ("ENOSYS", True),
    "fuse as gcsfuse": ("ENOSYS", False),
}

KINDS = ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "overlay on read-only", *LINKLESS)


@contextmanager
def place(kind: str, path: Path, before: Callable[[Path], object]) -> Iterator[Place]:
    """Mounts a file system.

    Args:
        kind: One of `KINDS`.
        path: An empty directory for images and mount points.
        before: Fills a given directory, whose content is in the file system from the beginning; in
            overlays in a lower layer.
    """
    if os.geteuid() != 0:
        pytest.skip("takes root: mounts")
    if kind.startswith("overlay"):
        with _overlay(path, before, is_read_only=kind != "overlay") as found:
            yield found
        return
    if kind in LINKLESS:
        answer, renames_new = LINKLESS[kind]
        made = _linkless(path, answer, renames_new=renames_new)
    elif kind == "tmpfs":
        made = _tmpfs(path)
    else:
        made = _disk(path, kind, {"xfs": 320, "btrfs": 256}.get(kind, 128))
    with made as found:
        before(found.path)
        yield found


@contextmanager
def _tmpfs(path: Path) -> Iterator[Place]:
    with _mounted(path / "memory", "-t", "tmpfs", "tmpfs"):
        yield Place(path / "memory")
