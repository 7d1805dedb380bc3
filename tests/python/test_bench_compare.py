"""Which run is slower: verdicts on rates that are known."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from penstock.bench.cases import Case
from penstock.bench.compare import compare
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
    assert found.ratio == pytest.approx(np.median(after) / np.median(before))


def test_alarms_are_neither_false_nor_missed():
    generator = np.random.default_rng(1)
    verdicts = {"same": [], "slowed": []}
    for _ in range(20):
        before = results(noisy(generator, 2.0))
        verdicts["same"].append(compare(before, results(noisy(generator, 2.0)))[0].verdict)
        verdicts["slowed"].append(compare(before, results(noisy(generator, 1.8)))[0].verdict)
    assert verdicts["same"].count("slower") == 0
    assert verdicts["slowed"].count("slower") >= 19


def test_too_few_rounds_say_nothing():
    (found,) = compare(results([1.0, 1.0]), results([0.5, 0.5]))
    assert found.verdict == "missing"


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


def test_a_file_that_holds_no_results_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[]")
    done = bench_compare(path, path)
    assert done.returncode == 1
    assert "holds no results" in done.stderr
    assert "Traceback" not in done.stderr
