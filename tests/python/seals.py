"""Fails a run of tests in which one key and nonce have sealed two messages.

All processes of a run, killed, forked and started ones too, append to one file.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest

_VARIABLE = "PENSTOCK_RECORD_SEALS"
_RECORD_BYTES = 44
"""SHA-256 of the key, and the nonce."""

_file: Path | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Begins the record, in the process that starts the workers."""
    global _file
    if not hasattr(config, "workerinput"):
        descriptor, name = tempfile.mkstemp(prefix="penstock-seals-")
        os.close(descriptor)
        _file = Path(name)
        os.environ[_VARIABLE] = name


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Looks for repetitions, after all workers have ended."""
    if _file is None:
        return
    data = _file.read_bytes()
    _file.unlink()
    repeated = repetitions(data)
    line = session.config.get_terminal_writer().line
    if data and session.config.get_verbosity() >= 0:
        line(f"\nsealed messages: {len(data) // _RECORD_BYTES}, a key and nonce twice: {repeated}")
    if repeated:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        line(f"{repeated} messages were sealed with the key and nonce of another", red=True)


def repetitions(data: bytes) -> int:
    """Number of records that equal an earlier one."""
    records = Counter(data[at : at + _RECORD_BYTES] for at in range(0, len(data), _RECORD_BYTES))
    return sum(records.values()) - len(records)
