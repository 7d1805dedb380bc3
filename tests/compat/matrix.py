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
        asked: The version of the suite's package: a number, "newest" or "pre-release".
        python: The version of Python.
        requirements: What is installed, beside Penstock.
        tests: What pytest is given.
        but: An expression of pytest for tests that are left out.
        variables: What is set in the environment.
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
        suite: As of the cell.
        asked: As of the cell.
        date: When it ran, as in ISO 8601.
        versions: What was installed, by package, with "python".
        passed: How many tests passed.
        skipped: How many did not apply.
        failed: The names of those that failed, or of what kept any from running.
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
        """Whether all that was run passed, and some was."""
        return bool(self.passed) and not self.failed


def suites() -> dict[str, dict[str, Any]]:
    """The suites, by name."""
    found: dict[str, dict[str, Any]] = _matrix()["suites"]
    return found


def cells(*, suite: str | None = None, asked: str | None = None) -> list[Cell]:
    """The cells of the matrix, or those of a suite, of a version."""
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
    """The results in the tree."""
    return [Result(**one) for one in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def store(new: Result) -> None:
    """Puts a result in the place of the one of the same cell."""
    kept = {(one.suite, one.asked): one for one in results()} | {(new.suite, new.asked): new}
    order = [(cell.suite, cell.asked) for cell in cells()]
    # Of cells that the matrix has no more nothing is kept.
    found = [asdict(kept[key]) for key in order if key in kept]
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _matrix() -> dict[str, Any]:
    return tomllib.loads((HERE / "matrix.toml").read_text())
