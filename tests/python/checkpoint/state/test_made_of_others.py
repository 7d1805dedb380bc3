"""Tensors made of others: every tensor that a save accepts can be loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from compare import assert_same
from forge import Forgery
from penstock.errors import CorruptCheckpointError, UnsupportedStateError

LAYOUTS = ("csr", "csc", "bsr", "bsc")


def numbers(draw, count, low, high):
    return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))


def values_of(draw, *shape):
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool]))
    return (torch.arange(torch.Size(shape).numel()) % 3).reshape(shape).to(dtype)


def coo(draw):
    """Draws COO tensors with any flag, in any order; some with indices out of range."""
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dense = draw(st.lists(st.integers(0, 2), max_size=2))
    count = draw(st.integers(0, 4))
    rows = [numbers(draw, count, 0, draw(st.sampled_from([max(0, one - 1), 3]))) for one in shape]
    indices = torch.tensor(rows, dtype=torch.int64).reshape(len(shape), count)
    value = torch.sparse_coo_tensor(
        indices, values_of(draw, count, *dense), (*shape, *dense), check_invariants=False
    )
    flag = draw(st.sampled_from([None, False, True]))
    return value if flag is None else value._coalesced_(flag)


def of_no_dimension(draw):
    count = draw(st.integers(0, 2))
    indices = torch.empty((0, count), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values_of(draw, count), ())


def compressed(draw):
    """Draws index rows in any order, some repeated or out of range; some pointers are invalid."""
    layout = draw(st.sampled_from(LAYOUTS))
    block = (2, 3) if layout in ("bsr", "bsc") else ()
    sizes = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    # In row layouts the rows come first, in column layouts the columns.
    along, across = sizes if layout in ("csr", "bsr") else sizes[::-1]
    batches = draw(st.sampled_from([(), (2,)]))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    tables = [sorted(numbers(draw, max(0, along - 1), 0, 3)) for _ in range(2 if batches else 1)]
    count = draw(st.integers(0, 3)) if along else draw(st.sampled_from([0, 0, 0, 1]))
    tables = [[0, *(min(one, count) for one in row), count][: along + 1] for row in tables]
    if draw(st.integers(0, 9)) == 0:
        tables[0] = tables[0][::-1]
    highest = draw(st.sampled_from([max(0, across - 1)] * 3 + [across]))
    plain = [numbers(draw, count, 0, highest) for _ in tables]
    dense = () if block else draw(st.sampled_from([(), (2,)]))
    shape = [size * part for size, part in zip(sizes, block or (1, 1), strict=True)]
    return torch.sparse_compressed_tensor(
        torch.tensor(tables, dtype=dtype).reshape(*batches, along + 1),
        torch.tensor(plain, dtype=dtype).reshape(*batches, count),
        values_of(draw, *batches, count, *block, *dense),
        (*batches, *shape, *dense),
        layout=getattr(torch, f"sparse_{layout}"),
        check_invariants=False,
    )


def nested(draw):
    """Draws rows of any number of dimensions, or no rows."""
    dims = draw(st.integers(0, 3))
    shapes = draw(st.lists(st.lists(st.integers(0, 3), min_size=dims, max_size=dims), max_size=3))
    return torch.nested.nested_tensor([torch.rand(shape) for shape in shapes])


def jagged(draw):
    width = draw(st.integers(0, 2))
    rows = [torch.rand(one, width) for one in draw(st.lists(st.integers(0, 3), min_size=1))]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@st.composite
def any_made_of_others(draw):
    kind = draw(st.sampled_from([coo, of_no_dimension, compressed, compressed, nested, jagged]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return kind(draw)


def is_good(value):
    """Whether PyTorch's own check accepts a sparse tensor; other kinds have none."""
    if value.layout is torch.sparse_coo:
        args = value._indices(), value._values(), value.shape, value.is_coalesced()
        check = torch._validate_sparse_coo_tensor_args
    elif value.layout in (torch.strided, torch.jagged):
        return True
    else:
        is_by_row = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        pair = (
            (value.crow_indices(), value.col_indices())
            if is_by_row
            else (value.ccol_indices(), value.row_indices())
        )
        args = *pair, value.values(), value.shape, value.layout
        check = torch._validate_sparse_compressed_tensor_args
    try:
        check(*args)
    except RuntimeError:
        return False
    return True


@settings(
    max_examples=150,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(value=any_made_of_others())
def test_a_load_takes_whatever_a_save_has_taken(tmp_path, value):
    path = Path(mkdtemp(dir=tmp_path)) / "a"
    try:
        penstock.save(path, {"x": value})
    except UnsupportedStateError:
        assert not is_good(value)
        return
    assert_same(penstock.load(path)["x"], value)


UNSORTED = {
    "csr": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 3.0]), (2, 3)
    ),
    "csc, twice": lambda: torch.sparse_csc_tensor(
        torch.tensor([0, 2, 3]), torch.tensor([1, 1, 0]), torch.tensor([1.0, 2.0, 3.0]), (3, 2)
    ),
    "no rows": lambda: torch.nested.nested_tensor([]),
    "numbers": lambda: torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)]),
}


@pytest.mark.parametrize("kind", UNSORTED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_pytorch_makes_without_a_word_comes_back_and_fills(tmp_path, kind):
    value = UNSORTED[kind]()
    penstock.save(tmp_path / "a", {"x": value})
    assert_same(penstock.load(tmp_path / "a")["x"], value)
    target = {"x": UNSORTED[kind]()}
    penstock.load(tmp_path / "a", into=target)
    assert_same(target["x"], value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (
            lambda: torch.sparse_coo_tensor([[2, 0]], [1.0, 2.0], (3,))._coalesced_(True),
            r"coalesce\(\)",
        ),
        (
            lambda: torch.sparse_csr_tensor(
                torch.tensor([0, 1]), torch.tensor([7]), torch.ones(1), (1, 2)
            ),
            "check_invariants=True",
        ),
    ],
)
def test_what_no_load_would_take_is_refused_by_the_save(tmp_path, value, remedy):
    with pytest.raises(UnsupportedStateError, match=rf"^x: .*{remedy}"):
        penstock.save(tmp_path / "a", {"x": value()})
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_indices_that_reach_outside_are_refused_where_a_target_is_filled_too(tmp_path):
    parts = {"p": torch.tensor([0, 1, 2]), "c": torch.tensor([1, 900]), "v": torch.ones(2)}
    path = tmp_path / "a"
    penstock.save(path, parts)
    names = [one.name for one in penstock.inspect(path).tensors]
    compressed, plain, values = (f'{{"$":"tensor","i":{names.index(key)}}}' for key in "pcv")
    Forgery(path).write_tree(
        '{"x":{"$":"sparse","layout":"csr","shape":[2,3],"v":{'
        f'"compressed":{compressed},"plain":{plain},"values":{values}}}}}}}'
    )
    target = {"x": torch.eye(3)[:2].to_sparse_csr()}
    with pytest.raises(CorruptCheckpointError, match="outside"):
        penstock.load(path, into=target)
