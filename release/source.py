"""What is released: the tree as it was committed, with a README that an index can show."""

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
    """Puts the last commit into a directory: nothing that lies around in the tree gets into it."""
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
    """A README whose links hold wherever it is shown.

    Args:
        text: Markdown, with links relative to the root of the repository.
        address: Of the repository. Where it has none that is known, what a link says is left, and
            where it goes is not.
        version: Links go to the files as this one has them.
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
