"""Small batches that one native call gathers: rows, memory, changes of files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import penstock
from features.tables import table_of
from penstock import features
from penstock.errors import CorruptCheckpointError
from penstock.features.gathering import small_batches
from threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = 300
"""Rows of a batch whose result is large enough for memory that is kept."""
FEW = 5
WIDTH = 128


@pytest.fixture
def table(tmp_path: Path) -> Any:
    source, want = table_of(tmp_path, rows=1000, width=WIDTH)
    with features.Features(source, cache=features.Cache(1 << 20)) as table:
        yield table, torch.from_numpy(want)


def is_native(table: Any, ids: Any, out: Any = None) -> bool:
    return table._small.gather(ids, out) is not None


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
        lambda ids: ids.tolist(),
        lambda ids: ids.repeat_interleave(2)[::2],
        lambda ids: ids.as_subclass(torch.nn.Parameter),
        lambda ids: ids[:0],
        lambda ids: ids.repeat(100),
        lambda ids: ids.numpy()[::2],
        lambda ids: ids.numpy().reshape(2, -1).T,
        lambda ids: ids.numpy()[:0],
        lambda ids: ids.numpy()[7:8].reshape(()),
        lambda ids: ids.numpy().astype(">i8"),
        lambda ids: ids.numpy().view(np.recarray),
        lambda ids: ids.repeat(100).numpy(),
    ],
)
def test_other_ids_take_the_usual_way(table: Any, make: Callable[[Any], Any]) -> None:
    rows, want = table
    ids = torch.arange(ROWS).flip(0)
    assert is_native(rows, ids)
    other = make(ids)
    assert not is_native(rows, other)
    got = torch.as_tensor(rows.gather(other))
    assert torch.equal(got, want[torch.tensor(np.asarray(other, np.int64))])


@pytest.mark.parametrize("kind", ["int64", "int32", "int16", "uint8", "uint32", "uint64", "q"])
@pytest.mark.parametrize("shape", [(256,), (16, 16), (1, 256, 1)])
def test_ids_in_an_array_give_an_array(table: Any, kind: str, shape: Any) -> None:
    rows, want = table
    ids = np.random.default_rng(1).permutation(256).astype(kind).reshape(shape)
    for _ in range(3):
        got = rows.gather(ids)
        assert is_native(rows, ids)
        assert type(got) is np.ndarray
        assert (got.shape, got.dtype) == ((*shape, WIDTH), np.float32)
        assert got.flags.c_contiguous
        assert got.flags.writeable
        np.testing.assert_array_equal(got, want.numpy()[ids.astype(int)])
    assert not rows._small._has_tensors, "PyTorch is not asked for"
    assert rows.stats().read_rows <= 256


def test_a_result_of_few_rows_has_memory_of_its_own(table: Any) -> None:
    rows, want = table
    ids = torch.arange(FEW)
    for _ in range(2):
        got = rows.gather(ids)
        assert is_native(rows, ids)
        assert torch.equal(got, want[:FEW])
        assert got.untyped_storage().nbytes() == got.nbytes
        got.resize_(2 * FEW, WIDTH)
        got = rows.gather(ids.numpy())
        assert is_native(rows, ids.numpy())
        np.testing.assert_array_equal(got, want[:FEW].numpy())
        assert got.flags.owndata


@pytest.mark.parametrize("make", [torch.as_tensor, np.asarray])
@pytest.mark.parametrize("bad", [1000, -1, -(1 << 63)])
def test_an_id_without_a_row_is_named(table: Any, bad: int, make: Callable[[Any], Any]) -> None:
    rows, _ = table
    ids = torch.arange(ROWS)
    ids[7] = bad
    out = torch.zeros(ROWS, WIDTH)
    for into in (None, out, out.numpy()):
        with pytest.raises(IndexError, match=rf"ids\[7\] is {bad}: .*int64"):
            rows.gather(make(ids), into)
    assert rows.stats().rows == 0
    assert not out.any()


def test_a_large_unsigned_id_is_named(table: Any) -> None:
    ids = np.array([3, (1 << 64) - 1], np.uint64)
    for made in (ids, torch.from_numpy(ids)):
        with pytest.raises(IndexError, match=r"ids\[1\] is 18446744073709551615: .*uint64"):
            table[0].gather(made)


@pytest.mark.parametrize(
    "ids",
    [
        torch.rand(ROWS),
        torch.ones(ROWS, dtype=torch.bool),
        np.ones(ROWS),
        np.ones(ROWS, bool),
        np.full(ROWS, "x"),
        np.full(ROWS, b"x"),
        np.full(ROWS, 1, "m8[s]"),
        np.zeros(ROWS, [("id", np.int64)]),
    ],
)
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


def address_of(rows: Any) -> int:
    return rows.data_ptr() if isinstance(rows, torch.Tensor) else rows.ctypes.data


@pytest.mark.parametrize("make", [torch.as_tensor, np.asarray])
def test_memory_of_a_result_is_reused_only_when_nobody_has_it(
    table: Any, make: Callable[[Any], Any]
) -> None:
    rows, want = table
    first = rows.gather(make(torch.arange(ROWS)))
    row = first[5]
    second = rows.gather(make(torch.arange(ROWS) + 100))
    address = address_of(second)
    del first
    assert address_of(rows.gather(make(torch.arange(ROWS) + 200))) != address
    assert torch.equal(torch.as_tensor(row), want[5])
    assert torch.equal(torch.as_tensor(second), want[100 : 100 + ROWS])
    del second
    assert address_of(rows.gather(make(torch.arange(ROWS)))) == address


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
        out = torch.empty(ROWS, WIDTH)
        for args in [(ids,), (ids.numpy(),), (ids[:FEW],), (ids, out), (ids, out.numpy())]:
            with pytest.raises(CorruptCheckpointError, match=r"part-[01] (has changed|is gone)"):
                table.gather(*args)


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
        for args in [(ids,), (ids.numpy(),), (ids, torch.empty(ROWS, WIDTH))]:
            with pytest.raises(ValueError, match="closed"):
                table.gather(*args)


def test_a_fork_is_told_to_open_it_anew(table: Any) -> None:
    rows, _ = table
    ids = torch.arange(ROWS)
    rows.gather(ids)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for args in [(ids,), (ids.numpy(),), (ids, torch.empty(ROWS, WIDTH))]:
                with pytest.raises(penstock.PenstockError, match="fork"):
                    rows.gather(*args)
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
    opened = rows._small._results.add_tensors

    def closed_meanwhile(*args: Any) -> Any:
        rows.close()
        return opened(*args)

    monkeypatch.setattr(rows._small._results, "add_tensors", closed_meanwhile)
    for _ in range(2):
        with pytest.raises(ValueError, match="closed"):
            rows.gather(torch.arange(ROWS))


@pytest.mark.parametrize("count", [FEW, ROWS])
def test_rows_go_into_memory_of_the_caller(table: Any, count: int) -> None:
    rows, want = table
    ids = torch.arange(count).flip(0)
    # The first batches read rows, the others find them.
    for shift in (1, 1, 2, 2):
        for made in (ids + shift, (ids + shift).numpy()):
            around = torch.zeros(count + 2, WIDTH)
            array = np.zeros((count, WIDTH), np.float32)
            for out in (around[1:-1], array):
                assert rows.gather(made, out=out) is out
                assert is_native(rows, made, out)
                assert torch.equal(torch.as_tensor(out), want[ids + shift])
            assert not around[0].any()
            assert not around[-1].any()


def test_ids_may_share_memory_with_the_result(tmp_path: Path) -> None:
    stored = torch.randperm(ROWS)
    features.write(tmp_path / "table", stored.view(ROWS, 1))
    with features.open(tmp_path / "table", cache=features.Cache(1 << 20)) as table:
        for view in (lambda one: one, lambda one: one.numpy()):
            ids = torch.arange(ROWS).flip(0)
            out = ids.view(ROWS, 1)
            table.gather(view(ids), out=view(out))
            assert torch.equal(ids, stored.flip(0))


def read_only(out: Any) -> Any:
    array = out.numpy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "make",
    [
        lambda out: out.double(),
        lambda out: out.view(torch.int32),
        lambda out: out[:-1],
        lambda out: out.view(-1),
        lambda out: out[:1].expand(ROWS, WIDTH),
        lambda out: out.t().contiguous().t(),
        lambda out: out.requires_grad_(),
        lambda out: out.requires_grad_() * 2,
        lambda out: out.to("meta"),
        lambda out: out.to_sparse(),
        lambda out: torch._neg_view(out),
        lambda out: torch.complex(out, out).conj().imag,
        lambda out: torch.nested.as_nested_tensor([out]),
        lambda out: out.numpy().astype(np.float64),
        lambda out: out.numpy().astype(">f4"),
        lambda out: out.numpy().T,
        lambda out: out.numpy()[:-1],
        lambda out: np.asfortranarray(out.numpy()),
        lambda out: np.broadcast_to(out.numpy()[:1], (ROWS, WIDTH)),
        read_only,
        lambda out: shrunk(out),
    ],
)
def test_memory_that_does_not_suit_is_refused(table: Any, make: Callable[[Any], Any]) -> None:
    rows, _ = table
    ids = torch.arange(ROWS)
    rows.gather(ids)
    base = torch.zeros(ROWS, WIDTH)
    out = make(base)
    for made in (ids, ids.numpy()):
        assert not is_native(rows, made, out)
        with torch.no_grad(), pytest.raises(ValueError, match=r"^out: .*needed is a contiguous"):
            rows.gather(made, out=out)
    if base.untyped_storage().nbytes() == base.nbytes:
        assert not base.detach().any()


def shrunk(out: Any) -> Any:
    out.untyped_storage().resize_(8)
    return out


@pytest.mark.parametrize("out", [bytearray(ROWS * WIDTH * 4), [0.0] * ROWS, 1])
def test_memory_is_a_tensor_or_an_array(table: Any, out: Any) -> None:
    with pytest.raises(TypeError, match=r"out: .*: use a tensor or an array"):
        table[0].gather(torch.arange(ROWS), out=out)


def test_a_conjugate_view_is_refused(tmp_path: Path) -> None:
    stored = torch.randn(ROWS, WIDTH, dtype=torch.complex64)
    features.write(tmp_path / "table", stored)
    with features.open(tmp_path / "table", cache=features.Cache(1 << 20)) as table:
        ids, out = torch.arange(ROWS), torch.zeros_like(stored)
        with pytest.raises(ValueError, match="out: complex64"):
            table.gather(ids, out=out.conj())
        assert not out.any()
        assert torch.equal(table.gather(ids, out=out), stored)


def test_autograd_learns_of_the_write(table: Any) -> None:
    rows, _ = table
    ids, weight = torch.arange(ROWS), torch.ones(WIDTH, requires_grad=True)
    out = torch.ones(ROWS, WIDTH)
    for made in (ids, ids, ids.numpy()):
        loss = (out * weight).sum()
        version = out._version
        rows.gather(made, out=out)
        assert out._version == version + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        out = torch.empty(ROWS, WIDTH)
    assert rows.gather(ids, out=out) is out
    assert is_native(rows, ids, out)


def test_a_lazy_copy_keeps_its_content(table: Any) -> None:
    rows, want = table
    ids = torch.arange(ROWS)
    for _ in range(2):
        plain = torch.zeros(ROWS, WIDTH)
        lazy = torch._lazy_clone(plain)
        rows.gather(ids, out=lazy)
        assert torch.equal(lazy, want[:ROWS])
        assert not plain.any()


def test_rows_under_way_go_to_the_memory_that_the_tensor_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, want = table_of(tmp_path, rows=1000, width=WIDTH)
    monkeypatch.setattr(small_batches, "bump_versions", lambda outs: outs[0].set_(torch.empty(0)))
    with features.Features(source) as table:
        out = torch.empty(1000, WIDTH)
        storage = out.untyped_storage()
        assert table.gather(torch.arange(1000), out=out) is out
    assert out.shape == (0,)
    assert torch.equal(torch.empty(0).set_(storage, 0, want.shape), torch.from_numpy(want))


def test_elements_that_only_one_library_has(tmp_path: Path) -> None:
    words = np.array([f"{row:03}" for row in range(ROWS)]).reshape(ROWS, 1)
    penstock.save(tmp_path / "words", {"x": words})
    half = torch.randn(ROWS, WIDTH).bfloat16()
    features.write(tmp_path / "half", half)
    ids = torch.arange(ROWS).flip(0)
    with (
        features.open(tmp_path / "words", key="x", cache=features.Cache(1 << 20)) as table,
        features.open(tmp_path / "half", cache=features.Cache(1 << 20)) as halves,
    ):
        for _ in range(2):
            out = np.empty_like(words)
            table.gather(ids, out=out)
            np.testing.assert_array_equal(out, words[::-1])
            np.testing.assert_array_equal(table.gather(ids.numpy()), words[::-1])
            into = torch.empty_like(half)
            assert halves.gather(ids.numpy(), out=into) is into
            assert torch.equal(into, half.flip(0))


def test_a_first_batch_without_autograd_leaves_it_to_later_ones(table: Any) -> None:
    rows, _ = table
    ids, weight = torch.arange(FEW), torch.ones(WIDTH, requires_grad=True)
    with torch.inference_mode():
        assert rows.gather(ids).is_inference()
    got = rows.gather(ids)
    assert is_native(rows, ids)
    assert not got.is_inference()
    (got * weight).sum().backward()
    assert torch.equal(weight.grad, got.sum(0))
