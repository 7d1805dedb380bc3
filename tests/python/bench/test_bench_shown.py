"""The first screen of a benchmark: its sentences and charts, without empty ones."""

from __future__ import annotations

import random
import sys

import pytest

from penstock_bench.cli.bench_io import _print as print_io
from penstock_bench.cli.checkpoint_table import print_results
from penstock_bench.report import write_report
from penstock_bench.report.headline import headlines
from penstock_bench.results.results import Measurement, Results, latencies
from penstock_bench.suites.checkpoint import figures

SAVE, LOAD = "save, gpt2, 1 GB, 1 process", "load, gpt2, 1 GB, 1 process"


def checkpoints(seconds, *, rounds=6, asked=None, stalls=None, spread=0.02):
    """A run in which saves and loads take so long, by writer, in an order of its own each round."""
    asked = list(asked or seconds)
    made = Results(kind="checkpoint", machine={}, disk={"directory": "/ckpt"}, settings={})
    made.settings = {
        "writers": asked, "emulated": [], "rounds": rounds, "fill": None, "name": "gpt2",
        "ranks": [0], "world_size": 1, "syncs": True, "has_one_clock": True,
        "layout": {"tp": 1, "pp": 1, "dp": 1, "zero": 0},
        "scale": {"bytes": 10**9, "full_bytes": 10**9, "factor": 1.0, "how": "all of it"},
    }  # fmt: skip
    made.cases = {SAVE: {"operation": "save"}, LOAD: {"operation": "load"}}
    drawn = random.Random(1)
    for number in range(rounds):
        for by in drawn.sample(list(seconds), len(seconds)):
            for case, took in zip((SAVE, LOAD), seconds[by], strict=True):
                is_save = case == SAVE
                made.measurements.append(
                    Measurement(
                        case=case, by=by, round_index=number, nbytes=10**9,
                        seconds=took * drawn.uniform(1 - spread, 1 + spread),
                        metadata={"create": 1, "sync": 1}, is_direct=True, synced_by="writer",
                        rate_spread=[1.0], resident_fraction=0.0,
                        stall_seconds=(stalls or {}).get(by) if is_save else None,
                    )
                )  # fmt: skip
    return made


def html(results, tmp_path):
    path = tmp_path / "page.html"
    write_report(results, path)
    return path.read_text(encoding="utf-8")


# ---- Headlines


def test_a_headline_has_the_ratio_to_the_fastest_other_and_what_it_lies_between():
    told = headlines(
        checkpoints({"penstock": (1, 2), "torch.save": (2.4, 1), "dcp": (5, 5)}, rounds=7)
    )
    first, second = told
    assert first.startswith("penstock saves 2.4 times as fast as the fastest other (torch.save) [2")
    assert second.startswith("penstock loads 0.50 times as fast as the fastest other (torch.save)")
    (alone, _) = headlines(checkpoints({"penstock": (1, 1), "torch.save": (2.4, 2)}))
    assert alone.startswith("penstock saves 2.4 times as fast as torch.save [2")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (checkpoints({"penstock": (1, 1), "torch.save": (1.01, 1)}, spread=0.3), "may be noise"),
        (checkpoints({"penstock": (1, 1), "torch.save": (9, 9)}, rounds=2), "too few rounds"),
        (checkpoints({"penstock": (1, 1)}), "penstock saves at 1"),
    ],
)
def test_without_a_ratio_that_is_more_than_noise_there_is_none(run, words):
    told = headlines(run)
    assert words in told[0]
    assert not [line for line in told if "times" in line]


def test_without_scipy_there_are_medians(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    told = headlines(checkpoints({"penstock": (1, 1), "torch.save": (2, 2)}))
    assert "pip install 'penstock[bench]'" in told[0]


def test_what_training_waits_for_is_held_against_the_shortest_wait():
    run = checkpoints(
        {"penstock-async": (1, 1), "torch.save": (2, 1), "dcp": (1.5, 1)},
        stalls={"penstock-async": 0.1},
    )
    (wait,) = [line for line in headlines(run) if line.startswith("training waits")]
    assert wait.startswith("training waits 0.100 s for a save of penstock-async, 15.")
    assert "the fastest other (dcp)" in wait


def requests(count, latency_us, *, by="penstock", rounds=6, seconds=1.0, timeline=()):
    return [
        Measurement(
            case="read, uring, direct, 1M x 16", by=by, round_index=number, nbytes=count << 20,
            requests=count, seconds=seconds * (1 + number / 1000), latency_us=dict(latency_us),
            timeline_bytes=list(timeline),
        )
        for number in range(rounds)
    ]  # fmt: skip


def io(measurements):
    made = Results(kind="io", machine={}, disk={}, settings={"rounds": 6})
    made.measurements = measurements
    for one in measurements:
        made.cases[one.case] = {"pattern": "read"}
    return made


def test_requests_say_where_they_are_faster_than_fio_or_how_fast():
    assert headlines(io(requests(1000, {}))) == ["fastest read: 1.05 GB/s (uring, direct, 1M x 16)"]
    for seconds, words in ((2.0, "faster in 1"), (0.5, "slower in 1"), (1.0, "neither")):
        told = headlines(io(requests(1000, {}) + requests(1000, {}, by="fio", seconds=seconds)))
        assert words in told[0]
        assert told[1:] == [] or told[1].startswith("slower: read, uring, direct, 1M x 16, 0.50")


def test_a_run_without_a_result_has_no_headline():
    for kind in ("io", "checkpoint", "stream", "gather", "tune"):
        assert headlines(Results(kind=kind, machine={}, disk={}, settings={})) == []


# ---- Charts


def test_charts_come_first_with_writers_in_the_order_asked_for(tmp_path):
    asked = ["torch.save", "penstock", "dcp"]
    run = checkpoints({"penstock": (1, 1), "dcp": (4, 4), "torch.save": (2, 2)}, asked=asked)
    text = html(run, tmp_path)
    assert text.index("penstock saves 2.") < text.index("<svg") < text.index("<table")
    for title in ("Save", "Load", "Stall"):
        drawing = text[text.index(f'aria-label="{title} by writer"') :]
        drawing = drawing[: drawing.index("</svg>")]
        places = [drawing.index(f">{by}<") for by in asked]
        assert places == sorted(places)
    table = text[text.index("<table") :]
    places = [table.index(f"<td>{by}</td>") for by in asked]
    assert places == sorted(places)


def test_nothing_is_left_out_of_a_chart(tmp_path):
    run = checkpoints({"penstock": (0.001, 0.001), "torch.save": (50, 50)})
    failed = Measurement(case=SAVE, by="dcp", round_index=0, error="it broke")
    run.measurements.append(failed)
    run.settings["writers"].append("dcp")
    drawing = html(run, tmp_path)
    drawing = drawing[drawing.index('aria-label="Save by writer"') :]
    drawing = drawing[: drawing.index("</svg>")]
    assert ">no result<" in drawing
    assert ">0.0200<" in drawing


def test_what_is_over_at_once_is_in_the_throughput_over_time(tmp_path):
    slow = requests(1000, {}, timeline=[100 << 20] * 10)
    fast = [
        Measurement(
            case="read, posix, buffered, 1M x 1", by="penstock", round_index=number,
            nbytes=1 << 20, requests=1, seconds=0.01,
        )
        for number in range(3)
    ]  # fmt: skip
    text = html(io(slow + fast), tmp_path)
    drawing = text[text.index('aria-label="Throughput over time') :]
    drawing = drawing[: drawing.index("</svg>")]
    assert "uring, direct, 1M x 16" in drawing
    assert "posix, buffered, 1M x 1" in drawing
    # Of runs without any course there is none to draw.
    assert "Throughput over time" not in html(io(fast), tmp_path)


# ---- Columns that say something

LATENCY = {"mean": 5, "p50": 4, "p90": 6, "p99": 8, "p99.9": 9, "p99.99": 10, "max": 11}


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (4, ["mean", "p50", "max"]),
        (300, ["mean", "p50", "p90", "max"]),
        (1024, ["mean", "p50", "p90", "p99", "max"]),
        (10_000, ["mean", "p50", "p90", "p99", "p99.9", "max"]),
        (200_000, list(LATENCY)),
    ],
)
def test_a_percentile_is_shown_where_requests_are_many_enough(count, names, tmp_path, capsys):
    run = io(requests(count, LATENCY))
    (case,) = run.cases
    assert list(latencies(run, case, "penstock")) == names
    text = html(run, tmp_path)
    for name in LATENCY:
        assert (f">{name}</th>" in text) == (name in names)
    print_io(run)
    assert ("p99 us" in capsys.readouterr().out) == ("p99" in names)


def test_columns_that_are_the_same_for_all_are_left_out(tmp_path, capsys):
    text = html(checkpoints({"penstock": (1, 1), "torch.save": (2, 2)}), tmp_path)
    headings = {"rounds", "processes", "GB/s without", "stall s"}
    assert not [name for name in headings if f">{name}</th>" in text]
    print_results(checkpoints({"penstock": (1, 1), "torch.save": (2, 2)}, rounds=1))
    out = capsys.readouterr().out
    assert "mean" not in out
    assert "wait s" not in out
    assert "too few rounds" in out.splitlines()[0]


def test_what_sealing_costs_is_told_within_each_round(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    writers = {"penstock": (1, 2), "penstock-sealed": (1.25, 2.5), "torch.save": (2, 2)}
    found = checkpoints(writers, rounds=7, spread=0)
    costs = figures.sealed(found)
    assert list(costs) == ["penstock"]
    assert costs["penstock"].save.median == pytest.approx(0.8)
    assert costs["penstock"].load.median == pytest.approx(0.8)
    assert costs["penstock"].wait.median == pytest.approx(1.25)
    print_results(found)
    lines = capsys.readouterr().out.splitlines()
    (told,) = [line for line in lines if line.startswith("penstock   ") and "0.80 [0.80" in line]
    assert told.split()[-3:] == ["0.00", "0.00", "1.25"]
    assert all(len(line) <= 80 for line in lines)
    print_results(checkpoints({"penstock": (1, 1), "torch.save": (2, 2)}))
    assert "sealed" not in capsys.readouterr().out


def test_the_terminal_says_it_first_within_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    writers = {"penstock": (1, 1), "penstock-async": (1, 1), "torch.save": (2.4, 2)}
    print_results(checkpoints(writers, rounds=7, stalls={"penstock-async": 0.1}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("penstock saves 2.4 times as fast as torch.save [")
    assert all(len(line) <= 80 for line in lines)
    assert any("wait s" in line for line in lines)
