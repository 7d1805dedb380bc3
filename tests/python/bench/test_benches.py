"""The figures and the options of the suites."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib", reason="comes with make bench", exc_type=ImportError)

from penstock_bench.harness import process
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.running import rotated
from penstock_bench.harness.suite import Run
from penstock_bench.peers.checkpoint import WRITERS
from penstock_bench.peers.save_load import CONTENDERS
from penstock_bench.results.samples import Sample, Samples
from penstock_bench.suites.pyg import __main__ as pyg
from penstock_bench.suites.ranks import __main__ as ranks_suite
from penstock_bench.suites.training import __main__ as training
from penstock_bench.suites.training.loop import Timing
from ranks import IMPORTS


@pytest.mark.parametrize("command", [training.main, ranks_suite.main, pyg.main])
def test_a_name_that_nobody_has_is_refused(command):
    told = CliRunner().invoke(command, ["--only", "pickle"])
    assert told.exit_code == 2
    assert "pickle: choose from" in told.output


def sample(saver, index, call, wait, loop, durable=1.0):
    return training.Training(
        saver,
        index,
        copy_seconds=0.5,
        timing=Timing(loop, [call, call, 9.0], [wait, wait, 0.0], [durable] * 3),
        steps=6,
    )


def training_results():
    results = Samples({}, {}, {})
    for index, slow in enumerate((0.0, 1.0)):
        results.samples += [
            sample("nothing", index, 0, 0, 6.0 + slow),
            sample("penstock-async", index, 0.5, 0.0, 7.5 + slow),
            sample("penstock-lazy", index, 0.01, 0.03, 6.6 + slow),
            sample("penstock", index, 2.0, 0.0, 12.0 + slow),
            sample("dcp-async", index, 2.0, 0.0, 15.0 + slow),
            sample("dcp-staged", index, 0.1, 1.4, 18.0 + slow),
        ]
    results.samples.append(training.Training("torch", 0, error="no space"))
    return results


def test_a_run_that_is_stopped_leaves_the_measurements_it_has(tmp_path):
    path = tmp_path / "suite.json"
    run = Run(("a", "b"), 2, True, tmp_path, 1.0, Samples({}, {}, {}), path)
    turns = run.in_rounds(run.names)
    for _ in range(2):
        index, name = next(turns)
        run.results.add(Sample(name, index), {"seconds": 1.0})
    turns.close()
    assert [one["row"] for one in json.loads(path.read_text())["samples"]] == ["a"]


def test_what_training_loses_is_told_beside_the_run_without_saves_of_the_same_round():
    results = training_results()
    assert training.lost_seconds(results, "penstock-async") == {0: 0.5, 1: 0.5}
    assert training.lost_seconds(results, "torch") == {}
    assert results.errors() == ["torch: no space"]


def test_a_stall_is_the_call_and_the_waits_and_dcp_counts_with_its_best_setting():
    ratios = {title: found.median for title, found in training.ratios(training_results())}
    assert ratios["stall of async / a plain copy of the state"] == pytest.approx(1)
    assert ratios["stall of lazy / a synchronous save"] == pytest.approx(0.02)
    assert ratios["stall of the best DCP / of async"] == pytest.approx(3)
    assert ratios["lost with the best DCP / with async"] == pytest.approx(6)


def test_rates_of_ranks_are_compared_within_a_round(tmp_path):
    results = Samples({}, {}, {})
    for index, seconds in enumerate((1.0, 2.0)):
        for row, times in (("penstock", 1), ("penstock-alone", 2), ("dcp-1", 6), ("dcp-4", 4)):
            results.samples.append(Sample(row, index, "save", 10**9, times * seconds))
    rates = results.spread("penstock", "gb_per_second", operation="save")
    assert rates == (0.75, 0.5, 1.0, 2)
    ratios = dict(ranks_suite.ratios(results))
    assert ratios["save by all ranks / by one process"] == (2, 2, 2, 2)
    assert ratios["save by all ranks / the best DCP"] == (4, 4, 4, 2)
    assert ratios["load by one / the best DCP"] is None
    results.write(tmp_path / "ranks.json")


def test_an_epoch_is_held_against_the_longest_of_its_parts(tmp_path):
    results = Samples({}, {}, {})
    for index, longest in enumerate(("fio", "train")):
        parts = {"sample": 1.0, "train": 2.0, "fio": 1.0} | {longest: 4.0}
        for row, seconds in {"penstock": 4.4 + 0.4 * index, "memmap": 24.0, **parts}.items():
            # PyG has the first two of four batches.
            losses = [2.5, 2.25 + index, 2.0, 1.5] if row == "penstock" else [2.5, 2.25]
            detail = {"at": [0.5, 2.0, 3.0, 4.0][: len(losses)], "losses": losses}
            results.samples.append(Sample(row, index, seconds=seconds, detail=detail))
    results.add(Sample("penstock", 2), {"error": "no memory"})
    assert pyg.bounds(results) == {0: ("fio", 4.0), 1: ("train", 4.0)}
    assert pyg.bound_ratio(results) == pytest.approx((1.15, 1.1, 1.2, 2))
    assert pyg.peer_ratio(results, "memmap") == (12, 12, 12, 2)
    assert pyg.differing(results) == ["memmap: other losses in round 2"]
    assert results.errors() == ["penstock: no memory"]
    results.write(tmp_path / "pyg.json")


def answer(argument):
    if argument == "fail":
        raise ValueError("as asked")
    return {"argument": argument}


@pytest.mark.slow
def test_a_process_gives_back_what_it_found_or_why_not(tmp_path, monkeypatch):
    # The ranks of other tests are forked from the same server.
    monkeypatch.setattr(process, "_preloaded", IMPORTS)
    found = process.run(answer, ["one", "fail"], tmp_path, timeout_seconds=240)
    assert found == [{"argument": "one"}, {"error": "ValueError: as asked"}]


def test_a_row_names_a_class_that_is_there():
    """Without importing the library."""
    for entry in (*CONTENDERS.values(), *WRITERS.values()):
        tree = ast.parse(Path(find_spec(entry.module).origin).read_text())
        assert entry.attribute in {one.name for one in tree.body if isinstance(one, ast.ClassDef)}


def test_each_round_begins_with_another_one():
    assert [rotated("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rotated([], 1) == []


def test_a_place_to_work_is_gone_when_the_work_is_done(tmp_path):
    def fail():
        with workplace(tmp_path, 1) as place:
            (place / "file").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(click.ClickException, match="are needed"), workplace(tmp_path, 1e30):
        pass
    assert list(tmp_path.iterdir()) == []
