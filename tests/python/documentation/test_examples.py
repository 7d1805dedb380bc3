"""The examples in the package's docstrings run, and print the documented output."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
TOPMOST = {f"penstock.{module.name}" for module in pkgutil.iter_modules(penstock.__path__)}
# By their text: importing a package does not import all modules below it.
WITH_EXAMPLES = {
    ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if "    >>> " in (text := path.read_text()) or "\n>>> " in text
}
MODULES = sorted((TOPMOST | WITH_EXAMPLES) - {"penstock.__main__"})


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(importlib.import_module(name), optionflags=options)
    assert results.failed == 0


def test_there_are_examples():
    found = {
        name
        for name in WITH_EXAMPLES
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
        if test.examples
    }
    assert found == WITH_EXAMPLES
    assert len(found) >= 10
