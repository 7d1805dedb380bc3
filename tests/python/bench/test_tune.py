"""`penstock bench io --tune`: what it finds, what it makes of noise, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import types

import pytest
from test_bench_io import bench_io

import penstock
from penstock.errors import StorageError
from penstock.options import DEFAULTS
from penstock_bench.cli.tune import _check_memory, _print
from penstock_bench.harness.running import BenchError
from penstock_bench.results.results import Results
from penstock_bench.suites.io import trials, tune
from penstock_bench.suites.io.search import OutOfTime, Search, Trial, decide

DEFAULT = penstock.Options(**DEFAULTS)
AXES = {
    "io_threads": [None, 1, 2, 8],
    "extent_bytes": [None, 2 << 20, 8 << 20],
    "queue_depth": [None, 4, 32],
    "engine": ["auto", "threads"],
}


class Device:
    """Answers for a device that is as fast as a function of the settings says.

    Args:
        seconds: Of a save and a load.
        noise: By how much of itself a measurement is off, as a standard deviation.
        trials_max: After so many there is no time left.
    """

    def __init__(self, seconds, noise=0.0, seed=0, trials_max=10_000):
        self.seconds = seconds
        self.noise = noise
        self.random = random.Random(seed)
        self.trials_max = trials_max
        self.measured = []

    def measure(self, candidates):
        assert candidates[0] == DEFAULT
        assert len(set(candidates)) == len(candidates)
        return {one: self.trial(one) for one in candidates}

    def trial(self, options):
        if len(self.measured) == self.trials_max:
            raise OutOfTime
        self.measured.append(options)
        seconds = self.seconds(options)
        if seconds is None:
            return Trial(math.inf, math.inf, 0, None)
        save, load = (one * max(0.1, self.random.gauss(1, self.noise)) for one in seconds)
        return Trial(save, load, 1, (options.io_threads or 4, options.extent_bytes or 1 << 20,
                                     options.queue_depth or 16, options.engine))  # fmt: skip

    def search(self):
        made = Search(self.measure, DEFAULT)
        return made, made.run(AXES)


def hill(options):
    """Best with 8 threads and 32 in flight; extents do not matter."""
    seconds = 1.0
    seconds *= {8: 0.7, 2: 1.2, 1: 1.5}.get(options.io_threads, 1.0)
    seconds *= {32: 0.8, 4: 1.3}.get(options.queue_depth, 1.0)
    return seconds, 2 * seconds


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_a_device_is_found_through_noise_and_nothing_else_is_set(seed):
    device = Device(hill, noise=0.03, seed=seed)
    found, is_finished = device.search()
    assert is_finished
    assert found.best == dataclasses.replace(DEFAULT, io_threads=8, queue_depth=32)
    # Not the whole product.
    assert len(found.tried) < 20
    verdict = decide([(device.trial(DEFAULT), device.trial(found.best)) for _ in range(7)])
    assert verdict.is_better
    assert verdict.gain.median == pytest.approx(1 / 0.56, rel=0.1)


def test_what_is_best_may_depend_on_another_setting():
    def seconds(options):
        good = (options.io_threads, options.extent_bytes) == (1, 8 << 20)
        depth = 0.8 if options.queue_depth == 4 else 1.0
        return (0.5 if good and options.queue_depth == 4 else depth,) * 2

    # With few requests in flight, which comes first, only the second look finds the rest.
    axes = {"io_threads": [None, 1], "extent_bytes": [None, 8 << 20], "queue_depth": [None, 4]}
    device = Device(lambda o: seconds(dataclasses.replace(o, io_threads=1)))
    found = Search(device.measure, DEFAULT)
    assert found.run(axes)
    assert (found.best.queue_depth, found.best.extent_bytes) == (4, 8 << 20)


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_noise_is_not_taken_for_a_gain(noise):
    wrong = 0
    for seed in range(200):
        device = Device(lambda options: (1.0, 1.0), noise=noise, seed=seed)
        found, _ = device.search()
        if found.best != DEFAULT:
            rounds = [(device.trial(DEFAULT), device.trial(found.best)) for _ in range(7)]
            wrong += decide(rounds).is_better
    # Once in 128 times all of seven rounds are ahead by chance.
    assert wrong <= 6


def test_saves_are_not_made_faster_at_the_cost_of_loads():
    def seconds(options):
        return (0.5, 1.3) if options.io_threads == 8 else (1.0, 1.0)

    device = Device(seconds)
    found, _ = device.search()
    assert found.best == DEFAULT
    chosen = dataclasses.replace(DEFAULT, io_threads=8)
    assert not decide([(device.trial(DEFAULT), device.trial(chosen)) for _ in range(7)]).is_better


@pytest.mark.parametrize(
    ("gains", "is_better"),
    [
        ([1.1] * 7, True),
        ([1.1] * 6 + [0.99], False),
        ([1.04] * 7, False),
        ([1.01] * 3 + [1.2] * 4, True),
    ],
)
def test_better_is_ahead_in_every_round_and_by_more_than_the_margin(gains, is_better):
    usual = Trial(1.0, 1.0, 1, ())
    verdict = decide([(usual, Trial(1 / gain, 1 / gain, 1, ())) for gain in gains])
    assert verdict.is_better is is_better
    assert (verdict.gain.least, verdict.gain.most) == pytest.approx((min(gains), max(gains)))


def test_what_comes_out_the_same_or_is_refused_is_measured_once():
    def seconds(options):
        # An engine that is not to be had.
        return None if options.engine == "threads" else (1.0, 1.0)

    device = Device(seconds)
    made = Search(device.measure, DEFAULT)
    # The second is what the default comes to.
    assert made.run({"engine": ["auto", "threads"], "queue_depth": [None, 16]})
    assert made.best == DEFAULT
    assert [one.engine for one in device.measured].count("threads") == 1
    assert [one.queue_depth for one in device.measured].count(16) == 1


def test_when_time_runs_out_the_best_so_far_stands():
    whole = Device(hill)
    whole.search()
    for trials_max in range(len(whole.measured)):
        found, is_finished = Device(hill, trials_max=trials_max).search()
        assert not is_finished
        assert sum(hill(found.best)) <= sum(hill(DEFAULT))


# On a real disk.


def left(directory):
    return list(directory.glob(".penstock*"))


def tuned(directory, **options):
    given = {"seconds": 200.0, "rounds": 7, "seed": 1, "progress": lambda passed, text: None}
    return tune.tune(directory, 1 << 20, **{**given, **options})


@pytest.fixture
def told_seconds(monkeypatch):
    """Real saves and loads, of which the reports tell other times."""

    def install(seconds):
        real = trials.Trials._run

        def run(self, options):
            reports = real(self, options)
            return tuple(dataclasses.replace(one, seconds=seconds(options)) for one in reports)

        monkeypatch.setattr(trials.Trials, "_run", run)

    return install


def test_what_is_better_is_written_as_options_that_load(disk_path, tmp_path, told_seconds):
    told_seconds(lambda options: 0.5 if options.queue_depth == 4 else 1.0)
    found = tuned(disk_path)
    assert found.is_finished
    assert found.tuned == found.best == {"queue_depth": 4}
    assert left(disk_path) == []
    found.write(tmp_path / "options.json")
    document = json.loads((tmp_path / "options.json").read_text())
    assert set(document) == {"queue_depth", "about"}
    about = document["about"]
    assert about["gain_times_default"] == {"median": 2.0, "least": 2.0, "most": 2.0}
    assert about["directory"] == str(disk_path)
    assert about["settings_tried"] == found.tried > 5
    assert {"measured", "device", "host"} <= set(about)
    options = penstock.Options.read(tmp_path / "options.json")
    assert options == penstock.Options(queue_depth=4)
    assert penstock.save(tmp_path / "ckpt", {"x": bytes(1 << 20)}, options=options).queue_depth == 4


def test_the_defaults_and_the_rest_are_measured_in_the_same_rounds(disk_path, told_seconds):
    told_seconds(lambda options: 1.0)
    found = tuned(disk_path)
    assert (found.tuned, found.verdict) == ({}, None)
    assert found.is_finished
    by_round = {}
    for one in found.results.measurements:
        by_round.setdefault(one.round_index, []).append(one.case)
    assert all("save, defaults" in cases for cases in by_round.values())
    assert all(case in found.results.cases for cases in by_round.values() for case in cases)
    others = {case for cases in by_round.values() for case in cases} - {"save, defaults"}
    assert any("engine=threads" in case for case in others)


def test_the_environment_does_not_stand_in_for_the_defaults(disk_path, told_seconds, monkeypatch):
    monkeypatch.setenv("PENSTOCK_QUEUE_DEPTH", "4")
    monkeypatch.setenv("PENSTOCK_STAGING_BYTES", str(32 << 20))
    seen = []
    told_seconds(lambda options: seen.append(options) or 1.0)
    found = tuned(disk_path)
    assert seen[0].queue_depth is None
    assert {one.staging_bytes for one in seen} == {32 << 20}
    assert found.tuned == {}


def test_no_save_begins_that_there_is_no_time_for(disk_path, monkeypatch):
    """A clock on which a trial takes a second, and nothing else any time."""
    now, begun_at = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(trials, "time", clock)
    monkeypatch.setattr(tune, "time", clock)

    def save(*arguments, **options):
        begun_at.append(now[0])
        now[0] += 1
        return real(*arguments, **options)

    real = penstock.save
    monkeypatch.setattr(penstock, "save", save)
    tuned(disk_path, seconds=20.0)
    assert begun_at == [float(number) for number in range(len(begun_at))]
    # The last has a second as well, and not all were left out.
    assert 1 < len(begun_at) <= 20
    with pytest.raises(BenchError, match=r"within 0\.001 s no settings can be compared"):
        tuned(disk_path, seconds=0.001)
    assert left(disk_path) == []


def test_defaults_that_fail_are_an_error_that_says_why(disk_path, monkeypatch):
    def refuse(*_, **__):
        raise StorageError("the disk is on fire", path="p", errno=5)

    monkeypatch.setattr(penstock, "save", refuse)
    with pytest.raises(BenchError, match="with the defaults: the disk is on fire"):
        tuned(disk_path)
    assert left(disk_path) == []


def test_the_command_writes_a_file_and_results_of_the_usual_form(disk_path, tmp_path):
    out, output = tmp_path / "options.json", tmp_path / "results.json"
    done = bench_io(
        disk_path, "--tune", out, "--size", "1M", "--tune-seconds", 20, "--json",
        "--output", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = Results.read(output)
    assert json.loads(done.stdout) == results.as_json()
    assert results.kind == "tune"
    assert {"call", *results.settings["tuned"]} <= {"call", *trials.AXES}
    options = penstock.Options.read(out)
    for name, value in results.settings["tuned"].items():
        assert getattr(options, name) == value
    calls = {one["call"] for one in results.cases.values()}
    assert calls == {"save", "load"}
    assert all(one.seconds > 0 and one.nbytes >= 1 << 20 for one in results.measurements)
    assert left(disk_path) == []


# It compares what it measures.
@pytest.mark.alone
def test_the_command_tells_what_it_found_in_eighty_columns(disk_path, tmp_path):
    for seconds in (4, 60):
        done = bench_io(
            disk_path, "--tune", tmp_path / "o.json", "--size", "1M", "--tune-seconds", seconds,
            env={**os.environ, "COLUMNS": "80"},
        )  # fmt: skip
        # On a busy machine nothing can be decided in so little time.
        if "allow more time" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    said = " ".join(done.stdout.split())
    assert "settings tried in" in said
    assert ("or PENSTOCK_OPTIONS" in said) != ("says so and sets nothing" in said)


@pytest.mark.slow
@pytest.mark.parametrize("is_better", [True, False])
def test_the_verdict_is_told_with_both_and_what_it_means(
    disk_path, tmp_path, told_seconds, monkeypatch, capsys, is_better
):
    monkeypatch.setenv("COLUMNS", "80")
    is_deciding = []
    real = trials.Trials.decide

    def decide_and_tell(*given):
        is_deciding.append(True)
        return real(*given)

    monkeypatch.setattr(trials.Trials, "decide", decide_and_tell)

    def seconds(options):
        # Settings that are not better may be ahead before the decision.
        is_ahead = options.queue_depth == 4 and (is_better or not is_deciding)
        return 0.5 if is_ahead else 1.0

    told_seconds(seconds)
    found = tuned(disk_path)
    _print(found, tmp_path / "options.json")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert "best found: queue_depth=4" in said
    assert (found.tuned == {"queue_depth": 4}) == is_better
    assert ("the defaults are as good" in said) != is_better


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pattern", "read"], "--pattern goes without --tune"),
        (["--preset", "quick"], "--preset goes without --tune"),
        (["--no-fsync"], "--no-fsync goes without --tune"),
        (["--tune-seconds", "0"], "1"),
        (["--size", "900T"], "GB free"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(disk_path, tmp_path, arguments, message):
    done = bench_io(disk_path, "--tune", tmp_path / "options.json", *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert left(disk_path) == list(tmp_path.glob("options.json")) == []


def test_a_state_that_memory_has_no_room_for_is_refused_with_the_numbers():
    with pytest.raises(Exception, match=r"take 2.*GB of memory, and .* are free: choose a smaller"):
        _check_memory(1 << 40)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(disk_path):
    done = bench_io(disk_path, "--tune", disk_path / "nowhere" / "options.json")
    assert done.returncode == 2
    assert "cannot be written" in " ".join(done.stderr.split())


def test_after_ctrl_c_nothing_is_left(disk_path, tmp_path):
    command = [sys.executable, "-m", "penstock", "bench", "io", str(disk_path)]
    command += ["--tune", str(tmp_path / "options.json"), "--size", "100M"]
    with subprocess.Popen(command, start_new_session=True) as child:
        deadline = time.monotonic() + 240
        while not list(disk_path.glob(".penstock-bench-*/checkpoint/*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait(240) == 130
    assert left(disk_path) == []
    assert not (tmp_path / "options.json").exists()
