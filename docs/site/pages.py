"""Pages of the repository as pages of the site: their places and their links."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PLACES = {
    "CHANGELOG.md": "maintainers/changelog.md",
    "CONTRIBUTING.md": "maintainers/contributing.md",
    "README.md": "index.md",
    "python/penstock_bench/README.md": "maintainers/benches.md",
    "docs/ARCHITECTURE.md": "maintainers/architecture.md",
    "docs/format.md": "maintainers/format.md",
    "examples/README.md": "examples/programs.md",
    "examples/ci": "examples/programs.md",
    "examples/dlio/workload": "examples/programs.md",
    "reframe/README.md": "maintainers/reframe.md",
}
"""Places in the site of pages outside `docs/`, or with another path than there."""

_SOURCES = {".py": "python", ".yml": "yaml", ".yaml": "yaml"}
"""Files that are shown as code, by suffix: their language."""

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=[)\s])|(?<=^\[)(?<=\]:\s)(\S+)")
_CODE = re.compile(r"`[^`]*`")
_HIDDEN = re.compile(r"^ *<!--.*?-->\n", re.DOTALL | re.MULTILINE)


def place_of(path: str) -> str:
    """Returns the place of a repository's file in the site."""
    if path in PLACES:
        return PLACES[path]
    stem, suffix = posixpath.splitext(path)
    if suffix in _SOURCES:
        return f"source/{stem}.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    raise ValueError(f"{path}: has no place in the site; give it one in docs/site/pages.py")


class Pages:
    """The pages of a site, collected from what is linked.

    Args:
        repository: The root of the repository.
        directory: Where the pages are written.
    """

    def __init__(self, repository: Path, directory: Path) -> None:
        self._repository = repository
        self._directory = directory
        self._written: set[str] = set()

    def add(self, path: str) -> str:
        """Writes a file of the repository, and its links' targets, as pages; returns its place."""
        place = place_of(path)
        source = self._repository / path
        if place in self._written or source.is_dir():
            return place
        self._written.add(place)
        suffix = posixpath.splitext(path)[1]
        if suffix == ".md":
            text = self._linked(path, place, _HIDDEN.sub("", source.read_text()))
            self.write(place, text)
        elif suffix in _SOURCES:
            self.write(place, shown(path, source.read_text(), _SOURCES[suffix]))
        else:
            target = self._directory / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        return place

    def write(self, place: str, text: str) -> None:
        """Writes a page of the site."""
        target = self._directory / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def _linked(self, path: str, place: str, text: str) -> str:
        def moved(target: str) -> str:
            file, hash_sign, anchor = target.partition("#")
            if not file or re.match(r"[a-z]+:", file):
                return target
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
            if not (self._repository / linked).exists():
                raise ValueError(f"{path}: links to {file}, which is not there")
            found = place_of(linked)
            if found != "index.md":
                self.add(linked)
            return posixpath.relpath(found, posixpath.dirname(place) or ".") + hash_sign + anchor

        return with_links(text, moved)


def with_links(text: str, change: Callable[[str], str]) -> str:
    """A page with its links changed, outside of code."""
    return "".join(
        line if is_code else _LINK.sub(lambda link: change(link.group()), line)
        for line, is_code in lines_of(text)
    )


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """Yields each line of a page, and whether it is in a block of code."""
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            yield line, True
            if mark and mark.group(1).startswith(fence) and line.strip() == mark.group(1):
                fence = ""
        else:
            fence = mark.group(1) if mark else ""
            yield line, bool(mark)


def shown(path: str, text: str, language: str) -> str:
    """Returns a page that shows a file, excluded from search: other pages describe the file."""
    aside = "---\nsearch:\n  exclude: true\n---\n"
    return f"{aside}# {posixpath.basename(path)}\n\n````{language}\n{text.rstrip()}\n````\n"
