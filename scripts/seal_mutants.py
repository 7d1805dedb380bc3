#!/usr/bin/env python3
"""Breaks sealing in one place after the other, and runs its tests: each break has to be noticed.

The breaks stand in seal_mutants.toml. They are made in a worktree of HEAD, which is removed in the
end; what is compiled goes to `target`. Breaks of Python run with the native module as it is built.
Prints each break with the first test that noticed it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "seal_mutants.toml"
NATIVE = Path("python/penstock/_native.abi3.so")
FAILED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. FAILED$", re.MULTILINE)
FAILED_PYTHON = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Tests(NamedTuple):
    """Tests that have to notice a break.

    Attributes:
        is_python: Whether they are files of Python tests; else targets of cargo.
        names: The files, or the targets.
    """

    is_python: bool
    names: list[str]


def main() -> int:
    """Tries the chosen mutants; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="only the mutants whose name contains one of these"
    )
    parser.add_argument(
        "--check", action="store_true", help="only look whether each still fits the files"
    )
    parser.add_argument(
        "--table", type=Path, default=TABLE, help="another table of breaks, with its own command"
    )
    arguments = parser.parse_args()
    chosen = arguments.names
    table = tomllib.loads(arguments.table.read_text())
    mutants = [
        mutant
        for mutant in table["mutants"]
        if not chosen or any(name in mutant["name"] for name in chosen)
    ]
    if arguments.check:
        for mutant in mutants:
            changed(ROOT, mutant)
        return 0
    survivors = []
    with worktree() as tree:
        for tests in unbroken(table, mutants):
            if failed := run(tree, table, tests):
                print(f"the tests fail without a mutant: {failed}", file=sys.stderr)
                return 1
        for mutant in mutants:
            noticed = try_one(tree, mutant, table)
            print(f"{mutant['name']:60} {noticed[0] if noticed else 'SURVIVES'}", flush=True)
            if not noticed:
                survivors.append(mutant["name"])
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} noticed")
    return 1 if survivors else 0


@contextmanager
def worktree() -> Iterator[Path]:
    """Yields a directory with the files of HEAD."""
    place = Path(tempfile.mkdtemp(prefix="penstock-mutants-"))
    tree = place / "tree"
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", tree, "HEAD"], cwd=ROOT, check=True
    )
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        shutil.rmtree(place)


def unbroken(table: dict[str, Any], mutants: list[dict[str, Any]]) -> list[Tests]:
    """Returns the different tests of some mutants."""
    found: list[Tests] = []
    for mutant in mutants:
        tests = tests_of(mutant, table)
        if tests not in found:
            found.append(tests)
    return found


def tests_of(mutant: dict[str, Any], table: dict[str, Any]) -> Tests:
    """Returns the tests that have to notice a mutant."""
    if "tests" in mutant:
        return Tests(is_python=True, names=mutant["tests"])
    return Tests(is_python=False, names=mutant.get("targets", table.get("targets", [])))


def changed(tree: Path, mutant: dict[str, Any]) -> dict[Path, str]:
    """Returns the texts of the files that a mutant changes; ends the program if it fits no more."""
    texts: dict[Path, str] = {}
    for change in mutant["changes"]:
        file = tree / change["file"]
        text = texts.get(file) or file.read_text()
        count = text.count(change["find"])
        if count != change.get("count", 1):
            raise SystemExit(f"{mutant['name']}: {change['file']} has {count}: {change['find']}")
        texts[file] = text.replace(change["find"], change["replace"])
    return texts


def try_one(tree: Path, mutant: dict[str, Any], table: dict[str, Any]) -> list[str]:
    """Returns the tests that fail with a mutant."""
    texts = changed(tree, mutant)
    before = {file: file.read_text() for file in texts}
    try:
        for file, text in texts.items():
            file.write_text(text)
        return run(tree, table, tests_of(mutant, table))
    finally:
        for file, text in before.items():
            file.write_text(text)


def run(tree: Path, table: dict[str, Any], tests: Tests) -> list[str]:
    """Runs tests, and returns those that fail; ends the program if nothing was tested."""
    if tests.is_python:
        return run_python(tree, tests.names)
    return run_rust(tree, table, tests.names)


def run_rust(tree: Path, table: dict[str, Any], targets: list[str]) -> list[str]:
    """Compiles targets of cargo, and runs them up to the first that fails; see `run`."""
    compiled, _, names = " ".join([*table["command"], *targets]).partition(" -- ")
    done = subprocess.run(
        [*compiled.split(), "--no-run", "--message-format=json"],
        cwd=tree,
        env={**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"it does not compile:\n{done.stderr[-3000:]}")
    for line in done.stdout.splitlines():
        artifact = json.loads(line)
        if artifact["reason"] != "compiler-artifact" or not artifact["executable"]:
            continue
        crate = Path(artifact["manifest_path"]).parent
        is_run = crate.name in table.get("crates", [crate.name])
        if is_run and (failed := run_program(artifact["executable"], crate, names)):
            return failed
    return []


def run_program(program: str, crate: Path, names: str) -> list[str]:
    """Runs the tests of a program whose names contain a text."""
    done = subprocess.run(
        [program, *names.split()], cwd=crate, capture_output=True, text=True, check=False
    )
    failed: list[str] = FAILED.findall(done.stdout)
    if done.returncode and not failed:
        # By a panic in a destructor.
        failed = ["a process of tests was aborted"]
    return failed


def run_python(tree: Path, files: list[str]) -> list[str]:
    """Runs files of Python tests; see `run`."""
    if not (tree / NATIVE).exists():
        shutil.copy(ROOT / NATIVE, tree / NATIVE)
        # Servers that tests start.
        (tree / ".cache").symlink_to(ROOT / ".cache")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *files],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    failed: list[str] = FAILED_PYTHON.findall(done.stdout)
    if not failed and (done.returncode or " passed" not in done.stdout):
        raise SystemExit(f"nothing was tested:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
