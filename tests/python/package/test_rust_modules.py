"""Modules of a crate that import each other in a circle are found in any notation."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/check_modules.py"

GOOD = {
    "lib.rs": "pub mod top;\nmod below;\npub use top::{Top, other::Other};\n",
    "below.rs": "pub struct Below;\n",
    "top.rs": (
        "mod other;\npub use other::Other;\nuse crate::below::Below;\npub struct Top(Below);\n"
    ),
    "top/other.rs": (
        "//! See [`crate::Top`].\nuse super::Top;\npub struct Other(Top);\n"
        "#[cfg(test)]\nmod tests {\n    use crate::Other;\n}\n"
    ),
}


def check(directory: Path, changed: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in (GOOD | changed).items():
        file = directory / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    command = [sys.executable, SCRIPT, directory]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_declared_handed_on_or_tested_is_no_import(tmp_path):
    checked = check(tmp_path, {})
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "text", "circle"),
    [
        ("below.rs", "use crate::top::{\n    Top as Above,\n};\n", "modules"),
        ("below.rs", "use super::Other;\n", "folders"),
        ("below.rs", "fn below() -> crate::Top { todo!() }\n", "modules"),
        ("top.rs", "mod other;\npub use other::Other;\npub struct Top(Other);\n", "modules"),
        ("top.rs", "mod other;\npub struct Top;\nfn top() { other::make(); }\n", "modules"),
    ],
)
def test_a_circle_is_found(tmp_path, file, text, circle):
    checked = check(tmp_path, {file: text})
    assert checked.returncode == 1
    assert f"{circle} in a circle: " in checked.stderr
