"""Several processes create, stat and remove directories and files at the same time."""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crew
import node

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--files", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--branching", type=int, required=True)
    given = parser.parse_args()
    does = functools.partial(_work, given.files, given.depth, given.branching)
    crew.run(given.work, given.processes, does)


def _work(files: int, depth: int, branching: int, worker: crew.Worker) -> None:
    def of(index: int) -> tuple[list[str], list[str]]:
        directories = _tree(str(worker.work / f"tree-{index}"), depth, branching)
        # Files are spread evenly over all directories. Paths are built before the timing begins.
        return directories, [
            f"{directories[number % len(directories)]}/file-{number}" for number in range(files)
        ]

    directories, mine = of(worker.index)
    # The process with the same number on the next node; on a single node, the next process.
    _, nodes = node.place()
    step = worker.count // nodes if nodes > 1 else 1
    _, others = of((worker.index + step) % worker.count)
    worker.phase("mkdir", lambda: _each(os.mkdir, directories))
    worker.phase("create", lambda: _each(_create, mine))
    worker.gather("created")
    worker.to_verify = 2
    worker.verified += _count(directories[0]) == (len(directories) - 1, files)
    worker.phase("stat", lambda: _each(os.stat, others))
    worker.phase("remove", lambda: _each(os.unlink, mine))
    worker.phase("rmdir", lambda: _each(os.rmdir, directories[::-1]))
    worker.verified += not os.path.lexists(directories[0])


def _tree(top: str, depth: int, branching: int) -> list[str]:
    """Lists a directory and all directories below it, parents first."""
    found, level = [top], [top]
    for _ in range(depth):
        level = [f"{above}/{number}" for above in level for number in range(branching)]
        found += level
    return found


def _each(call: Callable[[str], Any], paths: list[str]) -> int:
    for path in paths:
        call(path)
    return len(paths)


def _create(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def _count(top: str) -> tuple[int, int]:
    """Counts directories and files below a directory."""
    walked = [(len(directories), len(files)) for _, directories, files in os.walk(top)]
    return sum(one for one, _ in walked), sum(one for _, one in walked)


if __name__ == "__main__":
    main()
