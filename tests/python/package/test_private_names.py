"""The uses of another package's private names are found, and nothing else is taken for one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/private_names.py"

GOOD = {
    "__init__.py": "",
    "_native.py": "_Row = tuple\n",
    "live.py": "class LiveState:\n    def _requested_names(self): ...\n",
    "low/__init__.py": "",
    "low/base.py": (
        "_LIMIT = 3\n\n\nclass Base:\n"
        "    def __init__(self):\n        self._size = _LIMIT\n"
        "    def _grow(self): ...\n"
    ),
    "low/beside.py": "from penstock.low.base import _LIMIT, Base\nassert Base()._size == _LIMIT\n",
    "high/__init__.py": "",
    "high/user.py": (
        "from penstock import _native\nfrom penstock._native import _Row\n"
        "from penstock.live import LiveState\nfrom penstock.low.base import Base\n\n\n"
        "class Own(Base, LiveState):\n    def _requested_names(self): ...\n"
        "    def _other(self, one):\n        return self._kept, one._kept\n"
        "    def keep(self, module):\n        self._kept = module._buffers\n"
    ),
}


def check(directory: Path, further: str = "") -> subprocess.CompletedProcess[str]:
    root = directory / "penstock"
    for name, text in GOOD.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + (further if name == "high/user.py" else ""))
    command = [sys.executable, SCRIPT, root]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_own_names_hooks_and_those_of_libraries_are_used(tmp_path):
    checked = check(tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("use", "found"),
    [
        ("from penstock.low.base import _LIMIT\n", "penstock.low.base._LIMIT"),
        ("def later():\n    from penstock.low.base import _LIMIT as limit\n", "low.base._LIMIT"),
        ("from penstock.low import base\nprint(base._LIMIT)\n", "base._LIMIT"),
        ("def grow(one):\n    one._grow()\n", "one._grow"),
        ("class More(Base):\n    def _grow(self): ...\n", "Base._grow"),
        ("class More(Base):\n    def size(self):\n        return self._size\n", "Base._size"),
        ("class More(Base):\n    def go(self):\n        super()._grow()\n", "Base._grow"),
    ],
)
def test_a_private_name_of_another_package_is_found(tmp_path, use, found):
    checked = check(tmp_path, f"\n\n{use}")
    assert checked.returncode == 1
    assert found in checked.stderr
