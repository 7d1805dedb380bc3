"""The record of all seals of a run of tests: that it is kept, and that repetitions are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import seals

SAVES = """
import sys
import numpy as np
import penstock
key = "PENSTOCK-SECRET-KEY-1" + "5e" * 32
penstock.save(sys.argv[1], {"w": np.ones(1 << 19)}, sealing=penstock.Sealing([key]))
"""


def test_each_process_adds_its_seals(tmp_path):
    record = tmp_path / "record"
    environment = {**os.environ, "PENSTOCK_RECORD_SEALS": str(record)}
    for number in range(2):
        command = [sys.executable, "-c", SAVES, str(tmp_path / f"ckpt-{number}")]
        subprocess.run(command, check=True, env=environment)
    data = record.read_bytes()
    # Metadata, the body of the part, and five chunks of a shard of 4 MiB with its header.
    assert len(data) == 2 * 7 * 44
    assert seals.repetitions(data) == 0
    assert seals.repetitions(data + data[44:132]) == 2
    assert seals.repetitions(data[:44] * 3) == 2


def test_the_run_is_recorded():
    assert Path(os.environ["PENSTOCK_RECORD_SEALS"]).exists()
