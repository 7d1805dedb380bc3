"""Gathered rows equal the table's, whatever is requested, cached, merged or concurrent."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from features.tables import table_of
from penstock import features
from penstock.errors import CorruptCheckpointError, UnsupportedStateError
from threads import on_threads

if TYPE_CHECKING:
    from pathlib import Path


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_the_table(tmp_path_factory: Any, data: Any) -> None:
    draw = data.draw
    rows, width = draw(st.integers(1, 400)), draw(st.sampled_from([1, 3, 32, 128, 1000, 1024]))
    source, want = table_of(
        tmp_path_factory.mktemp("table"),
        rows=rows,
        width=width,
        offset=draw(st.sampled_from([0, 8, 128, 4096])),
        padding=draw(st.sampled_from([0, 3])),
        parts=draw(st.integers(1, min(rows, 4))),
    )
    cache_rows = draw(st.one_of(st.none(), st.integers(1, rows + 3)))
    cache = None if cache_rows is None else features.Cache(cache_rows * (want[0].nbytes + 64))
    gap_bytes = draw(st.sampled_from([0, 4096, 1 << 20]))
    kinds = [np.int64, np.uint64, np.int32, np.uint16]
    with features.Features(source, cache=cache, gap_bytes=gap_bytes) as table:
        for _ in range(draw(st.integers(1, 4))):
            ids = draw(st.lists(st.integers(0, rows - 1), max_size=300))
            got = table.gather(np.array(ids, draw(st.sampled_from(kinds))))
            assert np.array_equal(got, want[ids].reshape(got.shape))
        batches = draw(st.lists(st.lists(st.integers(0, rows - 1), max_size=50), max_size=6))
        streamed = list(table.stream(batches))
        assert [ids for ids, _ in streamed] == batches
        assert all(np.array_equal(got, want[ids].reshape(got.shape)) for ids, got in streamed)


def test_each_row_of_a_batch_is_read_once_and_neighbours_together(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=1000, width=1024)
    with features.Features(source, gap_bytes=0) as table:
        ids = [7, 900, 8, 7, 9, 900, 7]
        assert np.array_equal(table.gather(ids), want[ids])
        stats = table.stats()
    assert (stats.rows, stats.read_rows, stats.requests) == (7, 4, 2)
    assert (stats.read_bytes, stats.amplification) == (4 * 4096, 1.0)


@pytest.mark.parametrize(
    ("gap_rows", "others", "requests"),
    [(0, 0, 1), (2, 0, 1), (3, 0, 2), (4, 0, 2), (0, 3, 4), (1, 1, 2), (2, 1, 3)],
)
def test_a_gap_is_read_over_where_that_saves_an_eighth(
    tmp_path: Path, gap_rows: int, others: int, requests: int
) -> None:
    """A request costs as much as three rows; merging two saves three less the gap."""
    source, want = table_of(tmp_path, rows=100, width=1024)
    ids = [10, 11 + gap_rows, *range(30, 30 + 20 * others, 20)]
    with features.Features(source, gap_bytes=3 * 4096) as table:
        assert np.array_equal(table.gather(ids), want[ids])
        assert table.stats().requests == requests


def test_small_rows_of_a_page_take_one_request(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=10_000, width=32)
    with features.Features(source, gap_bytes=0) as table:
        ids = np.arange(320, 352)
        assert np.array_equal(table.gather(ids), want[ids])
        assert table.stats().requests == 1


def test_what_is_in_the_cache_is_not_read_again(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=500, width=64)
    cache = features.Cache(1 << 20)
    with (
        features.Features(source, cache=cache) as table,
        features.Features(source, cache=cache) as other,
    ):
        for _ in range(3):
            assert np.array_equal(table.gather(np.arange(500)), want)
        assert (table.stats().hits, table.stats().read_rows) == (1000, 500)
        # Rows of another table differ, though they have the same numbers.
        assert np.array_equal(other.gather(np.arange(500)), want)
        assert other.stats().hits == 0


def test_a_row_that_is_on_its_way_is_not_read_again(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=4000, width=1024)
    with features.Features(source, cache=features.Cache(32 << 20)) as table:
        ids = np.arange(0, 4000, 2)
        pending = [table.gather_async(ids) for _ in range(8)]
        assert all(np.array_equal(one.result(), want[ids]) for one in pending)
        stats = table.stats()
    assert stats.read_rows == len(ids)
    assert stats.hits + stats.shared == 7 * len(ids)


def test_a_cache_of_one_row_is_none_in_the_way(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=300, width=1024)
    with features.Features(source, cache=features.Cache(4096 + 64)) as table:
        batches = [np.random.default_rng(seed).integers(0, 300, 200) for seed in range(8)]
        assert all(np.array_equal(got, want[ids]) for ids, got in table.stream(batches))


def test_what_coming_batches_need_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise all batches are in flight at once, and none of their rows can be evicted.
    monkeypatch.setattr("penstock.features.features._AHEAD_ROWS", 1)
    source, want = table_of(tmp_path, rows=400, width=1024)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 400, 20) for _ in range(200)]
    read = {}
    for window in (0, 60):
        cache = features.Cache(100 * (4096 + 64))
        with features.Features(source, cache=cache) as table:
            for ids, rows in table.stream(batches, window=window):
                assert np.array_equal(rows, want[ids])
            read[window] = table.stats().read_rows
    # Belady's optimum has about half of the misses here.
    assert read[60] < 0.8 * read[0]


def test_a_stream_that_is_left_is_forgotten(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=400, width=64)
    with features.Features(source, cache=features.Cache(100 * 320)) as table:
        for _ in range(3):
            stream = table.stream([np.arange(100)] * 20, window=10)
            next(stream)
            stream.close()
        assert np.array_equal(table.gather(np.arange(400)), want)
        with pytest.raises(IndexError, match=r"ids\[0\] is 400"):
            list(table.stream([[1], [400]], window=5))
        with pytest.raises(ValueError, match="window"):
            next(table.stream([], window=-1))


@pytest.mark.parametrize("then", ["gathered", "forgotten", "dropped", "not hinted"])
def test_rows_are_hinted_without_a_stream(tmp_path: Path, then: str) -> None:
    source, want = table_of(tmp_path, rows=400, width=64)
    needed = np.arange(50)
    with features.Features(source, cache=features.Cache(100 * 320)) as table:
        first = table.hint(needed)
        last = None if then == "not hinted" else table.hint(needed)
        assert np.array_equal(first.gather_async().result(), want[needed])
        if last is not None and then == "forgotten":
            last.forget()
            with pytest.raises(ValueError, match="hinted no more"):
                last.gather_async()
        if then == "dropped":
            last = None
        for begin in range(60, 400, 20):
            table.gather(np.arange(begin, begin + 20))
        before = table.stats().hits
        if last is not None and then == "gathered":
            assert np.array_equal(last.gather_async().result(), want[needed])
        else:
            assert np.array_equal(table.gather(needed), want[needed])
        assert table.stats().hits - before == (len(needed) if then == "gathered" else 0)
        with pytest.raises(IndexError, match="400"):
            table.hint([400])
        kept = table.hint(needed)
    with pytest.raises(ValueError, match="closed"):
        kept.gather_async()


@pytest.mark.parametrize("policy", ["sieve", "s3fifo", "static"])
def test_what_is_pinned_stays(tmp_path: Path, policy: Any) -> None:
    source, want = table_of(tmp_path, rows=1000, width=64)
    cache = features.Cache(100 * (256 + 128), policy)
    with features.Features(source, cache=cache) as table:
        hot = torch.arange(40, 0, -1)
        assert table.pin(hot) == 40
        for _ in range(3):
            assert np.array_equal(table.gather(np.arange(100, 1000)), want[100:])
        before = table.stats()
        assert np.array_equal(table.gather(hot), torch.from_numpy(want)[hot])
        assert table.stats().hits - before.hits == 40
        assert table.pin(np.arange(1000)) <= 150
        with pytest.raises(IndexError):
            table.pin([1000])
    with features.Features(source, cache=cache) as other:
        # Rows pinned by a closed table can be evicted.
        assert np.array_equal(other.gather(np.arange(1000)), want)
    with features.Features(source) as table, pytest.raises(ValueError, match="no cache"):
        table.pin([1])


def test_threads_share_a_table(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=2000, width=256)
    with features.Features(source, cache=features.Cache(300 * 1088)) as table:

        def gather(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(20):
                ids = rng.zipf(1.2, 500) % 2000
                assert np.array_equal(table.gather(ids), want[ids])

        on_threads(gather, range(6))


def test_results_are_of_the_kind_and_shape_of_the_ids(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=50, width=8)
    with features.Features(source) as table:
        assert table.shape == (50, 8)
        assert len(table) == 50
        got = table.gather(torch.tensor([[1, 2, 3], [4, 5, 6]]))
        assert torch.equal(got, torch.from_numpy(want[[[1, 2, 3], [4, 5, 6]]]))
        assert np.array_equal(table[3], want[3])
        assert table.gather([]).shape == (0, 8)
        assert table.gather(torch.empty(0, dtype=torch.int32)).shape == (0, 8)
        out = np.zeros((2, 8), np.float32)
        assert table.gather((4, 4), out=out) is out
        assert np.array_equal(out, want[[4, 4]])
        tensor = torch.zeros(1, 8)
        version = tensor._version
        table.gather([9], out=tensor)
        assert torch.equal(tensor[0], torch.from_numpy(want[9]))
        assert tensor._version > version


def test_ids_are_read_where_a_tensor_has_them(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=64, width=32)
    numbers = torch.arange(64).flip(0)
    cases = [numbers[7:50], numbers[::3], numbers.view(8, 8).T, numbers.int()[5:], numbers[:0]]
    with features.Features(source, cache=features.Cache(1 << 16)) as table:
        for ids in cases * 2:
            assert torch.equal(table.gather(ids), torch.from_numpy(want)[ids.long()])


def test_a_large_result_is_reused_only_when_nobody_has_it(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=200, width=1024)
    with features.Features(source) as table:
        first = table.gather(np.arange(100))
        row = first[5]
        second = table.gather(np.arange(100, 200))
        assert np.array_equal(first, want[:100])
        address = second.ctypes.data
        del first
        third = table.gather(np.arange(50, 150))
        assert third.ctypes.data != address
        assert np.array_equal(row, want[5])
        assert np.array_equal(second, want[100:])
        assert np.array_equal(third, want[50:150])


def test_rows_can_be_awaited(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=100, width=1024)

    async def gather(table: features.Features) -> None:
        first, second = await asyncio.gather(
            *(_awaited(table.gather_async(ids)) for ids in ([1, 2], [3]))
        )
        assert np.array_equal(first, want[[1, 2]])
        assert np.array_equal(second, want[[3]])

    async def _awaited(pending: features.PendingRows) -> Any:
        return await pending

    with features.Features(source) as table:
        asyncio.run(gather(table))


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([3, 50], r"ids\[1\] is 50: the table has rows 0 to 49 .*int64"),
        ([-1], r"ids\[0\] is -1"),
        (np.array([1, 2, 200], np.uint8).astype(np.int8), r"ids\[2\] is -56: .*int8"),
        (np.array([2**64 - 1], np.uint64), r"ids\[0\] is 18446744073709551615"),
        ([2**64 - 1], r"ids\[0\] is 18446744073709551615"),
        ([1, 2**63], r"ids\[1\] is 9223372036854775808"),
        ([[1, 2], [2**70, -1]], r"ids\[2\] is 1180591620717411303424: no table"),
        ([1, -(2**70)], r"ids\[1\] is -1180591620717411303424: no table"),
    ],
)
def test_an_id_without_a_row_is_told_and_nothing_is_read(
    tmp_path: Path, ids: Any, told: str
) -> None:
    source, _ = table_of(tmp_path, rows=50, width=8)
    with features.Features(source, cache=features.Cache(1 << 16)) as table:
        with pytest.raises(IndexError, match=told):
            table.gather(ids)
        assert table.stats().requests == 0


@pytest.mark.parametrize("ids", [[1.0], ["a"], np.array([True]), None])
def test_ids_are_integers(tmp_path: Path, ids: Any) -> None:
    source, _ = table_of(tmp_path, rows=5, width=8)
    with features.Features(source) as table, pytest.raises(TypeError, match="ids"):
        table.gather(ids)


def test_memory_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source, _ = table_of(tmp_path, rows=5, width=8)
    read_only = np.zeros((1, 8), np.float32)
    read_only.flags.writeable = False
    with features.Features(source) as table:
        for out in (
            np.zeros((2, 8), np.float32),
            np.zeros((1, 8), np.float64),
            np.zeros((1, 16), np.float32)[:, ::2],
            read_only,
            torch.zeros(1, 8, requires_grad=True),
        ):
            with pytest.raises(ValueError, match="out: "):
                table.gather([1], out=out)
        with pytest.raises(TypeError, match="out: "):
            table.gather([1], out=bytearray(32))


def test_a_table_that_changes_is_an_error(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=100, width=1024)
    path = tmp_path / "part-0"
    with features.Features(source) as table:
        assert np.array_equal(table.gather([99]), want[[99]])
        os.truncate(path, 4096)
        # The read may fail or succeed: data behind the end of the file is missing.
        for row in (99, 0):
            with pytest.raises(CorruptCheckpointError, match=r"part-0 has changed"):
                table.gather([row])
        with pytest.raises(CorruptCheckpointError, match="has changed"):
            features.Features(source)


def test_a_row_that_no_request_moves_is_refused(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=3, width=300_000)
    with pytest.raises(UnsupportedStateError, match=r"rows of 1200000 bytes; .*extent_b"):
        features.Features(source)
    io = penstock.offload.TensorIO(extent_bytes=2 << 20)
    with features.Features(source, io=io) as table:
        assert np.array_equal(table.gather([2, 0]), want[[2, 0]])


def test_a_closed_table_gathers_nothing(tmp_path: Path) -> None:
    source, _ = table_of(tmp_path, rows=5, width=8)
    table = features.Features(source)
    table.close()
    table.close()
    with pytest.raises(ValueError, match="closed"):
        table.gather([1])


def test_a_fork_is_told_to_open_it_anew(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=50, width=1024)
    table = features.Features(source, cache=features.Cache(1 << 20))
    pending = table.gather_async(np.arange(50))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(penstock.PenstockError, match="fork"):
                table.gather([1])
            with pytest.raises(penstock.PenstockError, match="fork"):
                pending.result()
            with features.Features(source) as own:
                code = 0 if np.array_equal(own.gather([7]), want[[7]]) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(pending.result(), want)
    table.close()


def test_a_cache_has_rows_of_one_size(tmp_path: Path) -> None:
    for name in ("narrow", "wide"):
        (tmp_path / name).mkdir()
    narrow, _ = table_of(tmp_path / "narrow", rows=5, width=8)
    wide, _ = table_of(tmp_path / "wide", rows=5, width=16)
    cache = features.Cache(1 << 16)
    features.Features(narrow, cache=cache).close()
    with pytest.raises(ValueError, match=r"rows of 32 bytes, and those of .* have 64"):
        features.Features(wide, cache=cache)
    with pytest.raises(ValueError, match=r"a row of .* takes 96"):
        features.Features(narrow, cache=features.Cache(95))


def test_ids_of_a_stream_are_those_that_came(tmp_path: Path) -> None:
    """The caller may reuse the memory of its ids."""
    source, want = table_of(tmp_path, rows=50, width=8)

    def refilled() -> Any:
        ids = np.zeros(3, np.int64)
        for number in range(12):
            ids[:] = number
            yield ids

    with features.Features(source) as table:
        streamed = list(table.stream(refilled()))
    assert [ids.tolist() for ids, _ in streamed] == [[number] * 3 for number in range(12)]
    assert all(np.array_equal(rows, want[ids]) for ids, rows in streamed)


def test_what_ends_a_stream_comes_behind_the_batches_before(tmp_path: Path) -> None:
    source, _ = table_of(tmp_path, rows=50, width=8)

    def broken() -> Any:
        yield [1]
        yield [2]
        raise RuntimeError("no more")

    with features.Features(source, cache=features.Cache(1 << 16)) as table:
        for batches, error in (([[1], [2], [99], [3]], IndexError), (broken(), RuntimeError)):
            found: list[Any] = []
            with pytest.raises(error) as caught:
                found.extend(ids for ids, _ in table.stream(batches, window=1000))
            assert found == [[1], [2]]
            assert "batch 2 of the stream" in caught.value.__notes__[0]
