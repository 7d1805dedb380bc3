"""Pages of the documentation as tests read them: code blocks, links and anchors.

Blocks of a page run in order, in one namespace and one directory. The page does not show these
three conventions:

    <!-- python                          what runs and is not shown: set-up before a block, or
    model = torch.nn.Linear(4, 4)        what is looked at behind it
    -->

    <!-- not run: needs a GPU -->        on its own, before a block that cannot run here

    ```python title="train.py"           a block that is written to that file instead
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conftest import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

READ_AS_FILES = ["CHANGELOG.md", "CONTRIBUTING.md", "README.md"]
READ_AS_FILES += ["python/penstock_bench/README.md", "examples/README.md", "reframe/README.md"]

_FENCE = re.compile(r"^( {0,3})(`{3,}|~{3,})\s*(\S*)\s*(.*)$")
_HIDDEN = re.compile(r"^<!-- (python|sh)$")
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
_TITLE = re.compile(r'title="([^"]+)"')
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$")
_ID = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|srcset|href)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A code block in a page, with the number of its first line."""

    language: str
    line: int
    text: str
    title: str | None = None
    is_hidden: bool = False
    not_run: str | None = None
    """Reason why it is not run."""


def pages() -> list[Path]:
    """Returns all pages for users and maintainers."""
    found = [REPOSITORY / path for path in READ_AS_FILES]
    return [*found, *sorted((REPOSITORY / "docs").rglob("*.md"))]


def named(page: Path) -> str:
    """Returns the path of a page in the repository."""
    return str(page.relative_to(REPOSITORY))


def blocks(page: Path) -> list[Block]:
    """Returns the code blocks of a page in order, hidden ones included."""
    found: list[Block] = []
    reason: str | None = None
    lines = enumerate(page.read_text().splitlines(), 1)
    for number, line in lines:
        if hidden := _HIDDEN.match(line):
            text = _until(lines, lambda end: end == "-->")
            found.append(Block(hidden.group(1), number + 1, text, is_hidden=True))
        elif fence := _FENCE.match(line):
            indent, mark, language, further = fence.groups()
            closing = re.compile(rf"^ {{0,3}}{re.escape(mark)}{mark[0]}*\s*$")
            text = _until(lines, closing.match, indent=len(indent))
            title = _TITLE.search(further)
            name = title.group(1) if title else None
            found.append(Block(language, number + 1, text, name, not_run=reason))
            reason = None
        elif (not_run := _NOT_RUN.match(line.strip())) or line.strip():
            reason = not_run.group(1) if not_run else None
    return found


def _until(lines, is_end, indent=0):
    """Returns the lines before the one that ends a block."""
    text = []
    for _, line in lines:
        if is_end(line):
            return "\n".join(text) + "\n"
        text.append(line[min(indent, len(line) - len(line.lstrip())) :])
    raise ValueError(f"a block has no end: {text[:3]}")


def prose(page: Path) -> list[tuple[int, str]]:
    """Returns the numbered lines of a page outside of code."""
    found, fence = [], ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark.group(2).startswith(fence) and not mark.group(3):
                fence = ""
        elif mark:
            fence = mark.group(2)
        else:
            found.append((number, re.sub(r"`[^`]*`", "", line)))
    return found


def links(page: Path) -> list[tuple[int, str]]:
    """Returns the link targets of a page, with their lines."""
    return [
        (number, target)
        for number, line in prose(page)
        for match in _LINK.finditer(line)
        for target in (match.group(1) or match.group(2),)
    ]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page, named as by code forges."""
    found: set[str] = set()
    fence = ""
    for line in page.read_text().splitlines():
        mark = _FENCE.match(line)
        if fence or mark:
            if not fence:
                fence = mark.group(2)
            elif mark and mark.group(2).startswith(fence) and not mark.group(3):
                fence = ""
            continue
        found.update(_ID.findall(line))
        if heading := _HEADING.match(line):
            slug = slug_of(heading.group(1))
            further = (f"{slug}-{number}" for number in range(1, 1000))
            found.add(slug if slug not in found else next(s for s in further if s not in found))
    return found


def slug_of(heading: str) -> str:
    """Returns the anchor of a heading: lower case, hyphens for spaces, letters and digits."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
