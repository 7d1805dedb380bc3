"""The page of versions has the last runs' results; the matrix has the plug-ins' versions."""

import re
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY))
from tests.compat import matrix, table

CALLS = {
    (one[1], one[2], path.relative_to(REPOSITORY))
    for path in (REPOSITORY / "python/penstock/integrations").rglob("*.py")
    for one in re.finditer(r'check_version\("(\w+)", "([\d.]+)", "([\d.]+)"\)', path.read_text())
}


def test_the_page_has_the_table_of_the_results():
    assert table.is_current(), "python -m tests.compat table makes it"


def test_results_are_of_cells_of_the_matrix():
    known = {(cell.suite, cell.asked) for cell in matrix.cells()}
    assert {(one.suite, one.asked) for one in matrix.results()} <= known


def test_every_suite_runs_what_an_unpinned_install_brings():
    asked = {name: set() for name in matrix.suites()}
    for cell in matrix.cells():
        asked[cell.suite].add(cell.asked)
    assert [name for name, found in asked.items() if matrix.NEWEST not in found] == []


@pytest.mark.parametrize(("package", "first"), sorted(one[:2] for one in CALLS))
def test_every_plug_in_is_run_with_the_first_version_that_it_takes(package, first):
    """The oldest cell of its framework is of that minor version."""
    pinned = [
        cell.asked
        for cell in matrix.cells()
        if matrix.suites()[cell.suite]["package"] == package and cell.asked[0].isdigit()
    ]
    assert any(f"{version}.".startswith(f"{first}.") for version in pinned)


def test_the_tests_of_the_matrix_are_there():
    for cell in matrix.cells():
        for one in cell.tests:
            file, _, name = one.partition("::")
            text = Path(REPOSITORY, file).read_text()
            assert f"def {name.split('::')[-1]}(" in text if name else text
