"""ZeRO-Infinity on our ops, for `make peers-deepspeed`: DeepSpeed compiles an optimizer for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("zero_infinity.py")


def _train(directory: Path, device: str) -> dict[str, Any]:
    penstock = Path(sys.executable).with_name("penstock")
    done = subprocess.run(
        [penstock, "deepspeed", "--", sys.executable, PROGRAM, directory, device],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_training_from_storage_is_training_from_memory(tmp_path: Path) -> None:
    """Each loss has the same bits.

    Those after resuming from storage are compared in docs/deepspeed.md: they differ from the first
    ones with DeepSpeed's own ops as well.
    """
    (tmp_path / "nvme").mkdir()
    (tmp_path / "cpu").mkdir()
    stored, held = _train(tmp_path / "nvme", "nvme"), _train(tmp_path / "cpu", "cpu")
    assert stored["losses"] == held["losses"]
    assert len(set(stored["losses"])) == 4
    assert held["resumed"] == held["losses"][2:]
    assert stored["swapped_bytes"] > 64 << 20
    assert held["swapped_bytes"] == 0
