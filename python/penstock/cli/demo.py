"""`penstock demo`: shows that a training run survives a kill in the middle of a save."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

import penstock
from penstock.cli import endings
from penstock.cli.examples import example
from penstock.cli.units import Finite
from penstock.common.console import PATH, console

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.command(epilog=example("penstock demo --seconds 30"))
@click.option(
    "--directory",
    type=PATH,
    help="Where to work: a new or empty directory. [default: a new one here]",
)
@click.option(
    "--seconds",
    type=Finite(min=1),
    default=60,
    show_default=True,
    help="About how long to take.",
)
@click.option(
    "--steps", type=click.IntRange(min=6), help="Training steps, instead of as many as fit."
)
@click.option("--keep", is_flag=True, help="Keep the store for a closer look.")
def demo(directory: Path | None, seconds: float, steps: int | None, keep: bool) -> int:
    """Train, kill a save in the middle, resume bit for bit.

    Trains a small transformer on text that ships with Python, needs some 200 MB of disk, and
    removes what it made. Exits with 1 if anything it claims does not hold.
    """
    if importlib.util.find_spec("torch") is None:
        raise penstock.errors.MissingDependencyError(
            "penstock demo trains with PyTorch, which is not installed: "
            "pip install 'penstock[torch]'",
            name="torch",
        )
    # Imported here, as only this command needs rich and the demo's modules.
    from penstock.demo.narrator import ClaimError
    from penstock.demo.run import RunError
    from penstock.demo.story import Story

    # If ended from outside, it cleans up as after Ctrl-C: training process and directory.
    with endings.tidy(), _workplace(directory, keep) as place:
        try:
            Story(place, seconds, steps).run()
        except ClaimError as error:
            hint = "" if keep else "; --keep leaves the store for a closer look"
            raise click.ClickException(f"this does not hold: {error}{hint}") from error
        except RunError as error:
            raise click.ClickException(str(error)) from error
    return 0


@contextmanager
def _workplace(directory: Path | None, keep: bool) -> Iterator[Path]:
    """A directory to work in; afterwards, everything made there is removed."""
    place, is_new = _make(directory)
    try:
        yield place
    finally:
        if keep:
            console().print(f"\nKept: {place} (try penstock ls {place / 'store'})")
        elif is_new:
            shutil.rmtree(place, ignore_errors=True)
        else:
            for entry in place.iterdir():
                shutil.rmtree(entry, ignore_errors=True)


def _make(directory: Path | None) -> tuple[Path, bool]:
    """The directory, and whether it is new.

    The default is not the system's temporary directory: that may be memory, and the demo is about
    disks.
    """
    if directory is None:
        here = Path() if os.access(Path(), os.W_OK) else Path(tempfile.gettempdir())
        return Path(tempfile.mkdtemp(prefix="penstock-demo-", dir=here)), True
    try:
        directory.mkdir()
    except FileExistsError:
        if not directory.is_dir() or any(directory.iterdir()):
            message = f"{directory} exists and is no empty directory"
            raise click.BadParameter(message, param_hint="--directory") from None
        return directory, False
    return directory, True
