"""Where a benchmark writes what it saves."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def workplace(directory: Path, needed_bytes: float) -> Iterator[Path]:
    """A directory of this run alone, removed with all that is in it.

    Args:
        directory: Where it is made.
        needed_bytes: What has to be free there.

    Raises:
        click.ClickException: It is not.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise click.ClickException(
            f"{directory} has {free / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} are needed: "
            "choose another --directory"
        )
    place = directory / f"run-{os.getpid()}"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
