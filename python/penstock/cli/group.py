"""Groups of commands whose modules are imported when one of them is asked for."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """Lists its commands by what is told here, and imports the one that is run.

    The command ``name`` is the one of that name in `penstock.cli.name`, both with the prefix in
    front and with underscores, one at the end where Python has the word for itself.

    Args:
        arguments: Those of a group.
        helps: By the name of each command, the first sentence of its help.
        prefix: What the names of modules and functions begin with.
        options: Those of a group.
    """

    def __init__(
        self, *arguments: Any, helps: Mapping[str, str], prefix: str = "", **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._helps = helps
        self._prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the alphabet."""
        return sorted(self._helps)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, imported; None if there is none."""
        if cmd_name not in self._helps:
            return None
        name = f"{self._prefix}{cmd_name}".replace("-", "_")
        name += "_" if iskeyword(name) else ""
        command: click.Command = getattr(import_module(f"penstock.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list with whole sentences; click would cut the longer ones short."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._helps.items()))
