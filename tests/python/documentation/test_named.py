"""Names of Penstock in messages, docstrings and pages are those of something that exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from functools import cache

import click

from conftest import REPOSITORY
from penstock.cli import cli

_PYTHON = [
    *sorted((REPOSITORY / "python" / "penstock").rglob("*.py")),
    *sorted((REPOSITORY / "python" / "penstock_bench").rglob("*.py")),
]
_RUST = [
    *sorted((REPOSITORY / "crates").glob("*/src/**/*.rs")),
    *sorted((REPOSITORY / "python" / "src").rglob("*.rs")),
]
_PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
_ALL = [*_PYTHON, *_RUST, *_PAGES, *sorted((REPOSITORY / "examples").glob("*.py"))]

_NO_NAMES = {
    *("penstock.ckpt", "penstock.prom"),  # Files.
    *("penstock.boxes", "penstock.pickle", "penstock.pickled", "penstock.shared"),  # Keys in files.
    "penstock.cli.name",  # A module by the name of its command.
}
_PROSE = {"is", "loads", "saves"}
"""Words after Penstock as the subject of a sentence."""

_DOTTED = re.compile(r"(?<![\w./-])penstock(?:\.[A-Za-z_]\w*)+")
_CALLED = re.compile(r"(?<![\w./-])(penstock(?:\.[A-Za-z_]\w*)+)\(([^()]*)\)")
_KEYWORD = re.compile(r"(?:^|, *)(\w+)=(?!=)")
_COMMAND = re.compile(r"(?:`|\$ |^)(penstock [a-z][^`\n\\]*)", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_EXTRA = re.compile(r"penstock\[([\w,-]+)\]")


@cache
def text_of(file):
    """The text of a file; of sources with the parts of a message put together."""
    text = file.read_text()
    if file.suffix == ".py":
        text = re.sub(r"\"\s*\n\s*f?\"", "", text)
    return re.sub(r"\\\n\s*", "", text) if file.suffix == ".rs" else text


@cache
def named(name):
    """The object of a dotted name; None where there is none."""
    if name.startswith("penstock.integrations."):
        return defined(name)
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            fields = getattr(found, "__annotations__", {})
            found = getattr(found, part, part if part in fields else None)
        return found
    return None


def defined(name):
    """The file or statement that defines a name of a plug-in, whose import takes a minute."""
    place, *rest = REPOSITORY / "python" / "penstock", *name.split(".")[1:]
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if rest and (place / f"{rest[0]}.py").exists():
        place /= f"{rest.pop(0)}.py"
    elif rest or not (place / "__init__.py").exists():
        place /= "__init__.py"
    found = place if not rest else ast.parse(place.read_text())
    for part in rest:
        found = next((one for one in ast.iter_child_nodes(found) if part in binds(one)), None)
        if found is None:
            return None
    return found


def binds(statement):
    """The names that a statement gives a meaning."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(one.asname or one.name).partition(".")[0] for one in statement.names}
    targets = getattr(statement, "targets", [getattr(statement, "target", statement)])
    return {getattr(one, "id", getattr(one, "name", None)) for one in targets}


def test_dotted_names_are_there():
    unknown = {
        f"{file.relative_to(REPOSITORY)}: {name}"
        for file in _ALL
        for name in set(_DOTTED.findall(text_of(file))) - _NO_NAMES
        if named(name) is None
    }
    assert unknown == set()


def test_arguments_of_calls_are_there():
    unknown = set()
    for file in _ALL:
        for name, arguments in _CALLED.findall(text_of(file)):
            found = None if name in _NO_NAMES else named(name)
            # Those of plug-ins are not imported.
            if not callable(found):
                continue
            try:
                parameters = inspect.signature(found).parameters
            except ValueError:
                continue
            if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                continue
            wrong = set(_KEYWORD.findall(arguments)) - set(parameters)
            unknown |= {f"{file.relative_to(REPOSITORY)}: {name}({one}=)" for one in wrong}
    assert unknown == set()


def command_of(words):
    """The command that the first words of a line name; None where there is none."""
    found: click.Command | None = cli
    for word in words:
        if not isinstance(found, click.Group):
            break
        found = found.get_command(click.Context(found), word)
    return found


def test_commands_and_their_options_are_there():
    unknown = set()
    for file in _ALL:
        for line in _COMMAND.findall(text_of(file)):
            # Other programs come behind these.
            own = re.split(r" -- | [|&;>#]|\"|' ", line)[0]
            words = [word for word in own.split()[1:] if not word.startswith("-")]
            found = command_of(words)
            if found is None:
                if words[0] not in _PROSE:
                    unknown.add(f"{file.relative_to(REPOSITORY)}: {line}")
                continue
            options = {"--help", "--version"}
            for parameter in found.params:
                options.update(parameter.opts, parameter.secondary_opts)
            wrong = set(_OPTION.findall(own)) - options
            unknown |= {f"{file.relative_to(REPOSITORY)}: {line}: {one}" for one in wrong}
    assert unknown == set()


def test_extras_are_there():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    found = {
        extra
        for file in _ALL
        for names in _EXTRA.findall(text_of(file))
        for extra in names.split(",")
    }
    assert found
    assert found <= set(project["optional-dependencies"])
