"""The suite of indexed datasets: each cell is measured in bounded memory, or says why it is not."""

from __future__ import annotations

import contextlib
import json

import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib", reason="comes with make bench", exc_type=ImportError)
pytest.importorskip("megatron.core.datasets")

from penstock.common.machine.limits import LimitError
from penstock_bench.suites.indexed import __main__ as suite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def measured(tmp_path, *options):
    """The samples of a short run, by contender and operation."""
    where = ["--directory", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    told = CliRunner().invoke(suite.main, ["--quick", "--rounds", "1", *where, *options])
    assert told.exit_code == 0, told.output
    assert not list((tmp_path / "work").iterdir())
    found = json.loads((tmp_path / "out" / "indexed.json").read_text())["samples"]
    return {(one["row"], one["operation"]): one for one in found}


def test_every_cell_is_measured_in_the_memory_it_may_have(tmp_path):
    found = measured(tmp_path)
    assert len(found) == len(suite.READERS) * len(suite.WAYS) * len(suite.CACHES)
    for (_, operation), one in found.items():
        if one["error"] is not None:
            assert operation.endswith("small")
            assert one["error"].startswith("skipped: memory cannot be limited")
        elif operation.endswith("small"):
            assert 0 < one["detail"]["group_peak_bytes"] <= (512 << 20) + suite._QUICK_BYTES // 4


def test_a_machine_without_control_groups_is_named(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def limited(nbytes):
        raise LimitError("there are no control groups that count memory")
        yield

    monkeypatch.setattr(suite, "limited", limited)
    found = measured(tmp_path, "--only", "penstock")
    for (_, operation), one in found.items():
        if operation.endswith("small"):
            assert "there are no control groups" in one["error"]
        else:
            assert one["error"] is None
