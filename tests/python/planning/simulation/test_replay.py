"""Failure logs: their columns, and what is odd about them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.planning.simulation import parse, read_replay, simulate

LANL = """System,machine type,nodes,nodenum,Prob Started,Prob Fixed,Down Time,Facilities
20,smp,1,0,6/2/1997 10:00,6/2/1997 12:00,120,
8,smp,1,3,6/2/1997 11:00,6/2/1997 11:30,30,
20,smp,1,5,6/3/1997 10:00,6/3/1997 10:30,30,
20,smp,1,5,6/3/1997 22:00,6/4/1997 10:00,720,
"""


def read(tmp_path, text, **where):
    path = tmp_path / "log.csv"
    path.write_text(text)
    return read_replay(path, where)


def test_times_alone(tmp_path):
    found = read(tmp_path, "0\n\n3600.5\n7200\n")
    assert found.gaps.tolist() == [3600.5, 3599.5]
    assert found.repairs is None


def test_lanls_table(tmp_path):
    found = read(tmp_path, LANL, System="20")
    assert found.gaps.tolist() == [86_400, 43_200]
    assert found.repairs.tolist() == [1800, 43_200]
    assert found.notes[0].startswith("3 failures of 2 nodes in 1.5 days")


def test_other_separators_and_dates(tmp_path):
    found = read(tmp_path, "Host;Start;End\na;2026-01-01T00:00:00Z;2026-01-01T01:00:00Z\n"
                           "b;2026-01-02;2026-01-02T02:00\n")  # fmt: skip
    assert found.gaps.tolist() == [86_400]
    assert found.repairs.tolist() == [7200]


def test_rows_out_of_order_and_holes_are_named(tmp_path):
    times = [*range(0, 200_000, 1000), 40_000_000, 39_000_000]
    found = read(tmp_path, "time,node\n" + "".join(f"{time},a\n" for time in times))
    assert any("not in order of time" in note and "line 203" in note for note in found.notes)
    assert any("hole" in note and "after line 201" in note for note in found.notes)
    assert (found.gaps >= 0).all()


@pytest.mark.parametrize("text", ["1\n500\n90000\n", "time,node\n1,a\n500,b\n90000,c\n"])
def test_a_byte_order_mark_is_skipped(tmp_path, text):
    assert read(tmp_path, "\ufeff" + text).gaps.tolist() == [499, 89_500]


def test_commas_between_thousands_are_skipped(tmp_path):
    text = "time;duration\n0;1\n10;1,500.5s\n20;2,000,000\n"
    assert read(tmp_path, text).repairs.tolist() == [1500.5, 2_000_000]


def test_missing_durations_are_named(tmp_path):
    found = read(tmp_path, "time,duration\n0,60\n100,\n200,120\n")
    assert found.repairs.tolist() == [90, 120]
    assert any("no duration" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("5\n", "1 failures"),
        ("5\n5\n", "same time"),
        ("5\nsix\n", "line 2"),
        ("5\nnan\n", "line 2"),
        ("node,duration\na,3\n", "no column of times"),
        ("time,node\n1,a\nsoon,b\n", "line 3: 'soon' is no time"),
        ("time,duration\n1,3GB\n2,3\n", "line 2: duration"),
        ("time;duration\n1;60\n9;1,5h\n", "line 3: duration: '1,5h': write a point"),
        ("time;duration\n1;60\n9;1,5000\n", "line 3: duration: '1,5000'"),
        ('time,note\n1,"two\nlines"\nsoon,b\n', "line 4: 'soon' is no time"),
        ("time,end\n5,2\n7,9\n", "line 2: a duration of -3"),
        ("time\n" + "x\n" * 9, "and 6 more"),
        ('time,note\n1,a\n2,"b\n' + "3,c\n" * 50_000, r"log\.csv, line 3: .*quotes"),
        ('time,note\n1,a\n2,"b\n3,c\n4,d\n', r"log\.csv, line 3: .*quotes"),
    ],
)
def test_bad_rows_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_a_column_to_choose_by_has_to_exist(tmp_path):
    with pytest.raises(ValueError, match="no column 'system'"):
        read(tmp_path, "time\n1\n2\n", system="20")
    with pytest.raises(ValueError, match="no columns to choose by"):
        read(tmp_path, "1\n2\n", system="20")


def test_repairs_are_replayed():
    """One spare, and repairs that outlast a gap: each failure waits for the one before."""
    made = parse(
        "[cluster]\nnodes = 4\nspares = 1\n[job]\nsave_seconds = 1\ninterval_seconds = 60\n"
        "detection_seconds = 0\nstart_seconds = 0", "test", "test"
    )  # fmt: skip
    gaps = np.full(4, 3600.0)
    quick = simulate(made, gaps=gaps, repairs=np.full(4, 60.0), days=5, runs=2)
    slow = simulate(made, gaps=gaps, repairs=np.full(4, 7200.0), days=5, runs=2)
    assert quick.down.max() == 0
    assert slow.down == pytest.approx(1 / 3, rel=1e-3)
