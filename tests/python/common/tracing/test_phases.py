"""`penstock trace phases`: the phases of a training run of several ranks."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from click.testing import CliRunner

import penstock
from penstock.cli import cli
from penstock.common import tracing
from penstock.common.tracing import phases, recorded
from penstock.offload import TensorIO

MIB = 1 << 20
READ_BYTES = 1000


def train(root, rank, mebibytes):
    """A run of one rank: a load, four small reads, a save, a save in the background."""
    state = {"w": np.ones(mebibytes * MIB, np.uint8)}
    penstock.save(root / "begin" / str(rank), state)
    (root / "data").write_bytes(bytes(4 * READ_BYTES))
    path = root / f"trace.{rank}.json"
    with penstock.trace(path):
        penstock.load(root / "begin" / str(rank))
        with TensorIO(direct="off") as io:
            for index in range(4):
                sample = np.empty(READ_BYTES, np.uint8)
                io.read(sample, root / "data", index * READ_BYTES).result()
        time.sleep(0.2)
        penstock.save(root / "saved" / str(rank), state)
        penstock.Saver().save_async(root / "later" / str(rank), state).result()
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    return [train(root, rank, mebibytes) for rank, mebibytes in enumerate((16, 1))]


def test_phases_of_several_ranks(traces):
    found = {one.name: one for one in phases.phases([recorded.read(path) for path in traces])}
    # A save that the caller waits for is no phase in the background.
    found.pop("background", None)
    assert set(found) == {"start-up", "compute", "checkpoint"}
    assert sum(one.share for one in found.values()) == pytest.approx(1)
    start, compute, checkpoint = (found[name] for name in ("start-up", "compute", "checkpoint"))
    assert start.readers == 1, "the rank with a sixteenth of the bytes does not count"
    assert start.read_bytes >= 17 * MIB
    assert start.read_rate == start.read_bytes / start.seconds
    assert compute.seconds >= 0.2
    (reads,) = [one for one in compute.requests if one.operation == "read"]
    assert (reads.size, reads.requests, reads.nbytes) == ("<4K", 8, 8 * READ_BYTES)
    assert checkpoint.writers == 1
    assert checkpoint.written_bytes >= 17 * MIB


def test_a_save_beside_training_is_a_phase_of_its_own(tmp_path):
    with penstock.trace(tmp_path / "trace.json"):
        pending = penstock.Saver().save_async(tmp_path / "saved", {"w": np.ones(4 * MIB, np.uint8)})
        while not pending.done():
            time.sleep(0.01)
    (trace,) = [recorded.read(tmp_path / "trace.json")]
    found = {one.name: one for one in phases.phases([trace])}
    # Some is written before the call returns, and belongs to the checkpoint's phase.
    assert found["background"].times == 1
    assert sum(one.written_bytes for one in found.values()) >= 4 * MIB
    assert not [one for one in found["compute"].requests if one.operation == "write"]


def test_the_command_prints_the_phases(traces):
    paths = [str(path) for path in traces]
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(cli, ["trace", "phases", *paths])
    assert {"start-up", "compute", "checkpoint"} <= set(shown.output.split())
    assert "read <4K" in shown.output
    told = CliRunner().invoke(cli, ["trace", "phases", "--json", *paths])
    document = json.loads(told.output)
    assert document["processes"] == 2
    assert document["phases"][0]["name"] == "start-up"
    assert {"seconds", "share", "read_rate", "write_rate"} <= document["phases"][0].keys()


def test_a_run_without_a_save_only_computes(tmp_path):
    with penstock.trace(tmp_path / "trace.json"), tracing.span("step"):
        time.sleep(0.01)
    (found,) = phases.phases([recorded.read(tmp_path / "trace.json")])
    assert (found.name, found.share, found.writers) == ("compute", pytest.approx(1), 0)
