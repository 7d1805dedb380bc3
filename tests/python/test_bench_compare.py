"""Which run is slower: verdicts on rates that are known."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from penstock.bench.cases import Case
from penstock.bench.compare import MARGIN, compare
from penstock.bench.results import Measurement, Results, ResultsError


def results(rates, case=None):
    """A run whose measurements have these rates, GB/s."""
    case = case or Case()
    made = Results(kind="io", machine={}, disk={}, settings={})
    made.cases = {case.label: case.as_json()}
    made.measurements = [
        Measurement(
            case=case.label, by="penstock", round_index=number, nbytes=10**9, seconds=1 / rate
        )
        for number, rate in enumerate(rates)
    ]
    return made


def noisy(generator, rate, rounds=9, spread=0.02):
    return rate * (1 + spread * generator.standard_normal(rounds))


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "same"), (0.8, "slower"), (0.9, "slower"), (1.2, "faster")]
)
def test_a_run_is_called_what_it_is(factor, verdict):
    generator = np.random.default_rng(5)
    before, after = noisy(generator, 2.0), noisy(generator, 2.0 * factor)
    (found,) = compare(results(before), results(after))
    assert found.verdict == verdict
    assert found.low <= found.ratio <= found.high
    assert found.ratio == pytest.approx(np.median([two / one for two in after for one in before]))
    medians = np.median(before), np.median(after)
    assert (found.before, found.after) == pytest.approx(medians)


def shared_disk(generator, factor, rounds=15):
    """Rates of two cases that differ by 5 %, and some are far too slow."""
    made = results([])
    for case in (Case(), Case(pattern="read")):
        rates = 2.0 * factor * np.exp(0.05 * generator.standard_normal(rounds))
        rates *= np.where(generator.random(rounds) < 0.05, generator.uniform(0.3, 0.9, rounds), 1)
        one = results(rates, case)
        made.cases |= one.cases
        made.measurements += one.measurements
    return made


def is_alarm(before, after):
    return any(one.verdict == "slower" for one in compare(before, after))


def test_alarms_are_neither_false_nor_missed():
    generator = np.random.default_rng(1)
    false, noticed = 0, 0
    for _ in range(20):
        before = shared_disk(generator, 1.0)
        false += is_alarm(before, shared_disk(generator, 1.0))
        # Each request takes a tenth longer.
        noticed += is_alarm(before, shared_disk(generator, 1 / 1.1))
    assert false == 0
    assert noticed >= 19


def test_noise_alone_is_no_alarm_however_far_the_medians_are_apart():
    before = [2.0, 3.0, 1.0, 2.5, 1.5, 2.2, 1.1]
    after = [1.7, 2.7, 0.9, 2.4, 1.4, 2.1, 1.2]
    (found,) = compare(results(before), results(after))
    assert found.ratio < 1 - MARGIN
    assert found.verdict == "unclear"


def test_less_than_the_margin_is_no_alarm_however_certain():
    (found,) = compare(results([2.0, 2.001, 1.999] * 5), results([1.94, 1.941, 1.939] * 5))
    assert found.high < 1
    assert found.verdict == "same"


def test_too_few_rounds_say_nothing():
    (found,) = compare(results([1.0, 1.0]), results([0.5, 0.5]))
    assert found.verdict == "missing"


def test_what_could_not_be_measured_does_not_pass(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    results([2.0] * 7).write(a)
    failed = results([2.0] * 7)
    for one in failed.measurements:
        one.error = "no space"
    failed.write(b)
    done = bench_compare(a, b)
    assert done.returncode == 1
    assert "fewer than 3 rounds" in done.stdout


def test_runs_that_have_nothing_in_common_cannot_be_compared():
    with pytest.raises(ResultsError, match="no case in common"):
        compare(results([1.0]), results([1.0], Case(pattern="read")))


def bench_compare(*arguments):
    command = [sys.executable, "-m", "penstock", "bench", "compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_exit_code_is_the_gate(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    results([2.0, 2.01, 1.99, 2.0, 2.0]).write(a)
    results([1.5, 1.51, 1.49, 1.5, 1.5]).write(b)
    slower, same = bench_compare(a, b), bench_compare(a, a)
    assert (slower.returncode, same.returncode) == (1, 0)
    assert "slower" in slower.stdout
    assert bench_compare(b, a).returncode == 0
    found = json.loads(bench_compare(a, b, "--json").stdout)
    assert found["is_slower"] is True
    assert found["cases"][0]["ratio"] == pytest.approx(0.75)
    assert bench_compare(a, b, "--margin", "0.3").returncode == 0


def test_files_of_a_directory_count_together(tmp_path):
    for name, rate in (("a", 2.0), ("b", 1.5)):
        (tmp_path / name).mkdir()
        for number in range(5):
            results([rate + number / 1000]).write(tmp_path / name / f"{number}.json")
    done = bench_compare(tmp_path / "a", tmp_path / "b", "--json")
    assert done.returncode == 1, done.stderr
    (found,) = json.loads(done.stdout)["cases"]
    assert (found["before"], found["after"]) == (pytest.approx(2.002), pytest.approx(1.502))
    (tmp_path / "empty").mkdir()
    assert "holds no file of results" in bench_compare(tmp_path / "a", tmp_path / "empty").stderr


def test_a_file_that_holds_no_results_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[]")
    done = bench_compare(path, path)
    assert done.returncode == 1
    assert "holds no results" in done.stderr
    assert "Traceback" not in done.stderr
