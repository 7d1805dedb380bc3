"""`penstock simulate`, and the table of published figures."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from penstock.cli import cli
from penstock_bench.suites import published


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, ["simulate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_presets_are_listed():
    assert "llama-3-405b" in run()
    assert "arXiv" in run("--list")
    assert len(json.loads(run("--list", "--json"))["presets"]) >= 8


def test_values_are_changed_and_compared():
    result = json.loads(
        run("rsc-1", "--set", "nodes=500", "--compare", "interval_seconds=300,3600",
            "--runs", 50, "--json")
    )  # fmt: skip
    first, second = result["scenarios"]
    assert (first["name"], second["name"]) == ("300", "3600")
    assert first["goodput"] > second["goodput"]
    assert first["mtbf_seconds"] == pytest.approx(86_400_000 / 6.5 / 500)
    said = run("rsc-1", "--compare", "interval_seconds=300,3600", "--runs", 5)
    assert said.splitlines()[1].startswith("interval_seconds")
    assert max(map(len, said.splitlines()[:5])) <= 80


def test_failures_are_replayed_and_a_timeline_is_written(tmp_path):
    failures, trace = tmp_path / "failures", tmp_path / "trace.json"
    failures.write_text("0\n5000\n20000\n")
    run("rsc-1", "--failures", failures, "--trace", trace, "--runs", 5, "--days", 2)
    assert json.loads(trace.read_text())["otherData"]["failures"] > 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "presets are"),
        (("nowhere.toml",), "No such file"),
        (("rsc-1", "--set", "nodes"), "KEY=VALUE"),
        (("rsc-1", "--set", "size=3"), "neither a cluster nor a job"),
        (("rsc-1", "--compare", "nodes"), "KEY=A,B"),
        (("rsc-1", "rsc-2", "--compare", "nodes=1,2"), "one scenario"),
        (("rsc-1", "--failures", "/nowhere"), "No such file"),
        (("rsc-1", "--set", "nodes_min=1", "--failures", __file__), "no column of times"),
        (("rsc-1", "--failures-where", "System", "--failures", __file__), "KEY=VALUE"),
        (("rsc-1", "--runs", "0"), "ten million"),
        (("rsc-1", "--compare", "slowdown=0.1,3"), "Meta RSC-1, 2,000 nodes: slowdown = 3"),
        (
            ("rsc-1", "--set", "interval_seconds=1", "--compare", "save_seconds=50"),
            "Meta RSC-1, 2,000 nodes with save_seconds=50: interval_seconds = 1",
        ),
        (("rsc-1", "--days", "nan"), "ten years"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    assert message in run(*arguments, code=2)


POLICIES = """
[cluster]
nodes = 16
failures_per_1000_node_days = 50
spares = 1
repair_seconds = "6h"
shared_write = "10GB/s"
shared_read = "10GB/s"
link = "5GB/s"

[job]
checkpoint_bytes = "200GB"

[policies.often]
interval_seconds = 300

[policies.hourly]
interval_seconds = "1h"

[policies.elastic]
nodes_min = 12
reshard_seconds = 60
"""


def test_policies_are_compared_in_one_table(tmp_path):
    (tmp_path / "cluster.toml").write_text(POLICIES)
    result = json.loads(run(tmp_path / "cluster.toml", "--runs", 20, "--json"))
    assert [row["name"] for row in result["scenarios"]] == ["often", "hourly", "elastic"]
    said = run(tmp_path / "cluster.toml", "--runs", 5)
    assert said.splitlines()[1].startswith("policy")
    assert "missing" in said


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("interval = 3", "cluster.toml: policy bad: interval: neither a cluster nor a job"),
        ("slowdown = 3", "cluster.toml: policy bad: slowdown = 3"),
        ('interval_seconds = "soon"', "cluster.toml: policy bad: interval_seconds: 'soon'"),
        ("interval_seconds = 1", "cluster: policy bad: interval_seconds = 1"),
    ],
)
def test_a_wrong_policy_is_named(tmp_path, policy, message):
    (tmp_path / "cluster.toml").write_text(f"{POLICIES}\n[policies.bad]\n{policy}\n")
    assert message in run(tmp_path / "cluster.toml", "--runs", 2, code=2)


def test_jobs_of_a_cluster_have_a_row_each(tmp_path):
    jobs = "".join(f'[[jobs]]\nname = "{name}"\nnodes = 8\n' for name in "ab")
    (tmp_path / "cluster.toml").write_text(POLICIES.partition("[policies")[0] + jobs)
    result = json.loads(run(tmp_path / "cluster.toml", "--runs", 2, "--days", 5, "--json"))
    assert [row["name"] for row in result["scenarios"]] == ["a", "b"]
    assert (
        run(tmp_path / "cluster.toml", "--runs", 2, "--days", 5).splitlines()[1].startswith("job")
    )
    assert "for a job on all nodes" in run(
        tmp_path / "cluster.toml", "--trace", tmp_path / "t.json", "--runs", 1, code=2
    )


def test_a_log_with_columns_is_replayed(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("time,node,duration\n0,a,1h\n90000,b,2h\n50000,a,1h\n")
    said = run("rsc-1", "--failures", log, "--runs", 5, "--days", 2)
    assert "3 failures of 2 nodes" in said
    assert "line 4" in said
    result = json.loads(run("rsc-1", "--failures", log, "--failures-where", "node=a",
                            "--runs", 5, "--json"))  # fmt: skip
    assert result["notes"][0].startswith("2 failures of 1 nodes")


def test_a_timeline_is_one_of_the_runs(tmp_path):
    """With the repairs of the log as well: each outlasts a gap, and one node is spare."""
    log, trace = tmp_path / "log.csv", tmp_path / "trace.json"
    log.write_text("time,duration\n" + "".join(f"{day}e5,5d\n" for day in range(1, 9)))
    arguments = ("rsc-1", "--failures", log, "--set", "spares=1", "--runs", 1, "--json")
    row = json.loads(run(*arguments, "--trace", trace))["scenarios"][0]
    assert json.loads(trace.read_text())["otherData"]["down"] == row["down"] > 0.5


def test_published_figures_are_reproduced():
    """All 16 rows within 10 %, from the sources' inputs alone."""
    rows = list(published.rows())
    assert {row.number for row in rows} == set(range(1, 17))
    assert [row.what for row in rows if not row.is_reproduced] == []
