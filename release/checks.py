"""Checks that the files of a release have to pass."""

from __future__ import annotations

import email
import io
import json
import shutil
import tarfile
import venv
import zipfile
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from elftools.elf.elffile import ELFFile
from readme_renderer import markdown

from release.command import ReleaseError, output, python, run
from release.wheel import COMPATIBILITY, MODULE

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}

_TRIAL = """
import sys
import numpy as np, penstock
state = {"w": np.arange(1 << 20, dtype=np.float32), "step": 3}
penstock.save(sys.argv[1], state)
loaded = penstock.load(sys.argv[1])
assert (loaded["w"] == state["w"]).all() and loaded["step"] == 3
assert penstock.verify(sys.argv[1]).ok
"""


def check_metadata(files: Iterable[Path]) -> None:
    """Runs twine's checks of the metadata, and checks the links of the description.

    Raises:
        ReleaseError: twine refuses a file, or a link of the description is broken.
    """
    files = list(files)
    run(*python("twine", "check", "--strict", *files))
    for file in files:
        about = email.message_from_bytes(_metadata(file))
        page = markdown.render(about.get_payload())
        if page is None:
            raise ReleaseError(f"{file.name}: its description cannot be shown")
        links = _Links()
        links.feed(page)
        if relative := [one for one in links.found if not one.startswith(("https:", "#"))]:
            raise ReleaseError(
                f"{file.name}: links of its description lead nowhere on an index: "
                f"{', '.join(relative)}"
            )


def check_module(wheel: Path, debug: Path) -> str:
    """Checks the module in a wheel; returns the oldest platform tag that it could have.

    Raises:
        ReleaseError: It needs more than its tag promises, is for another machine type, or its debug
            tables are not where a debugger looks for them.
    """
    found = json.loads(output(*python("auditwheel", "show", "--json", wheel)))
    oldest: str = found["overall_tag"]
    architecture = wheel.stem.partition(f"{COMPATIBILITY}_")[2]
    if not architecture or _glibc(oldest) > _glibc(f"{COMPATIBILITY}_"):
        raise ReleaseError(f"{wheel.name} is {oldest} by the symbols it takes from the system")
    with zipfile.ZipFile(wheel) as content:
        module = _sections(content.read(str(MODULE)))
    tables = _sections(debug.read_bytes())
    if module["machine"] != _MACHINES[architecture]:
        raise ReleaseError(f"{wheel.name} holds a module for {module['machine']}")
    if ".debug_line" in module["names"] or ".debug_line" not in tables["names"]:
        raise ReleaseError(f"{wheel.name}: the debug tables are not in {debug}")
    has_same_id = module["build_id"] is not None and module["build_id"] == tables["build_id"]
    if module["link"] != debug.name or not has_same_id:
        raise ReleaseError(f"{wheel.name} and {debug} do not name each other")
    return oldest


def check_installed(wheel: Path, place: Path, constraints: Path) -> None:
    """Installs a wheel into an environment of its own, saves and loads, and runs the doctor.

    Args:
        wheel: A wheel for this machine type.
        place: Directory for a new environment and a checkpoint.
        constraints: Versions of the dependencies.

    Raises:
        ReleaseError: One of these steps failed.
    """
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place / "venv")
    interpreter = place / "venv/bin/python"
    run(
        *python("uv", "pip", "install", "--quiet", "--python", interpreter),
        *("--constraint", constraints, wheel),
    )
    # In another directory, since Python would import the package of this tree here.
    run(interpreter, "-c", _TRIAL, place / "checkpoint", within=place)
    run(place / "venv/bin/penstock", "verify", place / "checkpoint", within=place)
    run(place / "venv/bin/penstock", "doctor", "--no-measure", place, within=place)


def _metadata(file: Path) -> bytes:
    """Returns the metadata of a wheel or a source distribution."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as content:
            (name,) = (one for one in content.namelist() if one.endswith(".dist-info/METADATA"))
            return content.read(name)
    with tarfile.open(file) as content:
        info = content.extractfile(f"{file.name.removesuffix('.tar.gz')}/PKG-INFO")
        if info is None:
            raise ReleaseError(f"{file.name} has no PKG-INFO")
        return info.read()


class _Links(HTMLParser):
    """Collects the targets of a page's links and images."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records the target of a tag that has one."""
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def _glibc(name: str) -> tuple[int, ...]:
    """Returns the version of glibc in a platform tag; infinite if there is none."""
    words = name.split("_")
    return (int(words[1]), int(words[2])) if words[0] == "manylinux" else (1 << 30,)


def _sections(content: bytes) -> dict[str, Any]:
    """Returns an ELF file's machine type, section names, debug link and build id."""
    file = ELFFile(io.BytesIO(content))
    names = {section.name for section in file.iter_sections()}
    link = file.get_section_by_name(".gnu_debuglink")
    note = file.get_section_by_name(".note.gnu.build-id")
    return {
        "machine": file["e_machine"],
        "names": names,
        "link": link.data().partition(b"\0")[0].decode() if link else None,
        "build_id": next((one["n_desc"] for one in note.iter_notes()), None) if note else None,
    }
