"""The matrix of versions, and the results of its cells."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RESULTS = HERE / "results.json"
NEWEST, PRE_RELEASE = "newest", "pre-release"


@dataclass(frozen=True)
class Cell:
    """A suite in one environment.

    Attributes:
        suite: Its name.
        asked: Version of the suite's package: a number, "newest" or "pre-release".
        python: Version of Python.
        requirements: Packages to install, beside Penstock.
        tests: Arguments of pytest.
        but: A pytest expression for the tests to skip.
        variables: Environment variables.
    """

    suite: str
    asked: str
    python: str
    requirements: tuple[str, ...]
    tests: tuple[str, ...]
    but: str
    variables: dict[str, str]


@dataclass(frozen=True)
class Result:
    """The outcome of a cell.

    Attributes:
        suite: Suite of the cell.
        asked: Requested version of the cell.
        date: Date of the run, in ISO 8601.
        versions: Installed versions by package, and "python".
        passed: Number of tests that passed.
        skipped: Number of tests that did not apply.
        failed: Names of the tests that failed, or the reason why none ran.
    """

    suite: str
    asked: str
    date: str
    versions: dict[str, str]
    passed: int
    skipped: int
    failed: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether some tests ran, and all of them passed."""
        return bool(self.passed) and not self.failed


def suites() -> dict[str, dict[str, Any]]:
    """Returns the suites by name."""
    found: dict[str, dict[str, Any]] = _matrix()["suites"]
    return found


def cells(*, suite: str | None = None, asked: str | None = None) -> list[Cell]:
    """Returns the cells of the matrix, or those of a suite or a version."""
    common = _matrix()["packages"]
    found = [
        _cell(name, one, facts, common)
        for name, facts in suites().items()
        if suite in (None, name)
        for one in facts["cells"]
    ]
    return [cell for cell in found if asked in (None, cell.asked)]


def _cell(name: str, one: dict[str, Any], facts: dict[str, Any], common: list[str]) -> Cell:
    installed = facts.get("install", facts["package"])
    asked = one.get("version", PRE_RELEASE if one.get("pre") else NEWEST)
    pinned = f"{installed}=={one['version']}" if "version" in one else installed
    return Cell(
        suite=name,
        asked=asked,
        python=one["python"],
        requirements=(
            pinned,
            "torch",
            "numpy",
            *common,
            *facts.get("packages", ()),
            *one.get("packages", ()),
        ),
        tests=tuple(facts["tests"]),
        but=" or ".join(filter(None, (facts.get("but"), one.get("but")))),
        variables=facts.get("variables", {}),
    )


def results() -> list[Result]:
    """Returns the stored results."""
    return [Result(**one) for one in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def store(new: Result) -> None:
    """Replaces the result of the same cell."""
    kept = {(one.suite, one.asked): one for one in results()} | {(new.suite, new.asked): new}
    order = [(cell.suite, cell.asked) for cell in cells()]
    # Results of cells that have left the matrix are dropped.
    found = [asdict(kept[key]) for key in order if key in kept]
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _matrix() -> dict[str, Any]:
    return tomllib.loads((HERE / "matrix.toml").read_text())
