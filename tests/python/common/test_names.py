"""Names of files and directories are defined in one place of the package."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import _native

PACKAGE = Path(penstock.__file__).parent
SPELLED = re.compile(r"manifest\.json$|verified\.json$|(?:part|shard|step|damaged)-(?:$|\\d|\*|\[)")


def spelled(source):
    """Returns texts of a file that begin like a file name or its pattern, except messages."""
    tree = ast.parse(source)
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [text for text in texts if isinstance(text, str) and SPELLED.match(text)]


def test_the_package_spells_no_name():
    for file in sorted(PACKAGE.rglob("*.py")):
        assert spelled(file.read_text()) == [], file


@pytest.mark.parametrize(
    "bad", ['"manifest.json"', 'f"part-{rank:05}"', 'glob("step-*")', 'compile(r"step-\\d+")']
)
def test_a_name_that_is_spelled_is_found(bad):
    assert spelled(bad), bad


def test_names_are_those_of_the_files(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    report = store.save(3, {"w": np.arange(3)})
    path = Path(report.path)
    assert path.name == _native.step_directory(3)
    assert _native.parse_step(path.name) == 3
    assert _native.parse_step("step-3") is None
    part = _native.part_file(0, report.checkpoint_id)
    names = {file.name for file in path.iterdir()}
    assert {_native.MANIFEST, part} < names
    of_ranks = {name for name in names if _native.rank_of_file(name) == 0}
    assert names - of_ranks == {_native.MANIFEST}
    assert {*filter(_native.is_part_file, names)} == {part}
