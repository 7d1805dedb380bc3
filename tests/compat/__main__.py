"""Runs the matrix of versions: `python -m tests.compat run`, `table` or `new`.

Each cell runs in an environment of its own, removed afterwards: the wheel of this tree, a version
of a framework, and the tests of the tree for it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from tests.compat import table
from tests.compat.matrix import (
    NEWEST,
    PRE_RELEASE,
    REPOSITORY,
    Result,
    cells,
    results,
    store,
    suites,
)

if TYPE_CHECKING:
    from tests.compat.matrix import Cell

CELL_SECONDS_MAX = 3600
REPORTED = ("torch", "numpy")


def main() -> int:
    """Runs the command line; returns whether anything failed."""
    arguments = _arguments()
    if arguments.command == "table":
        table.write()
        return 0
    chosen = _new(arguments.suite) if arguments.command == "new" else None
    if chosen is None:
        chosen = cells(suite=arguments.suite, asked=arguments.version)
    if not chosen:
        _say("nothing to run")
        return 0
    found = []
    for cell in chosen:
        _say(f"{cell.suite} {cell.asked} on Python {cell.python}")
        result = _run(cell, arguments.wheel.resolve())
        store(result)
        table.write()
        _say(f"  {result.versions}: {'good' if result.is_good else result.failed}")
        found.append(result)
    return int(not all(one.is_good for one in found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="make the page's table of the results anew")
    for name, text in (
        ("run", "run the cells of the matrix"),
        ("new", "run those of which the registry has a newer version than the results"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--suite", choices=sorted(suites()), help="of this suite only")
        command.add_argument("--wheel", type=Path, required=True, help="Penstock's wheel")
        command.add_argument("--version", help='of this version: a number, "newest", "pre-release"')
    return parser.parse_args()


def _new(suite: str | None) -> list[Cell]:
    """Prints and returns the unpinned cells for which the registry has a newer version."""
    tried = {(one.suite, one.asked): one.versions for one in results()}
    found = []
    for cell in cells(suite=suite):
        if cell.asked not in (NEWEST, PRE_RELEASE):
            continue
        package = suites()[cell.suite]["package"]
        there = _resolved(cell, package)
        known = tried.get((cell.suite, cell.asked), {}).get(package, "none")
        if there != known:
            _say(f"{cell.suite}: {package} {there} ({cell.asked}); tried: {known}")
            found.append(cell)
    return found


def _resolved(cell: Cell, package: str) -> str:
    """Returns the version of a package that a cell would install now."""
    command = [*_UV, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"]
    command += ["--python-version", cell.python, *_how(cell)]
    listed = subprocess.run(
        command, input="\n".join(cell.requirements), text=True, check=True, capture_output=True
    ).stdout
    return next(
        line.split("==")[1].split()[0]
        for line in listed.splitlines()
        if line.startswith(f"{package}==")
    )


def _how(cell: Cell) -> list[str]:
    return ["--prerelease", "allow"] if cell.asked == PRE_RELEASE else []


def _run(cell: Cell, wheel: Path) -> Result:
    with tempfile.TemporaryDirectory(prefix="penstock-compat-") as directory:
        python = Path(directory, "environment", "bin", "python")
        made = _call([*_UV, "venv", "--quiet", "--python", cell.python, str(python.parents[1])])
        if made:
            sys.exit(f"no environment with Python {cell.python}: {made}")
        requirements = [*_how(cell), *cell.requirements, str(wheel)]
        wrong = _call([*_UV, "pip", "install", "--quiet", "--python", str(python), *requirements])
        if wrong:
            return _unrun(cell, f"cannot be installed: {wrong}")
        report = Path(directory, "report.xml")
        environment = {**os.environ, **cell.variables}
        environment.pop("PYTHONPATH", None)
        chosen = [*cell.tests, *(["-k", f"not ({cell.but})"] if cell.but else [])]
        how = ["-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={directory}/tests"]
        said = _call([str(python), "-m", "pytest", "--quiet", *how, *chosen], environment)
        return _read(cell, report, said, _versions(python, cell))


def _read(cell: Cell, report: Path, said: str | None, versions: dict[str, str]) -> Result:
    if not report.exists():
        return _unrun(cell, said or "no report", versions)
    passed, skipped, failed = 0, 0, []
    for case in ET.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name", ""))
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Result(cell.suite, cell.asked, _today(), versions, passed, skipped, failed)


def _unrun(cell: Cell, why: str, versions: dict[str, str] | None = None) -> Result:
    known = versions or {suites()[cell.suite]["package"]: cell.asked, "python": cell.python}
    return Result(cell.suite, cell.asked, _today(), known, 0, 0, [why])


def _versions(python: Path, cell: Cell) -> dict[str, str]:
    names = {suites()[cell.suite]["package"], *REPORTED}
    code = (
        "import json, platform, sys; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version(), "
        "**{name: version(name) for name in sys.argv[1:]}}))"
    )
    told = subprocess.run(
        [python, "-c", code, *sorted(names)], text=True, check=True, capture_output=True
    ).stdout
    found: dict[str, str] = json.loads(told)
    return found


def _call(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """Runs a command in the repository; returns the end of its output if it failed."""
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=CELL_SECONDS_MAX,
        check=False,
    )
    if not ended.returncode:
        return None
    sys.stderr.write(ended.stdout[-4000:])
    return ended.stdout.strip().splitlines()[-1][:200]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


_UV = [shutil.which("uv") or "uv"]

if __name__ == "__main__":
    if find_spec("uv") is None and shutil.which("uv") is None:
        sys.exit("uv is missing: run this by make compat")
    sys.exit(main())
