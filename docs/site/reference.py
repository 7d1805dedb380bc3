"""Pages of the reference: the API from docstrings, the command line from its help."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import click

import penstock
from penstock.cli import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPICS = {
    "Saving and loading": ["save", "load", "Saver", "Options", "PerRank", "register_type", "guard"],
    "Stores": ["CheckpointStore", "Mirror", "PendingSave"],
    "Training": ["Training", "on_signal", "Preemption"],
    "Models": ["export", "import_model", "convert"],
    "Looking and checking": ["inspect", "verify", "explain", "salvage", "trace"],
    "Sealing": ["Sealing"],
    "Buckets": ["Remote", "set_remote", "Credentials", "Token"],
    "Errors": ["PenstockError"],
}
"""Public names of `penstock` by their purpose. The errors and the modules have their own pages."""

PACKAGE = Path(penstock.__file__).parent

MODULES = ("reports", "offload", "features", "metrics", "sealing", "signing", "plugin")
"""Public modules, each of which has a page."""


def api() -> Iterator[tuple[str, str, str]]:
    """The title, the place and the text of each page of the API."""
    for title, names in TOPICS.items():
        place = title.lower().replace(" ", "-")
        paths = [f"penstock.{name}" for name in names]
        if title == "Errors":
            # The one above all others comes first.
            paths += [f"penstock.errors.{name}" for name in public("errors") if name not in names]
        yield title, f"reference/{place}.md", page(title, paths)
    named = {name for names in TOPICS.values() for name in names}
    # Names without a topic are listed all the same.
    rest = set(penstock.__all__) - named - {*MODULES, "errors", "__version__"}
    if further := [f"penstock.{name}" for name in sorted(rest)]:
        yield "Further", "reference/further.md", page("Further", further)
    for name in [*MODULES, *plug_ins()]:
        text = page(f"penstock.{name}", [f"penstock.{name}.{member}" for member in public(name)])
        yield name, f"reference/{name}.md", text


def plug_ins() -> list[str]:
    """Modules below `penstock.integrations` that define `__all__`."""
    found = (PACKAGE / "integrations").rglob("*.py")
    modules = {path.parent if path.stem == "__init__" else path.with_suffix("") for path in found}
    names = (".".join(module.relative_to(PACKAGE).parts) for module in modules)
    return sorted(filter(public, names))


def public(module: str) -> list[str]:
    """Returns the `__all__` of a module; empty if it has none, as modules for plug-ins alone.

    The module is parsed and not imported, since it may need its framework.
    """
    path = PACKAGE.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(source.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
    return []


def page(title: str, paths: list[str]) -> str:
    """Returns a page that documents some objects."""
    return f"# {title}\n\n" + "".join(f"::: {path}\n\n" for path in paths)


def command_line() -> str:
    """Returns a page with the help of every command."""
    with click.Context(cli, info_name="penstock", **cli.context_settings) as context:
        commands = list(helps(cli, context))
    first, *rest = commands
    parts = [
        "# Command line\n\nWhat `penstock` and each of its commands say with `--help`. "
        f"`--json` prints results for programs.\n\n```text\n{first[1]}\n```\n"
    ]
    parts += [f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in rest]
    return "".join(parts)


def helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yields the name and the help of a command, then of its subcommands."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            with click.Context(
                below, info_name=name, parent=context, max_content_width=88
            ) as inner:
                yield from helps(below, inner)
