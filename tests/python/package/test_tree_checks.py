"""Folders and modules over their limits, and sentences that are hard to read, are found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
RULES = """
[entries]
max = 3
exceptions = [{ path = "wide", max = 4, reason = "a test" }]

[lines]
max = 5
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the scripts and a module of each kind."""
    (tmp_path / "scripts").mkdir()
    for name in ("check_tree.py", "check_prose.py"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    (tmp_path / "scripts/tree.toml").write_text(RULES)
    for name in ("wide/a.py", "wide/b.py", "wide/c.rs", "wide/c/d.rs", "wide/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# Bytes read from storage.\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


def listed(checkout: Path, script: str) -> list[str]:
    """Lines that a script prints, of files in `wide` and elsewhere; its own are left out."""
    subprocess.run(["git", "add", "--all"], cwd=checkout, check=True)
    command = [sys.executable, f"scripts/{script}"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == min(len(lines), 1)
    return [line for line in lines if not line.startswith("scripts/")]


def test_a_file_and_the_folder_of_its_name_are_one_entry(checkout: Path) -> None:
    assert listed(checkout, "check_tree.py") == []


def test_a_folder_with_too_many_entries_is_found(checkout: Path) -> None:
    (checkout / "wide/f.py").write_text("")
    assert listed(checkout, "check_tree.py") == ["wide: 5 entries, at most 4"]


def test_an_exception_that_nothing_needs_is_found(checkout: Path) -> None:
    (checkout / "wide/e.py").unlink()
    expected = ["wide: needs no exception in scripts/tree.toml"]
    assert listed(checkout, "check_tree.py") == expected


def test_a_module_with_too_many_lines_is_found(checkout: Path) -> None:
    (checkout / "wide/a.py").write_text("a = 1\n" * 6)
    assert listed(checkout, "check_tree.py") == ["wide/a.py: 6 lines, at most 5"]


def test_unit_tests_of_a_rust_module_are_not_counted(checkout: Path) -> None:
    code, unit_tests = "const A: u8 = 1;\n", "#[cfg(test)]\nmod tests {\n    use super::*;\n}\n"
    (checkout / "wide/c.rs").write_text(code * 5 + unit_tests)
    assert listed(checkout, "check_tree.py") == []
    (checkout / "wide/c.rs").write_text(code * 6 + unit_tests)
    assert listed(checkout, "check_tree.py") == ["wide/c.rs: 6 lines, at most 5"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "# That were asked of storage.\n"),
        ("a.rs", "/// What lies in the file.\n"),
        ("a.md", "A page. Whoever reads it wonders.\n"),
        ("a.py", '"""A row that tells of a part."""\n'),
    ],
)
def test_a_sentence_without_its_noun_is_found(checkout: Path, name: str, text: str) -> None:
    assert listed(checkout, "check_prose.py") == []
    (checkout / name).write_text(text)
    assert [line.split(":")[0] for line in listed(checkout, "check_prose.py")] == [name]


def test_code_is_no_prose(checkout: Path) -> None:
    (checkout / "a.py").write_text('text = "What is read."\n')
    (checkout / "a.rs").write_text('let text = "What is read.";\n')
    assert listed(checkout, "check_prose.py") == []
