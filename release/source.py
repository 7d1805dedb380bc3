"""The source of a release: the committed tree, with a README that an index can show."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import tomllib
from typing import TYPE_CHECKING

from release.command import python, run

if TYPE_CHECKING:
    from pathlib import Path

_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")


def export(root: Path, place: Path) -> None:
    """Exports the last commit to a directory, without uncommitted files of the tree."""
    shutil.rmtree(place, ignore_errors=True)
    archive = subprocess.run(
        ["git", "-C", str(root), "archive", "HEAD"], capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(place, filter="data")
    project = tomllib.loads((place / "pyproject.toml").read_text())["project"]
    readme = place / project["readme"]
    address = project.get("urls", {}).get("Source")
    readme.write_text(linked(readme.read_text(), address, project["version"]))


def linked(text: str, address: str | None, version: str) -> str:
    """Makes the links of a README work outside the repository.

    Args:
        text: Markdown, with links relative to the root of the repository.
        address: URL of the repository. Without a known one, links become plain text.
        version: Links lead to the files of this version.
    """
    target = rf"[\1]({address}/blob/v{version}/\2)" if address else r"\1"
    return _RELATIVE_LINK.sub(target, text)


def pack(source: Path, dist: Path) -> Path:
    """Makes the source distribution of a tree; returns its path."""
    run(*python("maturin", "sdist", "--out", dist), within=source)
    (made,) = dist.glob("*.tar.gz")
    return made


def unpack(sdist: Path, place: Path) -> Path:
    """Unpacks a source distribution; returns the directory with its `pyproject.toml`."""
    shutil.rmtree(place, ignore_errors=True)
    with tarfile.open(sdist) as files:
        files.extractall(place, filter="data")
    (source,) = place.iterdir()
    return source
