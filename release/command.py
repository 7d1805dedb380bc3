"""Commands that build a release."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class ReleaseError(Exception):
    """A release is not possible; the message gives the reason and the remedy."""


def run(
    *command: str | Path, within: Path | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Runs a command, whose output is shown.

    Raises:
        ReleaseError: The command failed.
    """
    done = subprocess.run(command, cwd=within, env=environment, check=False)
    if done.returncode:
        raise ReleaseError(f"{command_line(*command)}: ended with code {done.returncode}")


def output(*command: str | Path) -> str:
    """Returns the output of a command.

    Raises:
        ReleaseError: The command failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{command_line(*command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def python(*arguments: str | Path) -> tuple[str | Path, ...]:
    """Returns the command that runs a module in this environment."""
    return (sys.executable, "-m", *arguments)


def command_line(*command: str | Path) -> str:
    """Returns a command as one types it, without the directory of its program."""
    first, *others = map(str, command)
    return " ".join((first.rpartition("/")[2], *others))
