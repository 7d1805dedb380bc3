"""Writes the tested versions into the documentation's page, from the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.compat.matrix import REPOSITORY, results, suites

if TYPE_CHECKING:
    from tests.compat.matrix import Result

PAGE = REPOSITORY / "docs" / "compatibility.md"
BEGIN, END = "<!-- table: make compat -->", "<!-- end of table -->"


def write() -> None:
    """Replaces the page's table by that of the results."""
    PAGE.write_text(_with_table(PAGE.read_text(), table()))


def is_current() -> bool:
    """Whether the page has the table of the results."""
    text = PAGE.read_text()
    return _with_table(text, table()) == text


def table() -> str:
    """Returns the results as a Markdown table."""
    lines = [
        "| | version | with | date | tests | outcome |",
        "|---|---|---|---|---|---|",
    ]
    known = suites()
    for one in results():
        facts = known[one.suite]
        version = one.versions[facts["package"]]
        lines.append(
            f"| {facts['title']} | {version}{_how(one)} | {_beside(one, facts['package'])} "
            f"| {one.date} | {one.passed} passed, {one.skipped} skipped | {_outcome(one)} |"
        )
    return "\n".join(lines)


def _how(result: Result) -> str:
    return f" ({result.asked})" if not result.asked[0].isdigit() else ""


def _beside(result: Result, package: str) -> str:
    names = {"python": "Python", "torch": "PyTorch", "numpy": "NumPy"}
    return ", ".join(
        f"{text} {result.versions[name]}"
        for name, text in names.items()
        if name != package and name in result.versions
    )


def _outcome(result: Result) -> str:
    if result.is_good:
        return "good"
    return f"**fails**: {', '.join(f'`{name}`' for name in result.failed)}"


def _with_table(text: str, made: str) -> str:
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"
