"""Penstock's names in messages, docstrings and pages exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from functools import cache

import click

import penstock
from conftest import REPOSITORY
from penstock.cli import cli

_PACKAGE = sorted((REPOSITORY / "python" / "penstock").rglob("*.py"))
_PYTHON = [*_PACKAGE, *sorted((REPOSITORY / "python" / "penstock_bench").rglob("*.py"))]
_RUST = [
    *sorted((REPOSITORY / "crates").glob("*/src/**/*.rs")),
    *sorted((REPOSITORY / "python" / "src").rglob("*.rs")),
]
_PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
_ALL = [*_PYTHON, *_RUST, *_PAGES, *sorted((REPOSITORY / "examples").glob("*.py"))]

_NO_NAMES = {
    *("penstock.ckpt", "penstock.prom"),  # Files
    *("penstock.boxes", "penstock.pickle", "penstock.pickled", "penstock.shared"),  # Keys in files
    *("penstock.sealed", "penstock.v1.manifest", "penstock.v1.metadata"),  # Labels in files
    *("penstock.v1.part", "penstock.v1.shard", "penstock.v1.file", "penstock.v1.blocks"),
    "penstock.v1.chunks",
    "penstock.cli.name",  # A module with its command's name
}
_PROSE = {"is", "loads", "saves"}
"""Words after "Penstock" as the subject of a sentence."""

_DOTTED = re.compile(r"(?<![\w./-])penstock(?:\.[A-Za-z_]\w*)+")
_CALLED = re.compile(r"(?<![\w./-])(penstock(?:\.[A-Za-z_]\w*)+)\(([^()]*)\)")
_KEYWORD = re.compile(r"(?:^|, *)(\w+)=(?!=)")
_COMMAND = re.compile(r"(?:`|\$ |^)(penstock [a-z][^`\n\\]*)", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_EXTRA = re.compile(r"penstock\[([\w,-]+)\]")
_METHOD = re.compile(r"(?<![\w./])(\w+)(?:\([^()]*\))?\.([a-z]\w*)\b(?:\(([^()]*)\))?")
_VARIABLE = re.compile(r"(?<!\w)PENSTOCK_[A-Z][A-Z_]*[A-Z](?![\w*…])")
_ARGUMENT = re.compile(r"(?<![\w{?&])([a-z_]{2,})=(?![=])")

_OBJECTS = {
    "CheckpointStore": penstock.CheckpointStore,
    "Saver": penstock.Saver,
    "TensorIO": penstock.offload.TensorIO,
    "Training": penstock.Training,
    "pending": penstock.PendingSave,
    "store": penstock.CheckpointStore,
    "training": penstock.Training,
}
"""The class behind a name by which messages call a method."""

_ARGUMENTS_OF_OTHERS = {
    *("check_invariants", "enable_plan_caching", "pickle_protocol", "use_collectives"),  # PyTorch.
    *("batch_sampler", "num_workers", "sampler"),  # Its loaders.
    *("ckpt_path", "log_model_checkpoints", "plugins", "save_last", "strategy"),  # Lightning.
    *("experts_implementation", "resume_from_checkpoint", "save_only_model"),  # transformers.
    *("push_to_hub", "save_strategy"),  # transformers.
    *("format",),  # Slurm's sacct.
    *("save_on_each_node", "use_seedable_sampler"),  # Accelerate.
    *("exclude_from_loading",),  # torchtitan.
    *("storage_path",),  # Ray.
    *(
        "core_pattern",
        "iommu",
        "io_uring_disabled",
        "memlock",
        "seccomp",
    ),  # The kernel and its containers.
    *("rbps", "riops", "wbps", "wiops"),  # The limits of a control group.
}


@cache
def text_of(file):
    """Returns the text of a file; for sources with split messages joined."""
    text = file.read_text()
    if file.suffix == ".py":
        text = re.sub(r"\"\s*\n\s*f?\"", "", text)
    return re.sub(r"\\\n\s*", "", text) if file.suffix == ".rs" else text


@cache
def named(name):
    """Returns the object of a dotted name; None if there is none."""
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


def statements(node):
    """Yields the statements of a module or class, also those for type checkers alone."""
    for one in ast.iter_child_nodes(node):
        yield from ast.iter_child_nodes(one) if isinstance(one, ast.If) else (one,)


def defined(name):
    """Returns the definition of a plug-in's name, whose import would take a minute."""
    place, *rest = REPOSITORY / "python" / "penstock", *name.split(".")[1:]
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if rest and (place / f"{rest[0]}.py").exists():
        place /= f"{rest.pop(0)}.py"
    elif rest or not (place / "__init__.py").exists():
        place /= "__init__.py"
    found = place if not rest else ast.parse(place.read_text())
    for part in rest:
        found = next((one for one in statements(found) if part in binds(one)), None)
        if found is None:
            return None
    return found


def binds(statement):
    """Returns the names that a statement binds."""
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
            # Plug-ins are not imported.
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
    """Returns the command that a line begins with; None if there is none."""
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
            # Other programs follow these.
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


def messages(file):
    """The texts with spaces in the code of a module: what users read, and no docstrings."""
    tree = ast.parse(file.read_text())
    expressions = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    whole = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    left_out = {*expressions, *(part for node in whole for part in node.values)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(part, "value", "") for part in node.values]
            text = "".join(part if isinstance(part, str) else "{}" for part in parts)
        elif isinstance(node, ast.Constant) and node not in left_out:
            text = node.value
        else:
            continue
        if isinstance(text, str) and " " in text:
            yield text


def accepts(function, keyword):
    """Whether a function takes a keyword, by its name or with all others."""
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def test_methods_in_messages_are_there():
    found, unknown = set(), set()
    for file in _PACKAGE:
        for text in messages(file):
            for name, method, arguments in _METHOD.findall(text):
                owner = _OBJECTS.get(name)
                if owner is None:
                    continue
                function, call = getattr(owner, method, None), f"{name}.{method}({arguments})"
                keywords = _KEYWORD.findall(arguments)
                found.add(f"{name}.{method}")
                if function is None or not all(accepts(function, one) for one in keywords):
                    unknown.add(f"{file.relative_to(REPOSITORY)}: {call}")
    assert {"store.resume", "store.load", "CheckpointStore.sweep", "pending.stage"} <= found
    assert unknown == set()


def test_arguments_in_messages_are_there():
    """Each is an argument or a field of something; a message does not always say of which."""
    known = set(_ARGUMENTS_OF_OTHERS)
    for file in _PACKAGE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.arguments):
                known |= {one.arg for one in (*node.posonlyargs, *node.args, *node.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                known |= {one.id for one in fields}
    used = {
        name: file.relative_to(REPOSITORY)
        for file in _PACKAGE
        for text in messages(file)
        for name in _ARGUMENT.findall(text)
    }
    assert {"into", "keys", "no_dist", "allow_partial"} <= set(used)
    assert {name: file for name, file in used.items() if name not in known} == {}
    assert set(used) >= _ARGUMENTS_OF_OTHERS


def test_variables_are_read():
    sources = "".join(map(text_of, [*_PACKAGE, *_RUST]))
    read = set(re.findall(r"\"(PENSTOCK_[A-Z_]+)\"", sources))
    unknown = {
        f"{file.relative_to(REPOSITORY)}: {name}"
        for file in [*_PACKAGE, *_RUST, *_PAGES]
        for name in set(_VARIABLE.findall(text_of(file))) - read
        if "_TORTURE_" not in name and name != "PENSTOCK_OK"  # Of tests; of C.
    }
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
