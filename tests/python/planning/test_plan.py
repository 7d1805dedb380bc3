"""`penstock plan` and `penstock.planning.advise`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from penstock.cli import cli
from penstock.planning import Drives, Prices, Training, advise, cluster_of, given, shares
from penstock.planning.records import history


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def training(seconds=60.0, stall=None, **more):
    stall = seconds if stall is None else stall
    return Training(given(stall, "s", "test"), given(seconds, "s", "test"), **more)


def test_numbers_alone():
    result = json.loads(
        run("--save-seconds", 60, "--restart-seconds", 120, "--mtbf", "1h", "--json")
    )
    assert result["interval_seconds"] == pytest.approx(677.9, abs=0.1)
    parts = shares(result["interval_seconds"], 60, 3600, restart_seconds=120, down_seconds=60)
    assert result["goodput"] == pytest.approx(parts.goodput)
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert result["inputs"]["mtbf"]["origin"] == "given"
    assert result["guesses"] == ["detection"]
    assert result["inputs"]["detection"]["origin"] == "assumed"


def test_what_is_said_names_the_guesses():
    said = run("--save-seconds", "90", "--nodes", 64)
    assert said.startswith("save every")
    guesses = [line for line in said.splitlines() if "a guess" in line]
    assert [line.split()[0] for line in guesses] == ["restart", "mtbf", "detection"]


def test_numbers_given_win_over_the_history(tmp_path):
    history.append(str(tmp_path), {"kind": "start"})
    for _ in range(3):
        times = {"seconds": 40.0, "stall_seconds": 2.0}
        history.append(str(tmp_path), {"kind": "save", **times, "bytes": 7e9, "ranks": 12})
    result = json.loads(run(tmp_path, "--nodes", 8, "--json"))
    assert result["inputs"]["durable"]["value"] == 40
    assert result["inputs"]["stall"]["origin"] == "measured"
    result = json.loads(run(tmp_path, "--nodes", 8, "--save-seconds", 50, "--json"))
    assert result["inputs"]["durable"]["value"] == 50
    assert result["inputs"]["stall"]["value"] == 2
    assert result["bytes_per_day"] == pytest.approx(7e9 * result["saves_per_day"])
    assert advise(tmp_path, cluster=cluster_of(nodes=8)).inputs["durable"].value == 40
    # Numbers given complete the history, from Python too; and its ranks are on two nodes.
    advice = advise(tmp_path, training=Training(step=given(2.0, "s", "test")))
    assert (advice.inputs["durable"].value, advice.inputs["step"].value) == (40, 2)
    assert advice.cluster.nodes == 2
    assert advice.with_nodes(64).goodput.value < advice.goodput.value


@pytest.mark.parametrize(("given_seconds", "expected"), [(1.0, (1, 1)), (50.0, (2, 50))])
def test_a_save_that_is_shorter_than_the_stall_of_the_history(tmp_path, given_seconds, expected):
    history.append(str(tmp_path), {"kind": "save", "seconds": 40.0, "stall_seconds": 2.0})
    run = Training(durable=given(given_seconds, "s", "test"))
    inputs = advise(tmp_path, training=run, cluster=cluster_of(nodes=8)).inputs
    assert (inputs["stall"].value, inputs["durable"].value) == expected


def test_what_if():
    result = json.loads(
        run("--save-seconds", 60, "--nodes", 64, "--what-if", "nodes=1024,16384", "--json")
    )
    rows = [result, *result["what_if"]]
    assert [row.get("nodes") for row in rows] == [None, 1024, 16384]
    assert [row["goodput"] for row in rows] == sorted((r["goodput"] for r in rows), reverse=True)


def test_storage_of_a_plan():
    advice = advise(
        training=training(save_bytes=given(1e12, "bytes", "test")),
        cluster=cluster_of(
            mtbf_seconds=86_400,
            drives=Drives(2, 7.68e12, 14e15, write_amplification=2.0),
            prices=Prices(0.02, 0.005),
            keep=3,
        ),
    )
    assert advice.capacity_bytes == 4e12
    assert advice.bytes_per_day == pytest.approx(advice.saves_per_day * 1e12)
    assert advice.drive_writes_per_day == pytest.approx(advice.bytes_per_day / 7.68e12)
    assert advice.drive_days == pytest.approx(14e15 / advice.bytes_per_day)
    assert advice.dollars_per_month > 3 * 1e12 / 1e9 * 0.02
    assert advice.notes == ()


def test_saves_that_do_not_fit_are_said():
    advice = advise(
        training=training(save_bytes=given(4e12, "bytes", "test")),
        cluster=cluster_of(mtbf_seconds=86_400, drives=Drives(1, 7.68e12)),
    )
    assert any("do not fit" in note for note in advice.notes)


def test_one_save_is_in_flight_at_a_time():
    advice = advise(training=training(900, stall=1), cluster=cluster_of(mtbf_seconds=3600))
    assert advice.interval.value == pytest.approx(900)
    assert any("longer than the best interval" in note for note in advice.notes)


def test_a_synchronous_save_has_nothing_beside_it():
    assert "slowdown" not in advise(training=training(), cluster=cluster_of(nodes=8)).guesses
    assert "slowdown" in advise(training=training(60, 1), cluster=cluster_of(nodes=8)).guesses


def test_the_ends_of_the_inputs_bound_the_result():
    advice = advise(training=training(), cluster=cluster_of(nodes=512))
    low, high = advice.interval.bounds
    assert low < advice.interval.value < high
    low, high = advice.goodput.bounds
    assert low < advice.goodput.value < high


KNOWN = ("--save-seconds", 60, "--mtbf", 60, "--save-bytes", 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --save-seconds"),
        (("--save-seconds", 60), "give --nodes or --mtbf"),
        (("--save-seconds", 60, "--nodes", "9" * 400), "one to a billion"),
        ((*KNOWN, "--drives", 1, "--drive-bytes", 0), "capacity_bytes of drives = 0.0"),
        (
            (*KNOWN, "--drives", 1, "--drive-bytes", 9, "--drive-endurance", 0),
            "endurance_bytes of drives = 0.0: expected more than 0",
        ),
        ((*KNOWN, "--dollars-per-gb-month", -5), "gb_month of prices = -5.0: expected 0 or more"),
        ((*KNOWN, "--dollars-per-gb-month", "nan"), "gb_month of prices = nan"),
        (
            (*KNOWN, "--dollars-per-gb-month", 1, "--dollars-per-1000-puts", "inf"),
            "thousand_puts of prices = inf",
        ),
        (("--save-seconds", 60, "--mtbf", 0), "more than 0 s"),
        (("--save-seconds", 0, "--mtbf", 60), "more than 0 s"),
        (("--save-seconds", "60GB", "--mtbf", 60), "but a size"),
        (("--save-seconds", -3, "--mtbf", 60), "0 or more"),
        (("--save-seconds", 60, "--stall-seconds", 90, "--mtbf", 60), "longer than the whole save"),
        (("--save-seconds", 60, "--nodes", 4, "--node-rate", 0), "nothing ever fails"),
        (("--save-seconds", 60, "--nodes", 4, "--node-rate", "nan"), "finite"),
        (("--save-seconds", 60, "--mtbf", "1h", "--slowdown", 2, "--stall-seconds", 1), "no share"),
        (("--save-seconds", 60, "--mtbf", "1h", "--drives", 2), "--drive-bytes"),
        (("--save-seconds", 60, "--mtbf", "1h", "--what-if", "nodes=9"), "cannot be scaled"),
        (("--save-seconds", 60, "--nodes", 4, "--what-if", "racks=9"), "nodes="),
        (("--save-seconds", 60, "--nodes", 4, "--what-if", "nodes=²"), "nodes="),
        (("--save-seconds", 60, "--nodes", 4, "--what-if", "nodes=" + "9" * 5000), "nodes="),
        (("/nowhere", "--mtbf", "1h"), "no such directory"),
        (("s3://bucket/run", "--mtbf", "1h"), "keeps no history"),
    ],
)
def test_bad_numbers_are_named(arguments, message):
    assert message in run(*arguments, code=2)


def test_a_store_without_saves_is_named(tmp_path):
    assert f"{tmp_path}/history.jsonl has no saves" in run(tmp_path, "--mtbf", "1h", code=2)
    with pytest.raises(ValueError, match="has no saves"):
        advise(tmp_path, cluster=cluster_of(nodes=8))
    with pytest.raises(ValueError, match="nothing is known of saves"):
        advise(cluster=cluster_of(nodes=8))
