"""The modules that docs/ARCHITECTURE.md and CONTRIBUTING.md name by short names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ("docs/ARCHITECTURE.md", "CONTRIBUTING.md")
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("crates", "python", "tests", "docs", "scripts", "release", "fuzz")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyi", ".rs") and "target" not in path.parts
]
# Keys of pyproject.toml, attributes of objects, and functions of Rust's standard library.
LIBRARIES = {"torch"}
OTHERS = {"manifest.json", "verified.json", "tool.importlinter", "thread::scope", "process::exit"}


def short_names(page: str) -> set[str]:
    """Names such as `ranks.round`, `commit::fence` and `saving/save.py`, and folders."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    return set(re.findall(r"`([a-z_]+(?:(?:\.|::|/)[a-z_]+)+(?:\.pyi?|\.rs)?)`", text)) - OTHERS


def is_python(parts: list[str]) -> bool:
    """A module of ours, a name in one, or a module of a library."""
    path = "/".join(parts)
    if any(re.search(rf"(^|/){path}(\.py$|/)", source) for source in SOURCES):
        return True
    owner, name = "/".join(parts[:-1]), parts[-1]
    defined = re.compile(rf"^\s*(?:async )?(?:def|class) {name}\b|^\s*{name}\b.* = ", re.MULTILINE)
    for source in SOURCES:
        if re.search(rf"(^|/){owner}(/__init__)?\.pyi?$", source) and defined.search(
            (ROOT / source).read_text()
        ):
            return True
    return parts[0] in LIBRARIES


def is_rust(parts: list[str]) -> bool:
    """A module of a crate, or an item in one."""
    parts = [part.removeprefix("penstock_") for part in parts]
    paths = ["/".join(parts), "/".join([parts[0], "src", *parts[1:]])]
    if any(re.search(rf"(^|/){path}(\.rs$|/)", source) for path in paths for source in SOURCES):
        return True
    item = re.compile(rf"\b(?:fn|struct|enum|trait|mod|type|const) {parts[-1]}\b")
    owners = ["/".join(parts[:-1]), "/".join([parts[0], "src", *parts[1:-1]])]
    owners += [f"{parts[0]}/src/lib"]
    return any(
        re.search(rf"(^|/){owner}\.rs$", source) and item.search((ROOT / source).read_text())
        for owner in owners
        for source in SOURCES
    )


def is_file(name: str) -> bool:
    """A file or folder, by its whole path or the end of it."""
    end = re.compile(rf"/{name}(?:[/.]|$)")
    return (ROOT / name).exists() or any(end.search(f"/{source}") for source in SOURCES)


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_a_page_names_exist(page: str) -> None:
    names = short_names(page)
    missing = [
        name
        for name in sorted(names)
        if not (
            is_file(name)
            if "/" in name or name.endswith((".py", ".pyi", ".rs"))
            else is_rust(name.split("::"))
            if "::" in name
            else (ROOT / name).exists() or is_python(name.split("."))
        )
    ]
    assert missing == []


def test_a_name_of_nothing_is_found_out() -> None:
    assert is_python(["ranks", "round"])
    assert is_rust(["commit", "fence"])
    assert not is_python(["ranks", "no_such_module"])
    assert not is_rust(["commit", "no_such_module"])
    assert not is_file("ranks/no_such_module.py")
