"""`IndexedRows.stream`: batches of an indexed dataset, read ahead of use."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from indexed import rows_of, write_indexed
from penstock.features import open_indexed

ROWS = rows_of([5] * 8, "int32")


@pytest.fixture
def texts(tmp_path):
    with open_indexed(write_indexed(tmp_path / "texts", ROWS, "int32")) as texts:
        yield texts


@pytest.mark.parametrize("memory", [np.zeros(1, np.int64), torch.zeros(1, dtype=torch.int64), [0]])
def test_a_producer_may_fill_the_same_memory_again(texts, memory):
    def batches():
        for one in range(4):
            memory[0] = one
            yield memory

    found = list(texts.stream(batches()))
    assert [int(ids[0]) for ids, _ in found] == [0, 1, 2, 3]
    for ids, ragged in found:
        assert type(ids) is type(memory)
        assert np.array_equal(np.asarray(ragged.values), ROWS[int(ids[0])])


def test_small_batches_are_not_all_begun_before_the_first_is_given(texts):
    taken = 0

    def batches():
        nonlocal taken
        for taken in range(1, 60_001):
            yield [taken % 8]

    stream = texts.stream(batches())
    for _ in range(3):
        next(stream)
        assert taken <= 1000


def test_endless_empty_batches_are_given(texts):
    stream = texts.stream(itertools.repeat([]))
    for ids, ragged in itertools.islice(stream, 2000):
        assert ids == []
        assert len(ragged.values) == 0


def test_an_error_names_the_batch(texts):
    def broken():
        yield [1]
        raise OSError("no more batches")

    for batches, error, at in [
        ([[0], [7], [8]], IndexError, 2),
        ([[0], [0.5]], TypeError, 1),
        (broken(), OSError, 1),
    ]:
        found = []
        with pytest.raises(error) as caught:
            found.extend(texts.stream(batches))
        assert len(found) == at
        assert caught.value.__notes__ == [f"batch {at} of the stream, counted from 0"]
    with pytest.raises(TypeError, match="must be an iterable of ids"):
        next(texts.stream(3))
