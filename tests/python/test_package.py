"""What the package shows, and what importing it takes."""

import ast
import inspect
import subprocess
import sys

import penstock


def imported(source, module):
    """What a file imports from modules of the package, by module, functions included."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(module):
            home = node.module.removeprefix(module).removeprefix(".")
            found.setdefault(home, set()).update(alias.name for alias in node.names)
    return found


def test_type_checkers_see_the_names_that_there_are():
    source = inspect.getsource(penstock)
    found = imported(source, "penstock")
    for home in ("", "errors", "native_threads"):
        found.pop(home)
    assert found == {home: set(names) for home, names in penstock._HOMES.items()}


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(penstock) == sorted(penstock.__all__)
    assert len(set(penstock.__all__)) == len(penstock.__all__)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


def test_every_error_is_public():
    errors = penstock.errors
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception | Warning)
    }
    assert kinds == set(errors.__all__)
    assert kinds < set(penstock.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(penstock, "no_such_name")


def test_the_package_is_imported_without_what_it_does_not_need_yet():
    code = "import sys, penstock; print({'numpy', 'torch', 'penstock._native'} & {*sys.modules})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("set()\n", "")
