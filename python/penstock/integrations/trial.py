"""A place and unchanged random states for the trial of a plug-in; see `versions.self_check`."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import TYPE_CHECKING

import torch.distributed as dist

from penstock import Training
from penstock.integrations.first_rank import from_first

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def trial_directory(root: str) -> Iterator[str]:
    """A directory that all ranks share while they try out a save; nothing of it stays.

    Random numbers that are drawn meanwhile are given back. All ranks call it.

    Args:
        root: The directory below which it is made, which all ranks see.
    """
    generators = Training()
    before = generators.state_dict()

    def make() -> str:
        os.makedirs(root, exist_ok=True)
        return tempfile.mkdtemp(prefix=".penstock-trial-", dir=root)

    directory = from_first(make)
    is_shared = dist.is_available() and dist.is_initialized()
    try:
        yield directory
        if is_shared:
            # The others may read there still.
            dist.barrier()
    finally:
        generators.load_state_dict(before)
        if not is_shared or dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
