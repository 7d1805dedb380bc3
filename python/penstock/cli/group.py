"""`LazyGroup`: groups of commands whose modules are imported when they are run."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import click

from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """Lists its commands without importing them, and imports the one that is run.

    The command ``name`` is the function of that name in the module of that name, both with the
    prefix and with underscores, and with one more at the end if ``name`` is a keyword.

    Args:
        arguments: Arguments of `click.Group`.
        helps: The first sentence of each command's help, by its name.
        package: The package of the modules.
        prefix: Prefix of the names of modules and functions.
        apart: Commands of another distribution, by name: the package that has the command under its
            own name, and the extra that installs it.
        options: Options of `click.Group`.
    """

    def __init__(
        self,
        *arguments: Any,
        helps: Mapping[str, str],
        package: str = "penstock.cli",
        prefix: str = "",
        apart: Mapping[str, tuple[str, str]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._helps = helps
        self._package = package
        self._prefix = prefix
        self._apart = apart or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, sorted."""
        return sorted(self._helps)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns the command of a name; None for unknown names."""
        if cmd_name not in self._helps:
            return None
        if cmd_name in self._apart:
            return _of_another_distribution(cmd_name, *self._apart[cmd_name])
        name = f"{self._prefix}{cmd_name}".replace("-", "_")
        name += "_" if iskeyword(name) else ""
        command: click.Command = getattr(import_module(f"{self._package}.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list with whole sentences, which click would shorten."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._helps.items()))


def _of_another_distribution(name: str, package: str, extra: str) -> click.Command:
    try:
        command: click.Command = getattr(import_module(package), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
            raise
        raise MissingDependencyError(
            f"`penstock {name}` is not installed: pip install 'penstock[{extra}]'",
            name=package.partition(".")[0],
        ) from error
    return command
