"""The benchmark of buckets: what it makes of its numbers, its proxy, and a small run of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from click import ClickException
from click.testing import CliRunner

import penstock
from compare import assert_same
from penstock_bench.results.samples import Samples
from penstock_bench.suites.objects import __main__ as command
from penstock_bench.suites.objects import table
from penstock_bench.suites.objects.contenders import (
    CONNECTOR,
    FSSPEC,
    LOAD,
    LOCAL,
    MIRRORED,
    PENSTOCK,
    SAVE,
    STORES,
    STREAMER,
)
from penstock_bench.suites.objects.proxy import Limits, Pace, Proxy
from penstock_bench.suites.objects.server import program
from penstock_bench.suites.objects.table import (
    LARGE,
    MEMORY,
    MIB,
    PACED,
    PARTIAL,
    PLACES,
    PROXIED,
    Transfer,
)

CORES = sorted(os.sched_getaffinity(0))


def test_a_name_that_nobody_has_is_refused():
    told = CliRunner().invoke(command.main, ["--only", "pickle"])
    assert told.exit_code == 2
    assert "pickle: choose from" in told.output


def measured():
    found = Samples(
        {}, {}, {"size_bytes": 1 << 30, "limits": {"up_in_all": 200, "down_in_all": 400}}
    )

    def add(place, row, operation, index, nbytes=10**9, seconds=1.0, **rest):
        found.samples.append(Transfer(row, index, operation, nbytes, seconds, place=place, **rest))

    for index, slow in enumerate((1, 2)):
        for row, save, load in (
            (PENSTOCK, 1, 1),
            (CONNECTOR, 2, 4),
            (FSSPEC, 6, 9),
            (STREAMER, None, 1.5),
        ):
            for operation, seconds in ((SAVE, save), (LOAD, load)):
                if seconds:
                    costs = {"cpu_seconds": seconds / 2, "extra_bytes": 100 * MIB}
                    add(MEMORY, row, operation, index, seconds=slow * seconds, **costs)
        add(PACED, PENSTOCK, SAVE, index, seconds=5.0 * slow)
        add(PACED, PENSTOCK, LOAD, index, seconds=2.5 * slow)
        add(PROXIED, PENSTOCK, PARTIAL, index, 20 * MIB, traffic={"down": 24 * MIB}, runs=3)
        add(LOCAL, PENSTOCK, SAVE, index, seconds=slow)
        add(MIRRORED, PENSTOCK, SAVE, index, seconds=slow * 1.0625)
    add(LARGE, PENSTOCK, SAVE, 0, extra_bytes=400 * MIB)
    add(MEMORY, FSSPEC, SAVE, 2, error="no space")
    return found


def test_bars_are_ratios_within_a_round_and_have_to_be_reached(tmp_path):
    found = measured()
    bars = {one.title: (one.found.median, one.is_met) for one in table.bars(found)}
    assert bars["save / s3torchconnector"] == (2, True)
    assert bars["save / DCP over s3fs"] == (6, True)
    assert bars["verified load / Run:ai's streamer"] == (1.5, True)
    assert bars["verified load / s3torchconnector"] == (4, True)
    assert bars["CPU seconds per GB, save / s3torchconnector"] == (0.5, True)
    assert bars["CPU seconds per GB, load / s3torchconnector"] == (0.25, True)
    assert bars["paced save, share of the limit"] == (pytest.approx(0.75), False)
    assert bars["MiB beyond the state, save of any size"] == (400, False)
    assert bars["MiB beyond the state, load of any size"] == (100, True)
    partial = "bytes of a partial load / 1.05 of what is wanted and 1 MiB a run"
    assert bars[partial] == (1, True)
    assert bars["time of a mirrored save / of one without a mirror"] == (1.0625, False)
    assert table.errors(found) == ["memory, dcp-s3fs, save: no space"]
    found.write(tmp_path / "objects.json", **table.derived(found))
    assert json.loads((tmp_path / "objects.json").read_text())["bars"][0]["is_met"]


def test_a_bar_that_was_not_measured_is_neither_met_nor_missed():
    empty = Samples({}, {}, {"size_bytes": 1, "limits": {"up_in_all": 1, "down_in_all": 1}})
    assert {one.is_met for one in table.bars(empty)} == {None}


def test_runs_are_stretches_of_neighbours_in_the_files(tmp_path):
    state = {f"t{index}": np.full(64, index, np.float32) for index in range(8)}
    penstock.save(tmp_path / "ckpt", state)
    files = sorted((tmp_path / "ckpt").iterdir())
    names = command.stored_names(files)
    assert sorted(names) == sorted(state)
    wanted = [names[index] for index in (0, 1, 3, 6, 7)]
    assert command.runs(files, wanted) == 3
    found = penstock.load(tmp_path / "ckpt", keys=wanted)
    assert_same(found, {name: state[name] for name in wanted})


def test_a_pace_is_a_schedule_that_saves_up_nothing():
    pace = Pace(1.0)
    assert pace.admit(500_000, 10.0) == pytest.approx(10.49, abs=0.02)
    assert pace.admit(500_000, 10.0) == pytest.approx(10.99, abs=0.02)
    assert pace.admit(500_000, 20.0) == pytest.approx(20.49, abs=0.02)


def echo(listener):
    """Answers a connection with what it sent, once all is there."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(all_of(connection))


def all_of(connection):
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def sent(port, content):
    """The bytes that come back, and the seconds that takes."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        received = all_of(connection)
    return received, time.monotonic() - begun


@pytest.mark.parametrize(
    ("limits", "least_seconds"),
    [
        (Limits(), 0),
        (Limits(up=10), 0.4),
        (Limits(down=10), 0.4),
        (Limits(up_in_all=20, down_in_all=20), 0.4),
        (Limits(latency_seconds=0.3), 0.3),
    ],
)
def test_a_proxy_changes_no_byte_counts_all_and_is_no_faster_than_it_may_be(limits, least_seconds):
    content = os.urandom(5_000_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with Proxy(listener.getsockname(), limits, CORES) as proxy:
            port = int(proxy.endpoint.rpartition(":")[2])
            found, seconds = sent(port, content)
            assert proxy.counts() == {"up": 5_000_000, "down": 5_000_000, "connections": 1}
    assert found == content
    # Up to the bytes that are made up for where a sleep ends late.
    assert seconds > 0.9 * least_seconds


def test_who_hangs_up_is_hung_up_on():
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Proxy(listener.getsockname(), Limits(), CORES) as proxy:
        port = int(proxy.endpoint.rpartition(":")[2])
        client = socket.create_connection(("127.0.0.1", port), timeout=30)
        server, _ = listener.accept()
        with server:
            server.settimeout(30)
            client.sendall(b"x")
            assert server.recv(1) == b"x"
            client.close()
            assert server.recv(1) == b""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_run_measures_all_places(tmp_path):
    try:
        program()
    except ClickException as error:
        pytest.skip(str(error))
    told = CliRunner().invoke(
        command.main,
        [
            *("--quick", "--rounds", "1", "--size-mib", "16", "--only", "penstock"),
            *("--directory", str(tmp_path / "place"), "--memory-directory", str(tmp_path)),
            *("--output", str(tmp_path / "results")),
        ],
        catch_exceptions=False,
    )
    assert told.exit_code == 0, told.output
    found = json.loads((tmp_path / "results" / "objects.json").read_text())
    assert [one for one in found["samples"] if one["error"]] == []
    operations = {(one["place"], one["operation"]) for one in found["samples"]}
    assert operations == {
        *((place, one) for place in PLACES for one in (SAVE, LOAD)),
        *((place, SAVE) for place in STORES),
        (PROXIED, PARTIAL),
    }
    to_server = [one for one in found["samples"] if one["place"] in PLACES]
    saves = [one for one in to_server if one["operation"] == SAVE]
    ends = {one["place"]: one["requests"].get("CompleteMultipartUpload", 0) for one in saves}
    # An object of one part is put as a whole.
    assert ends.pop("small") == 0
    assert set(ends.values()) == {1}
    assert list(Path(tmp_path / "place").iterdir()) == []
