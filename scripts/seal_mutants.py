#!/usr/bin/env python3
"""Breaks sealing in one place after the other, and runs its tests: each break has to be noticed.

The breaks stand in seal_mutants.toml. They are made in a worktree of HEAD, which is removed in the
end; what is compiled goes to `target`. Prints each break with the first test that noticed it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "seal_mutants.toml"
FAILED = re.compile(r"^test (\S+) \.\.\. FAILED$", re.MULTILINE)


def main() -> int:
    """Tries the chosen mutants; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="only the mutants whose name contains one of these"
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
    survivors = []
    with worktree() as tree:
        if chosen == [] and (failed := run(tree, table["command"])) != []:
            print(f"the tests fail without a mutant: {failed}", file=sys.stderr)
            return 1
        for mutant in mutants:
            noticed = try_one(tree, mutant, table["command"])
            print(f"{mutant['name']:50} {noticed[0] if noticed else 'SURVIVES'}", flush=True)
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


def try_one(tree: Path, mutant: dict[str, Any], command: list[str]) -> list[str]:
    """Returns the tests that fail with a mutant."""
    before = {}
    try:
        for change in mutant["changes"]:
            file = tree / change["file"]
            text = file.read_text()
            before.setdefault(file, text)
            count = text.count(change["find"])
            if count != change.get("count", 1):
                raise SystemExit(
                    f"{mutant['name']}: {change['file']} has {count}: {change['find']}"
                )
            file.write_text(text.replace(change["find"], change["replace"]))
        return run(tree, mutant.get("command", command))
    finally:
        for file, text in before.items():
            file.write_text(text)


def run(tree: Path, command: list[str]) -> list[str]:
    """Runs tests, and returns those that fail; ends the program if nothing was tested."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    failed: list[str] = FAILED.findall(done.stdout)
    if done.returncode and not failed:
        if "Finished `test` profile" not in done.stderr:
            raise SystemExit(f"it does not compile:\n{done.stderr[-3000:]}")
        # By a panic in a destructor.
        failed = ["a process of tests was aborted"]
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
