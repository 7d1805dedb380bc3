"""Failure rates from Slurm's accounting and from logs of torchrun."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from click.testing import CliRunner

from penstock.cli import cli
from penstock.planning import read_job_log
from penstock.planning.models.failures import NODE_RATE

SACCT = """\
JobID|JobName|State|Elapsed|NNodes
101|pretrain|COMPLETED|2-03:04:05|64
102|pretrain|NODE_FAIL|18:00:00|64
103|pretrain|CANCELLED by 1000|05:00:00|64
104|pretrain|PREEMPTED|10:00:00|64
105|pretrain|FAILED|00:00:40|64
106|pretrain|FAILED|1-00:00:00|64
107|pretrain|TIMEOUT|3-00:00:00|64
108|pretrain|RUNNING|1-00:00:00|2K
108.batch|batch|RUNNING|1-00:00:00|1
109|pretrain|FROZEN|1-00:00:00|64
101|pretrain|COMPLETED|2-03:04:05|64
110|pretrain|OUT_OF_ME+|10:00|32
111|pretrain|PENDING|00:00:00|64
112|pretr"""

NEW = "/torch/distributed/elastic"
AGENT = f".venv/lib/python3.11/site-packages{NEW}/agent/server/api.py"

TORCHRUN = f"""\
I1231 20:00:00.962000 27513 site-packages/torch/distributed/launcher/api.py:257] Starting elastic_operator with launch configs:
I1231 20:00:00.962000 27513 site-packages/torch/distributed/launcher/api.py:257]   max_nodes                : 8
I1231 20:00:01.975000 27513 {AGENT}:911] [default] starting workers for entrypoint: python
I1231 20:00:06.373000 27513 {AGENT}:552]   group_world_size=4
step 100, loss 3.14, 2031-01-01 00:00:00
E1231 22:00:00.197000 27513 {NEW}/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 28190) of binary: python
I1231 22:00:00.198000 27513 {AGENT}:941] [default] Worker group FAILED. 3/3 attempts left; will restart worker group
E1231 22:00:31.197000 21 {NEW}/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 3 (pid: 2) of binary: python
I0101 01:00:00.198000 27513 {AGENT}:962] [default] Detected 1 new nodes from group_rank=0; will restart worker group
E0101 04:00:00.197000 27513 {NEW}/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 28190) of binary: python
I0101 06:00:00.425000 27513 {AGENT}:931] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.
I0101 06:00:01.425000 27513 {AGENT}:999] Done waiting for other agents. Elapsed: 0.0002 seconds
I0103 06:00:00.962000 27513 site-packages/torch/distributed/launcher/api.py:257] Starting elastic_operator with launch configs:
W0103 08:00:00.327000 27513 {AGENT}:688] Received Signals.SIGTERM death signal, shutting down workers
E0103 08:00:02.197000 27513 {NEW}/multiprocessing/api.py:1002] failed (exitcode: -15) local_rank: 1 (pid: 28190) of binary: python
"""  # noqa: E501

OLD = """\
[INFO] 2021-12-08 12:00:00,098 api: Starting elastic_operator with launch configs:
[INFO] 2021-12-08 12:00:01,150 api: [default] Rendezvous complete for workers. Result:
  restart_count=0
  group_world_size=2
[ERROR] 2021-12-08 15:00:00,098 api: failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: python
[INFO] 2021-12-08 15:00:00,099 api: [default] Worker group FAILED. 3/3 attempts left; will restart
"""

DEFAULT = f"""\
[2024-01-05 10:00:00,123] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 0 (pid: 9)
[2024-01-05 15:00:00,123] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 0 (pid: 9)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
E0105 15:00:00.000000 9 {NEW}/x.py:1] nothing
"""  # noqa: E501


def log(tmp_path, text, **more):
    path = tmp_path / "jobs.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_job_log(path, **more)


def test_jobs_of_slurm(tmp_path):
    found = log(tmp_path, SACCT)
    assert found.kind == "Slurm"
    assert found.failures == {"NODE_FAIL": 1, "FAILED": 1, "OUT_OF_MEMORY": 1}
    assert found.others == {"CANCELLED": 1, "PREEMPTED": 1, "TIMEOUT": 1}
    hours = 64 * (51 + 4 / 60 + 5 / 3600 + 18 + 5 + 10 + 24 + 72) + 2048 * 24 + 32 / 6
    assert found.node_seconds / 3600 == pytest.approx(hours)
    assert found.left_out == {
        "of jobs that failed within 2 min": 1,
        "of steps": 1,
        "of the unknown state FROZEN": 1,
        "repeated": 1,
        "torn": 1,
    }
    rate = found.node_rate()
    assert rate.origin == "measured"
    # Three failures; the median and the interval of their count are about 3.2, and 1 to 7.
    per = 1000 * 86_400 / found.node_seconds
    assert rate.value == pytest.approx(3.17 * per, rel=0.01)
    assert rate.bounds == (pytest.approx(1.08 * per, rel=0.1), pytest.approx(7.0 * per, rel=0.1))


@pytest.mark.parametrize("text", [SACCT, TORCHRUN, "\ufeff" + SACCT])
def test_a_pipe_is_read_once(tmp_path, text):
    expected = log(tmp_path, text)
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    try:
        found = read_job_log(f"/dev/fd/{reader}")
    finally:
        os.close(reader)
    assert replace(found, path=expected.path) == expected


def test_time_without_failures_lowers_the_published_rate(tmp_path):
    found = log(tmp_path, "JobID|State|Elapsed|NNodes\n1|COMPLETED|100-00:00:00|64\n")
    rate = found.node_rate()
    assert 0 < rate.value < NODE_RATE.value
    assert rate.is_guess
    assert "0 failures in 153,600.0 node-hours" in str(found)


def test_a_log_of_torchrun(tmp_path):
    found = log(tmp_path, TORCHRUN)
    assert (found.kind, found.nodes) == ("torchrun", 4)
    # The second line of the same failure is another agent's.
    assert found.failures == {"SIGKILL": 1, "exit code 1": 1}
    assert found.others == {"change of nodes": 1, "SIGTERM": 1}
    # Ten hours over New Year, two hours later on; between them nothing ran.
    assert found.node_seconds / 4 == pytest.approx(12 * 3600, abs=5)
    assert found.left_out == {}


@pytest.mark.parametrize(("text", "hours"), [(OLD, 2 * 3), (DEFAULT, 2 * 5)])
def test_logs_of_older_versions(tmp_path, text, hours):
    found = log(tmp_path, text, nodes=2)
    assert found.node_seconds / 3600 == pytest.approx(hours, abs=0.01)
    assert set(found.failures) == {"exit code 1"}


def test_clocks_that_jump_and_gaps_are_stated(tmp_path):
    line = (
        "[2024-{} 10:00:00,123] torch.distributed.elastic.x: failed (exitcode: 1) local_rank: 0\n"
    )
    days = ("01-01", "01-03", "03-01", "02-20", "02-21", "99-99")
    found = log(tmp_path, "".join(line.format(day) for day in days), nodes=1)
    assert found.node_seconds == 3 * 86_400
    assert found.left_out == {
        "after a gap of more than 7 days": 1,
        "before which the clock went back": 1,
        "without a valid time": 1,
    }


@pytest.mark.parametrize("text", [TORCHRUN, OLD, DEFAULT])
@pytest.mark.parametrize("prefix", ["0: ", "  12: "])
def test_numbers_of_tasks_are_skipped(tmp_path, text, prefix):
    """`srun -l` writes them before each line."""
    lines = "".join(prefix + line for line in text.splitlines(keepends=True))
    assert log(tmp_path, lines, nodes=4) == log(tmp_path, text, nodes=4)


def test_no_hour_is_counted_twice_after_the_clock_went_back(tmp_path):
    line = (
        "[2024-01-01 {}:00,123] torch.distributed.elastic.x: failed (exitcode: 1) local_rank: 0\n"
    )
    found = log(
        tmp_path, "".join(map(line.format, ("01:00", "03:00", "02:10", "02:20", "05:00"))), nodes=1
    )
    assert found.node_seconds == 4 * 3600
    # The failure after the step back is one of its own.
    assert found.failures == {"exit code 1": 5}
    assert found.left_out == {"before which the clock went back": 1}


ERROR_FILE = json.dumps(
    {"message": {"message": "ValueError: boom", "extraInfo": {"timestamp": "1795815702"}}}
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither Slurm's accounting nor a log of torchrun"),
        ("JobID  State  Elapsed\n1  FAILED  1:00\n", "sacct -XPD"),
        (b"\0\xff" * 99_999, "neither"),
        ("JobID|State|Elapsed\n1|FAILED|1:00\n", "the column NNodes is missing"),
        ("JobID|State|Elapsed|NNodes\n", "no job of it has run"),
        ("JobID|State|Elapsed|NNodes\n1|FAILED|1:00|2\n", "no job of it has run"),
        ("JobID|State|Elapsed|NNodes\n1|FAILED|soon|2\n2|FA\n", "2 lines are torn, and 0 whole"),
        (SACCT + "\n" + TORCHRUN, "are mixed"),
        (ERROR_FILE, "one failure and no running time"),
        (DEFAULT, "give --nodes"),
        (OLD.splitlines()[0] + "\n  group_world_size=2\n", "no running time"),
        (
            "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 3/3\n"
            "  group_world_size=2\n",
            "no line has a time",
        ),
    ],
)
def test_files_that_say_nothing_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=r"jobs\.txt: ") as caught:
        log(tmp_path, text)
    assert message in str(caught.value)


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, ["plan", "--save-seconds", "60", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_plan_takes_rate_and_nodes_from_the_log(tmp_path):
    path = tmp_path / "jobs.txt"
    path.write_text(SACCT)
    result = json.loads(run("--job-log", path, "--json"))
    assert result["job_log"]["failures"]["NODE_FAIL"] == 1
    assert result["inputs"]["mtbf"]["origin"] == "measured"
    rate = result["job_log"]["node_rate"]["value"]
    # The newest job that ran has 32 nodes.
    assert result["inputs"]["mtbf"]["value"] == pytest.approx(1000 * 86_400 / rate / 32)
    more = json.loads(run("--job-log", path, "--nodes", 64, "--json"))
    assert more["failures_per_day"] == pytest.approx(2 * result["failures_per_day"])
    assert "failures (1 NODE_FAIL, 1 FAILED, 1 OUT_OF_MEMORY)" in run("--job-log", path)


@pytest.mark.parametrize("further", [("--mtbf", "1h"), ("--node-rate", 4)])
def test_two_failure_rates_are_refused(tmp_path, further):
    path = tmp_path / "jobs.txt"
    path.write_text(SACCT)
    assert "leave out --mtbf" in run("--job-log", path, *further, code=2)


def test_a_log_that_is_not_there_is_an_error(tmp_path):
    assert "No such file" in run("--job-log", tmp_path / "none", code=1)
