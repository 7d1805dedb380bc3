"""Commands that a release is made with."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class ReleaseError(Exception):
    """Something cannot be released as it is; the message says what, and what to do."""


def run(
    *command: str | Path, within: Path | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Runs a command, which shows what it does.

    Raises:
        ReleaseError: It failed.
    """
    done = subprocess.run(command, cwd=within, env=environment, check=False)
    if done.returncode:
        raise ReleaseError(f"{command_line(*command)}: ended with code {done.returncode}")


def output(*command: str | Path) -> str:
    """What a command prints.

    Raises:
        ReleaseError: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{command_line(*command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def python(*arguments: str | Path) -> tuple[str | Path, ...]:
    """A module of this environment as a command."""
    return (sys.executable, "-m", *arguments)


def command_line(*command: str | Path) -> str:
    """A command as one types it, without where its program is."""
    first, *others = map(str, command)
    return " ".join((first.rpartition("/")[2], *others))
