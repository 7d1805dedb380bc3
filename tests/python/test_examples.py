"""The examples in the documentation of the package run, and print what they say they print."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import penstock

MODULES = [module.name for module in pkgutil.iter_modules(penstock.__path__, "penstock.")]


@pytest.mark.parametrize("name", [name for name in MODULES if name != "penstock.__main__"])
def test_the_examples_of_a_module_hold(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(importlib.import_module(name), optionflags=options)
    assert results.failed == 0


def test_there_are_examples():
    found = [doctest.DocTestFinder().find(importlib.import_module(name)) for name in MODULES[1:]]
    assert sum(bool(test.examples) for tests in found for test in tests) >= 10
