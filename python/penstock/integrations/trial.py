"""A directory and unchanged random states for a plug-in's trial; see `versions.self_check`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from penstock import Training
from penstock.errors import RankError
from penstock.integrations.first_rank import from_first

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = ".penstock-trial-"


@contextlib.contextmanager
def trial_directory(root: str) -> Iterator[str]:
    """A directory that all ranks share while they try out a save; removed afterwards.

    Random states are restored afterwards. All ranks call it. The next trial below the same
    directory removes the leftovers of one that was killed.
    """
    generators = Training()
    before = generators.state_dict()
    with contextlib.ExitStack() as place:
        directory = from_first(lambda: place.enter_context(_made(root)))
        try:
            yield directory
        except Exception as error:
            _agree(error)
            raise
        finally:
            generators.load_state_dict(before)
        # Other ranks may read the directory until they answer.
        _agree(None)


def _agree(error: Exception | None) -> None:
    """Waits until the trial has ended on all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, None if error is None else f"{type(error).__name__}: {error}")
    failed = next((rank for rank, verdict in enumerate(verdicts) if verdict is not None), None)
    if error is None and failed is not None:
        raise RankError(f"the trial failed on rank {failed}: {verdicts[failed]}", rank=failed)


@contextlib.contextmanager
def _made(root: str) -> Iterator[str]:
    """Makes a directory, with a lock that shows that its owner lives."""
    os.makedirs(root, exist_ok=True)
    _sweep(root)
    directory = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
    try:
        with _opened(directory) as fd:
            # On file systems without such locks nobody sweeps.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(root: str) -> None:
    """Removes the directories of trials whose owner is dead."""
    for name in os.listdir(root):
        if name.startswith(_PREFIX):
            path = os.path.join(root, name)
            # Skips those whose owner lives, or may live.
            with contextlib.suppress(OSError), _opened(path) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
