"""Small batches that one native call gathers into a tensor: rows, memory, changes of files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import penstock
from features.tables import table_of
from penstock import features
from penstock.errors import CorruptCheckpointError
from threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = 300
"""Rows of a batch whose result is large enough for the native call."""
WIDTH = 128


@pytest.fixture
def table(tmp_path: Path) -> Any:
    source, want = table_of(tmp_path, rows=1000, width=WIDTH)
    with features.Features(source, cache=features.Cache(1 << 20)) as table:
        yield table, torch.from_numpy(want)


def is_native(table: Any, ids: Any) -> bool:
    return table._small.gather(ids) is not None


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16, torch.uint64]
)
@pytest.mark.parametrize("shape", [(256,), (16, 16), (1, 256, 1)])
def test_rows_are_those_of_ids_of_any_type_and_shape(table: Any, dtype: Any, shape: Any) -> None:
    rows, want = table
    ids = torch.randperm(256).to(dtype).view(shape)
    # The first batch reads the rows, the others find them.
    for _ in range(3):
        got = rows.gather(ids)
        assert is_native(rows, ids)
        assert got.shape == (*shape, WIDTH)
        assert got.is_contiguous()
        assert torch.equal(got, want[ids.long()])
    assert rows.stats().read_rows <= 256


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: ids.numpy(),
        lambda ids: ids.tolist(),
        lambda ids: ids.repeat_interleave(2)[::2],
        lambda ids: ids.as_subclass(torch.nn.Parameter),
        lambda ids: ids[:3],
        lambda ids: ids[:0],
        lambda ids: ids.repeat(100),
    ],
)
def test_other_ids_take_the_usual_way(table: Any, make: Callable[[Any], Any]) -> None:
    rows, want = table
    ids = torch.arange(ROWS).flip(0)
    assert is_native(rows, ids)
    other = make(ids)
    assert not is_native(rows, other)
    got = torch.as_tensor(rows.gather(other))
    assert torch.equal(got, want[torch.as_tensor(other).long()])


@pytest.mark.parametrize("bad", [1000, -1])
def test_an_id_without_a_row_is_named(table: Any, bad: int) -> None:
    rows, _ = table
    ids = torch.arange(ROWS)
    ids[7] = bad
    with pytest.raises(IndexError, match=rf"ids\[7\] is {bad}: .*int64"):
        rows.gather(ids)
    assert rows.stats().rows == 0


@pytest.mark.parametrize("ids", [torch.rand(ROWS), torch.ones(ROWS, dtype=torch.bool)])
def test_ids_are_integers(table: Any, ids: Any) -> None:
    with pytest.raises(TypeError, match="use integers"):
        table[0].gather(ids)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.complex64]
)
def test_elements_have_the_type_of_the_table(tmp_path: Path, dtype: Any) -> None:
    stored = torch.randint(0, 2, (200, 8, 128)).to(dtype)
    features.write(tmp_path / "table", stored)
    with features.open(tmp_path / "table", cache=features.Cache(1 << 20)) as table:
        ids = torch.arange(200).flip(0)
        for _ in range(2):
            got = table.gather(ids)
            assert is_native(table, ids)
            assert got.dtype == dtype
            assert torch.equal(got.view(torch.uint8), stored[ids].view(torch.uint8))


def test_memory_of_a_result_is_reused_only_when_nobody_has_it(table: Any) -> None:
    rows, want = table
    first = rows.gather(torch.arange(ROWS))
    row = first[5]
    second = rows.gather(torch.arange(ROWS) + 100)
    address = second.data_ptr()
    del first
    assert rows.gather(torch.arange(ROWS) + 200).data_ptr() != address
    assert torch.equal(row, want[5])
    assert torch.equal(second, want[100 : 100 + ROWS])
    del second
    assert rows.gather(torch.arange(ROWS)).data_ptr() == address


def test_a_result_outlives_its_table_and_belongs_to_the_caller(tmp_path: Path) -> None:
    source, want = table_of(tmp_path, rows=ROWS, width=WIDTH)
    with features.Features(source, cache=features.Cache(1 << 20)) as table:
        rows = table.gather(torch.arange(ROWS))
        rows[3] = 0
        again = table.gather(torch.arange(ROWS))
    del table
    assert torch.equal(again, torch.from_numpy(want))
    assert not rows[3].any()
    weight = torch.ones(WIDTH, requires_grad=True)
    (rows @ weight).sum().backward()
    assert torch.allclose(weight.grad, rows.sum(0))


def rewritten(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def moved(path: Path) -> None:
    path.parent.rename(path.parent.with_suffix(".old"))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("change", [rewritten, replaced, moved, truncated, os.unlink])
def test_a_changed_file_is_an_error_though_all_rows_are_cached(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    directory = tmp_path / "table"
    directory.mkdir()
    source, _ = table_of(directory, rows=ROWS, width=WIDTH, parts=2)
    ids = torch.arange(ROWS)
    with features.Features(source, cache=features.Cache(1 << 20)) as table:
        table.gather(ids)
        table.gather(ids)
        change(directory / "part-1")
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match=r"part-[01] (has changed|is gone)"):
                table.gather(ids)


def test_a_touched_file_of_a_checkpoint_is_compared_once(tmp_path: Path) -> None:
    stored = torch.rand(ROWS, WIDTH)
    penstock.save(tmp_path / "saved", {"x": stored})
    ids = torch.arange(ROWS)
    with features.open(tmp_path / "saved", key="x", cache=features.Cache(1 << 20)) as table:
        assert torch.equal(table.gather(ids), stored)
        for path in [*(tmp_path / "saved").iterdir()]:
            os.link(path, tmp_path / f"{path.name}.more")
        for _ in range(2):
            assert torch.equal(table.gather(ids), stored)
        assert table._files.times.are_unchanged()


def test_a_closed_table_gathers_nothing(tmp_path: Path) -> None:
    source, _ = table_of(tmp_path, rows=ROWS, width=WIDTH)
    ids = torch.arange(ROWS)
    for is_used in (False, True):
        table = features.Features(source)
        if is_used:
            table.gather(ids)
        table.close()
        with pytest.raises(ValueError, match="closed"):
            table.gather(ids)


def test_a_fork_is_told_to_open_it_anew(table: Any) -> None:
    rows, _ = table
    ids = torch.arange(ROWS)
    rows.gather(ids)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(penstock.PenstockError, match="fork"):
                rows.gather(ids)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kept", [100, 400, 4000])
def test_threads_gather_from_tables_of_one_cache(tmp_path: Path, kept: int) -> None:
    """Rows are right though others evict them; tables are small or large for the cache."""
    sizes = [500, 700, 3000]
    cache = features.Cache(kept * (WIDTH * 4 + 64))
    tables = []
    for number, size in enumerate(sizes):
        directory = tmp_path / str(number)
        directory.mkdir()
        source, want = table_of(directory, rows=size, width=WIDTH)
        tables.append((features.Features(source, cache=cache), torch.from_numpy(want)))

    def gather(number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        for turn in range(60):
            table, want = tables[(number + turn) % len(tables)]
            # Some rows are asked for more often than others, so that batches hit and miss.
            ids = (torch.rand(ROWS, generator=draw) ** 3 * len(table)).long()
            assert torch.equal(table.gather(ids), want[ids])

    on_threads(gather, range(4))
    for table, _ in tables:
        assert table.stats().hits > 0
        table.close()


def test_ids_whose_memory_is_not_what_they_are_take_the_usual_way(table: Any) -> None:
    rows, _ = table
    rows.gather(torch.arange(ROWS))
    released = torch.arange(ROWS)
    released.untyped_storage().resize_(0)
    negated = torch._neg_view(torch.arange(1, ROWS + 1))
    for ids in (released, negated, torch._efficientzerotensor(ROWS, dtype=torch.long)):
        with pytest.raises((IndexError, TypeError, ValueError)):
            rows.gather(ids)


def test_a_table_that_is_closed_while_it_is_first_used_stays_closed(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = table
    opened = rows._small._results.row_tensors

    def closed_meanwhile(*args: Any) -> Any:
        rows.close()
        return opened(*args)

    monkeypatch.setattr(rows._small._results, "row_tensors", closed_meanwhile)
    for _ in range(2):
        with pytest.raises(ValueError, match="closed"):
            rows.gather(torch.arange(ROWS))
