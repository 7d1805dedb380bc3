"""A pickled table is opened anew in another process, or raises with a remedy."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from features.tables import table_of
from penstock import features
from penstock.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from pathlib import Path

IDS = [7, 3, 7, 40]


def gathered(table: Any) -> Any:
    """Returns the rows and statistics of a table in another process."""
    try:
        stats = table.stats()
        return table.gather(IDS).tolist(), table.gather(IDS).tolist(), stats.hits, stats.is_checked
    except penstock.PenstockError as error:
        return type(error).__name__, str(error)


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    rows = np.arange(50 * 768, dtype=np.float32).reshape(50, 768)
    features.write(tmp_path / "steps" / "step-0000000001", rows, key="paper")
    io = penstock.offload.TensorIO(queue_depth=5)
    table = features.open(
        tmp_path / "steps" / "step-0000000001", key="paper", cache=features.Cache(1 << 20), io=io
    )
    with table:
        table.pin([3])
        yield table, rows


def test_a_table_that_is_passed_to_a_new_process_is_opened_there(opened: Any) -> None:
    table, rows = opened
    table.gather(IDS)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(gathered, (table,))
        pool.close()
        pool.join()
    assert found == (rows[IDS].tolist(), rows[IDS].tolist(), 0, True)


def test_a_fork_says_so(opened: Any) -> None:
    table, _ = opened
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: there.send(gathered(table)))
    process.start()
    kind, told = here.recv()
    process.join()
    assert kind == "PenstockError"
    assert f"was opened by process {os.getpid()}, of which this one is a fork: open it here" in told


def test_a_copy_has_the_same_rows_and_settings_and_nothing_in_its_cache(opened: Any) -> None:
    table, rows = opened
    table.gather(IDS)
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        with copied:
            assert np.array_equal(copied.gather(IDS), rows[IDS])
            assert (copied.stats().hits, copied.stats().read_rows) == (0, 3)
            assert copied._io._choice == table._io._choice
            assert copied._cache.memory_bytes == 1 << 20
            assert copied._cache is not table._cache


def test_tables_that_share_a_cache_share_the_one_that_arrives(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=50, width=64)
    cache = features.Cache(1 << 20)
    with (
        features.Features(source, cache=cache) as one,
        features.Features(source, cache=cache) as two,
    ):
        first, second = pickle.loads(pickle.dumps((one, two)))
    with first, second:
        assert first._cache is second._cache
        assert np.array_equal(first.gather(IDS), want[IDS])


def test_what_has_changed_meanwhile_or_is_closed_does_not_arrive(
    opened: Any, tmp_path: Path
) -> None:
    table, rows = opened
    packed = pickle.dumps(table)
    path = tmp_path / "steps" / "step-0000000001"
    table.close()
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(table)
    features.write(path, rows, key="paper", overwrite=True)
    with pytest.raises(CorruptCheckpointError, match="'paper' was opened by the process"):
        pickle.loads(packed)
    # No process holds it, so it can be replaced.
    features.write(path, rows, key="paper", overwrite=True)
    (tmp_path / "file").mkdir()
    source, _ = table_of(tmp_path / "file", rows=50, width=64)
    with features.Features(source) as other:
        packed = pickle.dumps(other)
    (tmp_path / "file" / "part-0").write_bytes(b"another")
    with pytest.raises(CorruptCheckpointError, match="has changed"):
        pickle.loads(packed)
