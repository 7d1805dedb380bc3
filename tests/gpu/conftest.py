"""Runs the tests in the order of need, and writes down each result.

Time on a GPU may be short: tests that never passed come first, then those that passed longest ago.
A run that is broken off leaves its results, and the next one goes on from there.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

RESULTS = Path(__file__).with_name("results.json")


def read():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def pytest_collection_modifyitems(items):
    passed = {name: one["passed"] for name, one in read().items() if one["outcome"] == "passed"}
    items.sort(key=lambda item: passed.get(item.name, ""))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when != "call" and report.passed:
        return report
    results = read()
    one = results.setdefault(item.name, {"passed": ""})
    one["outcome"] = report.outcome
    one["seconds"] = round(report.duration, 2)
    one["gpu"] = torch.cuda.get_device_name()
    if report.passed:
        one["passed"] = datetime.now(UTC).isoformat(timespec="seconds")
    # Replaced whole: a run that is killed while it writes loses nothing.
    written = RESULTS.with_suffix(f".{time.monotonic_ns()}")
    written.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    written.replace(RESULTS)
    return report
