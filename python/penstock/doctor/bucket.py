"""Checks what the store of a bucket does, and how fast it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from rich.filesize import decimal

import penstock
from penstock import _native
from penstock.doctor.findings import Finding, Status
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NEEDED = ("read after write", "create where nothing is")
"""Checks without which no save is reliable."""

_SIZE_BYTES = 256 << 20


def check(url: str, *, measures: bool, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Tests what checkpoints need of the store, then saves and loads one."""
    try:
        asked = _native.probe_bucket(url)
    except PenstockError as error:
        yield Finding("bucket", "fail", "it cannot be used", str(error), "see the message")
        return
    for name, verdict, meaning, detail in asked:
        found = f"{verdict}: {detail}" if detail else verdict
        lacking: Status = "fail" if name in _NEEDED else "warn"
        status: Status = "ok" if verdict == "holds" else lacking
        yield Finding(name, status, found, "" if status == "ok" else meaning)
    if measures:
        try:
            yield from _measured(url, progress)
        except PenstockError as error:
            yield Finding("measurement", "fail", "a save or a load failed", str(error))


def _measured(url: str, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Saves and loads bytes that no server can compress."""
    values = np.frombuffer(os.urandom(1 << 20), np.uint8)
    state = {"values": np.tile(values, _SIZE_BYTES >> 20)}
    store = penstock.CheckpointStore(f"{url}/penstock-doctor-{os.urandom(8).hex()}")
    try:
        progress("a save")
        saved = store.save(0, state)
        progress("a load")
        loads: list[penstock.reports.LoadReport] = []
        penstock.load(store.path(0), report=loads.append)
    finally:
        store.delete(0)
    for name, report in (("save", saved), ("load", loads[0])):
        requests = report.io_threads * report.queue_depth
        rate = f"{decimal(int(report.bytes / report.seconds))}/s for {decimal(report.bytes)}"
        yield Finding(name, "ok", f"{rate}, {requests} requests at a time")
