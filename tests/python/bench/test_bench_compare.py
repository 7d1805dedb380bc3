"""Which run is slower: verdicts on rates that are known."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from conftest import run_command
from penstock import cli
from penstock_bench.cli import checkpoint_table
from penstock_bench.harness.cases import Case
from penstock_bench.report import tables
from penstock_bench.results import results as results_module
from penstock_bench.results.compare import MARGIN, compare, rounds_needed
from penstock_bench.results.results import Measurement, Results, ResultsError, UnlikeError


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
    ratios = [two / one for two in after for one in before]
    assert found.ratio == pytest.approx(np.exp(np.median(np.log(ratios))))
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


@pytest.mark.parametrize(("is_paired", "rounds_min"), [(False, 5), (True, 7)])
def test_rounds_that_are_too_few_to_tell_a_change_from_chance_do_not_pass(is_paired, rounds_min):
    for rounds in range(1, rounds_min + 1):
        two = results([1.0 + n / 100 for n in range(rounds)]), results([0.5] * rounds)
        (found,) = compare(*two, is_paired=is_paired)
        assert found.verdict == ("slower" if rounds == rounds_min else "few")
        assert found.passes is False
    assert found.ratio == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("rounds", [5, 8, 11])
def test_few_rounds_give_no_false_alarms(is_paired, rounds):
    generator = np.random.default_rng(rounds)
    alarms = 0
    for _ in range(100):
        rates = [
            2.0 * np.exp(0.08 * generator.standard_normal(rounds)) for _ in ("before", "after")
        ]
        (found,) = compare(*map(results, rates), is_paired=is_paired)
        alarms += found.verdict == "slower"
    # One in a hundred is expected at most.
    assert alarms <= 3


def test_what_could_not_be_measured_does_not_pass(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    results([2.0] * 7).write(a)
    failed = results([2.0] * 7)
    for one in failed.measurements:
        one.error = "no space"
    failed.write(b)
    done = bench_compare(a, b)
    assert done.returncode == 1
    assert "failing" in done.stdout
    assert "7 of 7 rounds failed: no space" in " ".join(done.stdout.split())
    done = bench_compare(b, b)
    assert done.returncode == 1
    assert "no round could be measured" in " ".join(done.stdout.split())


@pytest.mark.parametrize("is_paired", [False, True])
def test_a_run_that_fails_more_often_does_not_pass_however_fast_it_is(is_paired):
    before, after = results([2.0] * 15), results([9.0] * 15)
    before.measurements[3].error = after.measurements[4].error = "one"
    (found,) = compare(before, after, is_paired=is_paired)
    assert found.verdict == "faster"
    after.measurements[5].error = "two"
    (found,) = compare(before, after, is_paired=is_paired)
    assert (found.verdict, found.passes) == ("failing", False)
    assert found.reason == "2 of 15 rounds failed: one"


def test_runs_that_have_nothing_in_common_cannot_be_compared():
    with pytest.raises(ResultsError, match="no case in common"):
        compare(results([1.0]), results([1.0], Case(pattern="read")))


def drifting(generator, factor, rounds=15):
    """Rates in turns on a disk that is half as fast in some rounds, and noise of each by itself."""
    disk = 2.0 * np.where(generator.random(rounds) < 0.5, 0.5, 1.0)
    return [
        results(disk * one * np.exp(0.05 * generator.standard_normal(rounds)))
        for one in (1.0, factor)
    ]


def test_what_a_disk_does_meanwhile_touches_both_of_a_pair():
    generator = np.random.default_rng(2)
    false, noticed, unpaired = 0, 0, 0
    for _ in range(20):
        (same,) = compare(*drifting(generator, 1.0), is_paired=True)
        false += same.verdict == "slower"
        slowed = drifting(generator, 1 / 1.1)
        (found,) = compare(*slowed, is_paired=True)
        noticed += found.verdict == "slower"
        unpaired += is_alarm(*slowed)
    assert false == 0
    assert noticed >= 19
    # Pairing finds what a drifting disk hides.
    assert unpaired <= 10


def test_the_ratio_of_pairs_is_the_median_of_the_means_of_every_two():
    generator = np.random.default_rng(7)
    before, after = noisy(generator, 2.0), noisy(generator, 1.6)
    (found,) = compare(results(before), results(after), is_paired=True)
    logs = np.log(after / before)
    means = [(logs[i] + logs[j]) / 2 for i in range(len(logs)) for j in range(i + 1)]
    assert found.ratio == pytest.approx(np.exp(np.median(means)))
    assert found.low <= found.ratio <= found.high < 1
    assert found.verdict == "slower"


def test_a_round_in_which_one_of_a_pair_failed_counts_for_neither():
    before = results([2.0, 9.0, *[2.0] * 8])
    after = results([1.0, 1.0, 9.0, *[1.0] * 7])
    before.measurements[1].error = after.measurements[2].error = "no space"
    (found,) = compare(before, after, is_paired=True)
    assert (found.before, found.after, found.ratio) == pytest.approx((2.0, 1.0, 0.5))
    # Without pairs each has nine rounds.
    (found,) = compare(before, after)
    assert (found.before, found.after) == pytest.approx((2.0, 1.0))


def test_runs_that_have_not_the_same_rounds_are_no_pairs():
    with pytest.raises(UnlikeError, match="5 rounds before and 4 after"):
        compare(results([2.0] * 5), results([2.0] * 4), is_paired=True)
    other = results([2.0] * 5)
    other.measurements[4].round_index = 7
    with pytest.raises(UnlikeError, match="not the same rounds"):
        compare(results([2.0] * 5), other, is_paired=True)


def test_a_case_that_is_no_longer_measured_does_not_pass():
    before = shared_disk(np.random.default_rng(3), 1.0)
    found = compare(before, results([2.0] * 7))
    assert {one.case.partition(",")[0]: one.verdict for one in found}["read"] == "missing"
    # One that is new has nothing to be held against.
    assert len(compare(results([2.0] * 7), before)) == 1


@pytest.mark.parametrize(
    ("field", "change", "told"),
    [
        ("kind", "checkpoint", "kind: io and checkpoint"),
        ("settings", {"size_bytes": 4096}, "size_bytes: None and 4096"),
        ("settings", {"verify": True}, "verify: None and True"),
        ("cases", {Case().label: {**Case().as_json(), "seconds": 5}}, "seconds: None and 5"),
        ("cases", {Case().label: {**Case().as_json(), "syncs": False}}, "syncs: True and False"),
    ],
)
def test_runs_that_measured_different_things_are_not_compared(field, change, told):
    other = results([2.0] * 5)
    setattr(other, field, change)
    with pytest.raises(UnlikeError, match=told):
        compare(results([2.0] * 5), other)


def test_rounds_seeds_and_peers_are_up_to_each_run():
    before, after = results([2.0] * 5), results([2.0] * 7)
    before.settings = {"rounds": 5, "seed": 1, "vs": None}
    after.settings = {"rounds": 7, "seed": 2, "vs": "fio"}
    (found,) = compare(before, after)
    assert found.verdict == "same"


def bench_compare(*arguments):
    return run_command("bench", "compare", *arguments)


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
    command = [sys.executable, "-m", "penstock", "bench", "compare", a, b]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


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


def test_a_directory_of_runs_that_differ_is_no_run(tmp_path):
    results([2.0]).write(tmp_path / "1.json")
    other = results([2.0])
    other.settings = {"size_bytes": 4096}
    other.write(tmp_path / "2.json")
    with pytest.raises(UnlikeError, match=r"1\.json and .*2\.json are no rounds of the same"):
        Results.read(tmp_path)


def test_rounds_of_two_directories_are_paired_by_the_order_of_their_files(tmp_path):
    disk = [4.0, 1.0, 2.0, 3.0, 1.5, 2.5, 3.5, 1.2]
    for name, factor in (("before", 1.0), ("after", 0.8)):
        (tmp_path / name).mkdir()
        for number, rate in enumerate(disk):
            results([rate * factor]).write(tmp_path / name / f"{number}.json")
    arguments = tmp_path / "before", tmp_path / "after"
    assert "slower" not in bench_compare(*arguments).stdout.replace("could be slower", "")
    done = bench_compare(*arguments, "--paired", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["is_paired"] is True
    (case,) = found["cases"]
    assert [case[key] for key in ("ratio", "low", "high")] == pytest.approx([0.8] * 3)
    (tmp_path / "after" / "3.json").unlink()
    refused = bench_compare(*arguments, "--paired")
    assert refused.returncode == 1
    assert "name their files alike" in refused.stderr
    (tmp_path / "before" / "4.json").unlink()
    assert "name their files alike" in bench_compare(*arguments, "--paired").stderr


def test_another_kernel_is_told(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    for path, kernel in ((a, "6.1"), (b, "6.8")):
        run = results([2.0] * 5)
        run.machine = {"kernel": kernel, "load_average": [float(kernel)]}
        run.write(path)
    told = "not the same before and after: kernel: 6.1 and 6.8"
    assert told in bench_compare(a, b).stdout
    assert json.loads(bench_compare(a, b, "--json").stdout)["circumstances"] == [
        "kernel: 6.1 and 6.8"
    ]
    assert "not the same" not in bench_compare(a, a).stdout
    (tmp_path / "both").mkdir()
    a.rename(tmp_path / "both" / "a.json")
    b.rename(tmp_path / "both" / "b.json")
    with pytest.raises(UnlikeError, match="no rounds of the same: kernel"):
        Results.read(tmp_path / "both")


def test_a_way_through_the_page_cache_is_told():
    before, after = results([2.0] * 7), results([9.0] * 7)
    for one in before.measurements:
        one.is_direct = True
    label = Case().label
    assert results_module.circumstances(before, after) == [
        f"{label}, penstock: past the page cache and through the page cache"
    ]
    assert results_module.circumstances(before, before) == []


def test_a_search_is_no_run_to_compare():
    one = results([2.0] * 7)
    one.kind = "tune"
    with pytest.raises(UnlikeError, match="a search for options"):
        compare(one, one)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seconds": 0.0}, "neither seconds nor an error"),
        ({"seconds": float("nan")}, "seconds: nan"),
        ({"seconds": "1"}, "seconds: '1'"),
        ({"nbytes": -1}, "nbytes: -1"),
        ({"nbytes": 1.5}, r"nbytes: 1\.5"),
        ({"round_index": True}, "round_index: True"),
        ({"latency_us": {"p50": None}}, "latency_us: "),
        ({"timeline_bytes": [1, "2"]}, "timeline_bytes: "),
        ({"case": None}, "case: None"),
        ({"nbytes": 10**400}, "nbytes: 1000"),
        ({"seconds": 1e-310}, "neither seconds nor an error"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(tmp_path, change, told):
    path = tmp_path / "a.json"
    document = results([2.0]).as_json()
    document["measurements"][0] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match=rf"a\.json holds no results.*{told}"):
        Results.read(path)


def test_what_a_later_release_writes_as_well_is_no_matter(tmp_path):
    path = tmp_path / "a.json"
    document = results([2.0] * 7).as_json()
    document["weather"] = "fair"
    document["cases"][Case().label]["colour"] = "red"
    for one in document["measurements"]:
        one["mood"] = "good"
    path.write_text(json.dumps(document))
    for pair in ((results([2.0] * 7), Results.read(path)), (Results.read(path),) * 2):
        (found,) = compare(*pair)
        assert found.verdict == "same"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "its format is not"),
        ("[" * 100_000, "holds no results"),
        ("{", "holds no results"),
        ('{"format": "penstock-bench", "version": 2}', "its version is 2, and 1 is known"),
        ('{"format": "penstock-bench", "version": 1}', "kind is missing"),
    ],
)
def test_a_document_of_another_kind_is_refused(tmp_path, text, told):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=told):
        Results.read(path)
    document = {**results([2.0]).as_json(), "measurements": [7]}
    path.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match="7 in place of an object"):
        Results.read(path)


def test_a_file_that_holds_no_results_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[]")
    done = bench_compare(path, path)
    assert done.returncode == 1
    assert "holds no results" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_with_the_default_rounds_can_be_compared(tmp_path, monkeypatch):
    """As few rounds as tell anything, and what to do where they are fewer."""
    for cases in (1, 2, 7):
        rates = {Case(depth=case + 1): [1.0, 1.01, 0.99, 1.02, 0.98] * 2 for case in range(cases)}
        least = rounds_needed(cases)
        for rounds, verdicts in ((least, {"same"}), (least - 1, {"few"})):
            found = compare(*[first_rounds(several(rates), rounds) for _ in range(2)], margin=0.2)
            assert {one.verdict for one in found} == verdicts
        assert f"--rounds {least} or more" in found[0].reason
    asked = []
    # The attribute of that name is the command.
    measured = importlib.import_module("penstock_bench.cli.bench_io")
    monkeypatch.setattr(measured, "_measure", lambda *call, **_: asked.append((call[1], call[3])))
    for more in ([], ["--depth", "1,2,4,8"]):
        arguments = ["bench", "io", str(tmp_path), "--size", "1M", "--json", *more]
        CliRunner().invoke(cli.cli, arguments, standalone_mode=False)
    assert [rounds for _, rounds in asked] == [rounds_needed(len(cases)) for cases, _ in asked]


def several(rates_by_case):
    made = None
    for case, rates in rates_by_case.items():
        one = results(rates, case)
        if made is None:
            made = one
        else:
            made.cases |= one.cases
            made.measurements += one.measurements
    return made


def first_rounds(run, rounds):
    kept = [one for one in run.measurements if one.round_index < rounds]
    return dataclasses.replace(run, measurements=kept)


def test_the_rate_of_a_run_is_one_number():
    """The median: in the terminal, in the page, in the summary."""
    run = results([1.0, 1.0, 10.0])
    ((case, by),) = {(one.case, one.by) for one in run.measurements}
    assert run.rates(case, by).median == run.spread(case, by, _rate).median == pytest.approx(1.0)
    assert run.summary()[0]["gb_per_second"] == pytest.approx(1.0)
    assert checkpoint_table._ranged(run.rates(case, by)).startswith("1.00 ")
    page = tables._rates(run)
    (cells,) = [cells for by_case in page.rows.values() for cells in by_case.values()]
    assert any(cell.text == "1.000" for cell in cells)


def _rate(one):
    return one.durable_gb_per_second
