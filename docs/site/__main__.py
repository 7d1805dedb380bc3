"""`python -m docs.site`: assembles the pages, and builds the site with Zensical.

With `--check` the site is built to find errors, and `site/` stays as it is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from docs.site import reference
from docs.site.pages import Pages

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
ASSEMBLED = REPOSITORY / ".cache" / "site"


def main() -> None:
    """Builds the site; exits with 1 if a page, link or anchor is missing."""
    shutil.rmtree(ASSEMBLED, ignore_errors=True)
    assemble(ASSEMBLED)
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--config-file",
        str(ASSEMBLED / "mkdocs.yml"),
    ]
    code = subprocess.run(command, check=False).returncode
    if code == 0 and sys.argv[1:] != ["--check"]:
        shutil.rmtree(REPOSITORY / "site", ignore_errors=True)
        shutil.move(ASSEMBLED / "built", REPOSITORY / "site")
    sys.exit(code)


def assemble(directory: Path) -> None:
    """Writes the settings and the pages of the site."""
    pages = Pages(REPOSITORY, directory / "pages")
    written = yaml.safe_load((HERE / "navigation.yml").read_text())
    navigation = [
        {title: placed(entry, pages)} for item in written for title, entry in item.items()
    ]
    check_complete(written)
    for name in ("site.css", "iframe-worker.js"):
        shutil.copy(HERE / name, directory / "pages" / name)
    settings = (HERE / "mkdocs.yml").read_text()
    (directory / "mkdocs.yml").write_text(settings + "\n" + yaml.safe_dump({"nav": navigation}))


def placed(entry: Any, pages: Pages) -> Any:
    """Writes the pages of a navigation entry; returns the entry with their places in the site."""
    if entry == "<reference>":
        return generated(pages)
    if isinstance(entry, str):
        return pages.add(entry)
    return [pages.add(path) for path in entry if (REPOSITORY / path).exists()]


def generated(pages: Pages) -> list[dict[str, str]]:
    """Writes the pages of the reference; returns their navigation entries."""
    pages.write("reference/command-line.md", reference.command_line())
    entries = [{"Command line": "reference/command-line.md"}]
    for title, place, text in reference.api():
        pages.write(place, text)
        entries.append({title: place})
    return entries


def check_complete(navigation: list[dict[str, Any]]) -> None:
    """Raises ValueError if a page of `docs/` is not in the navigation."""
    named = {path for item in navigation for entry in item.values() for path in paths_of(entry)}
    found = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md")}
    if found - named:
        raise ValueError(f"not in docs/site/navigation.yml: {', '.join(sorted(found - named))}")


def paths_of(entry: Any) -> list[str]:
    """Returns the pages of an entry."""
    return [entry] if isinstance(entry, str) else entry


if __name__ == "__main__":
    main()
