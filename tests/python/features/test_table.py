"""Tables whose rows are updated: lookups, retention, compaction, snapshots."""

from __future__ import annotations

import json
import os
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedStateError,
)
from penstock.features import Cache, Table
from penstock.io.own_io import for_rows

ROWS = 500
COLUMNS = {"weight": (16, "float32"), "step": ((), "int32"), "half": ((2, 3), "bfloat16")}


def made(path, **options):
    return Table.create(path, ROWS, COLUMNS, **options)


def rows_of(table, ids, value):
    rows = table.lookup(torch.as_tensor(ids))
    rows["weight"][:] = torch.as_tensor(ids)[:, None] + value
    rows["step"][:] = value
    rows["half"][:] = value
    return rows


def assert_holds(table, expected):
    """Checks that each row has the value of its last write; 0 if it was never written."""
    ids = torch.arange(ROWS)
    rows = table.lookup(ids)
    values = torch.tensor([expected.get(int(one), 0) for one in ids])
    written = torch.tensor([int(one) in expected for one in ids])
    assert torch.equal(rows["step"], values.int())
    assert torch.equal(rows["half"], values[:, None, None].expand(-1, 2, 3).bfloat16())
    weight = torch.where(written, ids + values, 0)
    assert torch.equal(rows["weight"], weight[:, None].expand(-1, 16).float())


def write(table, expected, ids, value):
    table.update(torch.as_tensor(ids), rows_of(table, ids, value))
    expected.update(dict.fromkeys(ids, value))


@pytest.mark.parametrize("cache", [None, "sieve", "s3fifo", "static", "none"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_rows_are_those_that_were_written_last(disk_path, cache, direct):
    memory = None if cache is None else Cache(40 << 10, cache)
    io = penstock.offload.TensorIO(direct=direct)
    expected = {}
    with made(disk_path / "t", cache=memory, io=io, log_bytes=64 << 10) as table:
        random = np.random.default_rng(1)
        for value in range(1, 30):
            ids = random.choice(ROWS, 40, replace=False).tolist()
            write(table, expected, ids, value)
            if value % 5 == 0:
                table.flush()
            if value == 17:
                report = table.compact()
                assert report.pieces == 1
                assert table.stats().log_bytes == 0
        assert_holds(table, expected)
    with Table(disk_path / "t") as table:
        assert_holds(table, expected)
        assert table.columns == {
            "weight": ((16,), "float32"),
            "step": ((), "int32"),
            "half": ((2, 3), "bfloat16"),
        }
    io.close()


def test_a_snapshot_is_an_ordinary_checkpoint(disk_path):
    expected = {}
    with made(disk_path / "t") as table:
        write(table, expected, list(range(0, ROWS, 3)), 7)
        report = table.snapshot(disk_path / "saved", metadata={"epoch": 3})
        write(table, {}, list(range(ROWS)), 8)
        with pytest.raises(CheckpointExistsError):
            table.snapshot(disk_path / "saved")
    assert (report.rows, report.columns) == (ROWS, ("weight", "step", "half"))
    assert penstock.verify(disk_path / "saved").ok
    assert penstock.inspect(disk_path / "saved").metadata["epoch"] == 3
    state = penstock.load(disk_path / "saved")
    ids = torch.arange(ROWS)
    written = ids % 3 == 0
    assert torch.equal(state["step"], torch.where(written, 7, 0).int())
    weight = torch.where(written, ids + 7, 0)[:, None].expand(-1, 16)
    assert torch.equal(state["weight"], weight.float())
    assert state["half"].dtype == torch.bfloat16
    with penstock.features.open(disk_path / "saved", "weight") as features:
        assert features.stats().is_checked
        assert torch.equal(features.gather(ids), weight.float())


def test_rows_come_as_they_were_given_at_first(disk_path):
    chunks = (
        {"weight": np.full((count, 4), first, np.float32)}
        for first, count in ((0, 100), (1, 50), (2, 25))
    )
    columns = {"weight": (4, np.float32), "moment": (4, np.float32)}
    with Table.create(disk_path / "t", 200, columns, init=chunks) as table:
        rows = table.lookup(np.arange(200))
    wanted = np.repeat([0, 1, 2, 0], [100, 50, 25, 25]).astype(np.float32)
    np.testing.assert_array_equal(rows["weight"], np.repeat(wanted[:, None], 4, 1))
    assert not rows["moment"].any()
    with pytest.raises(ValueError, match="init: 300 rows or more: the table has 200"):
        Table.create(
            disk_path / "u", 200, columns, init=[{"weight": np.zeros((300, 4), np.float32)}]
        )
    # An unfinished creation is no table, and does not block a new one.
    with pytest.raises(CheckpointNotFoundError):
        Table(disk_path / "u")
    Table.create(disk_path / "u", 200, columns).close()


def test_logs_are_folded_by_themselves(disk_path):
    expected = {}
    with made(disk_path / "t", compaction_bytes=0, log_bytes=64 << 10) as table:
        for value in range(1, 6):
            write(table, expected, list(range(value, ROWS, 2)), value)
            table.flush()
        assert_holds(table, expected)
    with Table(disk_path / "t", compaction_bytes=None) as table:
        assert_holds(table, expected)
        assert table.stats().logged_rows < ROWS


def test_prefetched_rows_are_in_memory(disk_path):
    made(disk_path / "t").close()
    with Table(disk_path / "t", cache=Cache(1 << 20)) as table:
        table.prefetch(np.arange(100))
        table.lookup(np.arange(100))
        stats = table.stats()
        assert (stats.read_rows, stats.hits + stats.shared) == (100, 100)
    with Table(disk_path / "t") as table, pytest.raises(ValueError, match="prefetch: there is no"):
        table.prefetch([1])


def test_columns_of_arrays_and_of_tensors_are_taken(disk_path):
    columns = {"weight": (4, "float32"), "step": ((), "int64")}
    with Table.create(disk_path / "t", 10, columns) as table:
        table.update([3], {"weight": np.ones((1, 4), np.float32), "step": np.array([5])})
        table.update([4, 4], {"weight": torch.ones(2, 4), "step": torch.tensor([6, 7])})
        rows = table.lookup([[3, 4]])
        np.testing.assert_array_equal(rows["step"], [[5, 7]])
        assert rows["weight"].shape == (1, 2, 4)
        assert list(rows) == ["weight", "step"]


def test_rows_are_changed_in_place(disk_path):
    columns = {"weight": (4, "float32"), "step": ((), "int64")}
    with Table.create(disk_path / "t", 10, columns) as table:
        for ids in (np.array([1, 2]), torch.tensor([1, 2])):
            rows = table.lookup(ids)
            rows["weight"] += 1
            rows["step"] = 3
            rows["weight"][0] *= 2
            table.update(ids, rows)
        found = table.lookup([1, 2])
        np.testing.assert_array_equal(found["weight"], np.repeat([[6], [2]], 4, 1))
        np.testing.assert_array_equal(found["step"], [3, 3])


MISUSE = [
    (lambda t: t.update([1], {"weight": np.zeros((1, 4), np.float32)}), ValueError, "no 'step'"),
    (
        lambda t: t.update([1], {**t.lookup([1]), "other": np.zeros(1)}),
        ValueError,
        "'other' is no column",
    ),
    (
        lambda t: t.update([1, 2], t.lookup([1])),
        ValueError,
        r"rows: of shape \(1,\): ids have \(2,\)",
    ),
    (
        lambda t: t.update([1], {**t.lookup([1]), "step": np.zeros(1, np.int32)}),
        ValueError,
        "'step': int32 of shape",
    ),
    (lambda t: t.update([1], {**t.lookup([1]), "step": [0]}), TypeError, "'step': list"),
    (lambda t: t.update([10], t.lookup([1])), IndexError, r"ids\[0\] is 10"),
    (lambda t: t.lookup([3, -1]), IndexError, r"ids\[1\] is -1"),
    (lambda t: t.lookup([0.5]), TypeError, "use integers"),
    (lambda t: t.lookup([1])["other"], KeyError, "the columns are weight, step"),
]


@pytest.mark.parametrize(("misuse", "error", "message"), MISUSE)
def test_misuse_is_named_and_changes_nothing(disk_path, misuse, error, message):
    columns = {"weight": (4, "float32"), "step": ((), "int64")}
    with Table.create(disk_path / "t", 10, columns) as table:
        with pytest.raises(error, match=message):
            misuse(table)
        assert not any(value.any() for value in table.lookup(np.arange(10)).values())
        assert table.stats().logged_rows == 0


FORMS = [
    ({}, ValueError, "there are none"),
    ({"a": 3}, TypeError, "must be sizes and a type"),
    ({"a": (3, "nothing")}, TypeError, "dtype='nothing'"),
    ({"a": (0, "float32")}, ValueError, "no elements"),
    ({"": (3, "float32")}, ValueError, "must be a name"),
    ({"a\nb": (3, "float32")}, ValueError, "must be a name"),
    ({"__metadata__": (3, "float32")}, ValueError, "must be a name"),
    ({"a": ((-2, -2), "float32")}, ValueError, r"sizes \(-2, -2\) are none"),
    ({"a": (3, "S4")}, UnsupportedStateError, "cannot be stored"),
    ({"a": (3, "complex128")}, UnsupportedStateError, "cannot be stored"),
    ({"a": (1 << 20, "float32")}, UnsupportedStateError, "one request moves"),
]


@pytest.mark.parametrize(("columns", "error", "message"), FORMS)
def test_rows_that_are_none_are_refused(disk_path, columns, error, message):
    with pytest.raises(error, match=message):
        Table.create(disk_path / "t", 10, columns)
    assert not (disk_path / "t" / "table.json").exists()


def test_one_process_has_a_table_once(disk_path):
    with pytest.raises(CheckpointNotFoundError, match=r"Table\.create"):
        Table(disk_path / "t")
    table = made(disk_path / "t")
    with pytest.raises(StorageError, match="the table is open"):
        Table(disk_path / "t")
    table.close()
    table.close()
    with pytest.raises(CheckpointExistsError):
        made(disk_path / "t")
    for call in (lambda: table.lookup([1]), table.flush, table.compact, table.stats):
        with pytest.raises(ValueError, match="the table is closed"):
            call()
    Table(disk_path / "t").close()
    with pytest.raises(TypeError):
        pickle.dumps(table)


def test_a_fork_is_told_and_harms_nothing(disk_path):
    with made(disk_path / "t") as table:
        write(table, {}, [1, 2], 5)
        child = os.fork()
        if child == 0:
            told = 0
            for call in (lambda: table.lookup([1]), lambda: table.flush(), lambda: table.compact()):
                try:
                    call()
                except penstock.PenstockError:
                    told += 1
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        table.flush()
        assert_holds(table, {1: 5, 2: 5})


def test_a_damaged_table_is_named(disk_path):
    with made(disk_path / "t") as table:
        write(table, {}, list(range(ROWS)), 5)
        table.compact()
    (rows,) = (disk_path / "t").glob("rows-*")
    content = bytearray(rows.read_bytes())
    content[4096 * 3] ^= 1
    rows.write_bytes(content)
    with Table(disk_path / "t") as table:
        with pytest.raises(CorruptCheckpointError, match=r"row \d+ is damaged") as raised:
            table.lookup(np.arange(ROWS))
        assert raised.value.file == rows.name
        with pytest.raises(CorruptCheckpointError):
            table.snapshot(disk_path / "saved")
    assert not (disk_path / "saved" / "manifest.json").exists()
    head = disk_path / "t" / "table.json"
    head.write_text(head.read_text().replace("weight", "height"))
    with pytest.raises(CorruptCheckpointError, match="not what was written"):
        Table(disk_path / "t")


def test_threads_look_up_what_others_write(disk_path):
    errors = []
    with made(
        disk_path / "t", cache=Cache(20 << 10), compaction_bytes=0, log_bytes=64 << 10
    ) as table:

        def work(mine):
            try:
                for value in range(1, 15):
                    write(table, {}, mine, value)
                    assert (table.lookup(mine)["step"] == value).all()
                    if value % 4 == 0:
                        table.flush()
            except BaseException as error:
                errors.append(error)

        parts = [list(range(first, ROWS, 3)) for first in range(3)]
        threads = [threading.Thread(target=work, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert_holds(table, dict.fromkeys(range(ROWS), 14))


def test_a_trace_shows_what_was_done(disk_path):
    with penstock.trace(disk_path / "trace.json"), made(disk_path / "t") as table:
        write(table, {}, [1, 2], 3)
        table.flush()
        table.compact()
    events = json.loads((disk_path / "trace.json").read_text())
    names = {event.get("name") for event in events}
    assert {"look up", "wait for rows", "update", "flush", "compact"} <= names


def test_a_fold_under_way_keeps_the_table(disk_path):
    """Rows flushed by the next owner are not removed by the previous owner's compaction."""
    # Keeps the workers alive, which would end with the table.
    with for_rows() as workers:
        workers.write(np.zeros(1), disk_path / "other", 0).result()
        table = made(disk_path / "t")
        write(table, {}, [1, 2], 3)
        frozen = table._native.freeze()
        table._io.close()
        closing = threading.Thread(target=table.close)
        closing.start()
        with pytest.raises(StorageError, match="the table is open"):
            Table(disk_path / "t")
        assert closing.is_alive()
        frozen.compact()
        closing.join()
        with Table(disk_path / "t") as again:
            assert_holds(again, {1: 3, 2: 3})


def test_a_table_is_where_it_was_opened(disk_path, monkeypatch):
    for name in ("a", "b"):
        (disk_path / name).mkdir()
        monkeypatch.chdir(disk_path / name)
        with made("t") as table:
            write(table, {}, [1], 1)
    table = Table("t")
    monkeypatch.chdir(disk_path / "a")
    write(table, {}, [1], 2)
    table.close()
    for name, value in (("a", 1), ("b", 2)):
        with Table(disk_path / name / "t") as table:
            assert_holds(table, {1: value})


def test_another_table_by_the_same_name_is_not_written_to(disk_path):
    table = made(disk_path / "t", log_bytes=64 << 10)
    os.rename(disk_path / "t", disk_path / "moved")
    with made(disk_path / "t") as other:
        write(other, {}, [1], 5)
    with pytest.raises(StorageError, match="was moved or replaced"):
        write(table, {}, [1], 9)
    with pytest.raises(StorageError):
        table.close()
    with Table(disk_path / "t") as other:
        assert_holds(other, {1: 5})


def test_files_of_another_table_are_refused(disk_path):
    for name, value in (("a", 1), ("b", 2)):
        with made(disk_path / name) as table:
            write(table, {}, [3], value)
    for file in ("log-0", "rows-0"):
        kept = (disk_path / "b" / file).read_bytes()
        (disk_path / "b" / file).write_bytes((disk_path / "a" / file).read_bytes())
        with pytest.raises(CorruptCheckpointError) as raised:
            Table(disk_path / "b")
        assert raised.value.file == file
        (disk_path / "b" / file).write_bytes(kept)
    with Table(disk_path / "b") as table:
        assert_holds(table, {3: 2})


def test_files_of_others_stay(disk_path):
    home = disk_path / "run"
    home.mkdir()
    (home / "log-20240101").write_text("mine")
    with pytest.raises(StorageError, match=r"log-20240101 already: a table is made in a"):
        made(home)
    assert [file.name for file in home.iterdir() if file.name != "table.lock"] == ["log-20240101"]
    (home / "log-20240101").unlink()
    with made(home):
        (home / "log-007").write_text("mine")
    with Table(home) as table:
        assert (home / "log-007").read_text() == "mine"
        with pytest.raises(CheckpointExistsError, match="is a table"):
            table.snapshot(home)
    with pytest.raises(CheckpointExistsError, match="is a table"):
        penstock.save(home, {"a": torch.ones(1)})


def test_init_that_fails_leaves_nothing(disk_path):
    def chunks():
        yield {"weight": np.zeros((100, 16), np.float32)}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        made(disk_path / "t", init=chunks())
    assert [file.name for file in (disk_path / "t").iterdir()] == ["table.lock"]
    for init, error in (({"weight": 1}, TypeError), ([None], TypeError), ([{}], ValueError)):
        with pytest.raises(error, match="init: "):
            made(disk_path / "t", init=init)


def test_a_fork_that_lives_does_not_keep_the_table(disk_path):
    table = made(disk_path / "t")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    table.close()
    with Table(disk_path / "t") as again:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it is gone"
        assert_holds(again, {})
    os.close(writing)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_who_has_all_rows_cannot_have_them_compacted(disk_path):
    with made(disk_path / "t") as table:
        errors = []

        def progress(done, total):
            with pytest.raises(
                penstock.PenstockError, match="this thread compacts the table"
            ) as one:
                table.compact()
            errors.append(one)

        table.snapshot(disk_path / "s", progress=progress)
        assert errors


def test_tables_of_one_cache_come_and_go(disk_path):
    cache = Cache(1 << 20)
    expected = {}
    for value in range(1, 5):
        for name in ("a", "b"):
            path = disk_path / name
            with Table(path, cache=cache) if path.exists() else made(path, cache=cache) as table:
                assert_holds(table, dict(expected))
                write(table, {}, [value, 7], value)
        expected.update({value: value, 7: value})


def test_rows_that_move_during_a_lookup_are_those_that_were_written_last(disk_path):
    """A large lookup runs in steps, and a compaction may end between two of them."""
    count = 50_000
    path, columns = disk_path / "t", {"v": ((), "int64")}
    with Table.create(path, count, columns, cache=Cache(4096)) as table:
        ids = np.arange(count)
        for version in range(1, 25):
            table.update(ids, {"v": np.full(count, version)})
            compaction = threading.Thread(target=table.compact)
            compaction.start()
            while compaction.is_alive():
                assert (table.lookup(ids)["v"] == version).all()
            compaction.join()


@pytest.mark.parametrize("kind", ["tensors", "arrays", "lists"])
def test_no_ids_are_no_rows(disk_path, kind):
    with made(disk_path / "t") as table:
        ids = {"tensors": torch.empty(0, dtype=torch.int64), "arrays": np.empty(0, int)}.get(
            kind, []
        )
        rows = table.lookup(ids)
        assert rows["weight"].shape == (0, 16)
        table.update(ids, rows)
        values = {
            "weight": torch.empty(0, 16),
            "step": torch.empty(0, dtype=torch.int32),
            "half": torch.empty(0, 2, 3, dtype=torch.bfloat16),
        }
        table.update(ids, values)
        assert_holds(table, {})


@pytest.mark.parametrize(
    "options",
    [{"cache": Cache(1)}, {"log_bytes": -1}, {"gap_bytes": -1}, {"compaction_bytes": -1}],
    ids=["cache", "log", "gap", "compact"],
)
def test_a_setting_that_is_refused_leaves_no_table(disk_path, options):
    with pytest.raises(ValueError, match=r"_bytes=-?1"):
        made(disk_path / "t", **options)
    assert not (disk_path / "t").exists()
    with made(disk_path / "t") as table:
        assert_holds(table, {})


def test_a_table_that_is_closed_as_a_fold_begins_warns_of_nothing(disk_path, monkeypatch):
    begun, closed = threading.Event(), threading.Event()
    compact = Table.compact

    def late(self):
        begun.set()
        assert closed.wait(60)
        return compact(self)

    monkeypatch.setattr(Table, "compact", late)
    table, expected = made(disk_path / "t", compaction_bytes=0, log_bytes=64 << 10), {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(table, expected, range(ROWS), 1)
        table.flush()
        assert begun.wait(60)
        compacting = table._compacting
        table.close()
        closed.set()
        compacting.join()
    with Table(disk_path / "t") as table:
        assert_holds(table, expected)


@pytest.mark.parametrize("call", [penstock.features.open, penstock.load, penstock.inspect])
def test_who_reads_a_table_as_something_else_is_told(disk_path, call):
    made(disk_path / "t").close()
    with pytest.raises(CheckpointNotFoundError, match=r"penstock.features.Table\("):
        call(disk_path / "t")


def test_a_mapping_is_not_rows(tmp_path):
    with pytest.raises(TypeError, match=r"a mapping: write each .* penstock.features.Table"):
        penstock.features.write(tmp_path / "x", {"x": np.zeros((3, 4))})
    assert not (tmp_path / "x").exists()
