"""The package's public names and layers, and the cost of importing it."""

import ast
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock

pytestmark = pytest.mark.quick

PACKAGE = Path(penstock.__file__).parent
CONTRACTS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]
REFUSED = [
    # The native module is not Python, so no contract can name it.
    "penstock._native",
    *(name for one in CONTRACTS if one["type"] == "forbidden" for name in one["forbidden_modules"]),
]
"""Modules that plug-ins may not import."""


def imported(source, module):
    """Returns the names that a file imports from each module of a package, functions included."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(module):
            home = node.module.removeprefix(module).removeprefix(".")
            found.setdefault(home, set()).update(alias.name for alias in node.names)
    return found


def test_type_checkers_see_the_names_that_there_are():
    source = inspect.getsource(penstock)
    found = imported(source, "penstock")
    for home in ("", "common.native_threads"):
        found.pop(home)
    assert found.pop("errors") == {"PenstockError"}
    assert found == {home: set(names) for home, names in penstock._HOMES.items()}


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(penstock) == sorted(penstock.__all__)
    assert len(set(penstock.__all__)) == len(penstock.__all__)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


def test_the_top_of_the_package_stays_small():
    assert len(penstock.__all__) <= 40


def test_reports_and_errors_have_their_own_modules():
    for module in (penstock.errors, penstock.reports):
        assert all(getattr(module, name) is not None for name in module.__all__)
        assert set(module.__all__) & set(penstock.__all__) <= {"PenstockError"}
    assert not [name for name in penstock.__all__ if name.endswith("Report")]


def test_every_error_is_public():
    errors = penstock.errors
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception | Warning)
    }
    assert kinds == set(errors.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(penstock, "no_such_name")


def test_the_package_is_imported_without_what_it_does_not_need_yet():
    code = "import sys, penstock; print({'numpy', 'torch', 'penstock._native'} & {*sys.modules})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("set()\n", "")


def modules_used(source):
    """Yields the dotted names of all imports of a file, annotations and functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def refused(source):
    """Returns the imports of a file that plug-ins must not have."""
    found = [name for name in modules_used(source) if name.startswith("penstock.")]
    return [name for name in found if f"{name}.".startswith(tuple(f"{one}." for one in REFUSED))]


def test_plug_ins_use_the_public_api_and_what_is_offered_to_them():
    files = sorted((PACKAGE / "integrations").rglob("*.py"))
    assert len(files) > 5
    for file in files:
        assert refused(file.read_text()) == [], file
    for bad in (
        "from penstock import _native",
        "from penstock._native import Job",
        "import penstock._native",
        "def later():\n    from penstock.checkpoint.ranks.group import find",
    ):
        assert refused(bad), bad
