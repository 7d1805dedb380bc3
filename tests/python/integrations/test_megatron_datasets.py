"""`enable(datasets=True)`: Megatron-Core's indexed datasets read by Penstock."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import pickle
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

pytest.importorskip("megatron.core.datasets")

from megatron.core.datasets import indexed_dataset as theirs
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from indexed import CODES, rows_of
from penstock.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    PenstockError,
    StateMismatchError,
)
from penstock.features.indexed.range_file import RangeFile
from penstock.integrations.megatron import IndexedDataset, enable
from penstock.integrations.megatron.datasets.bin_reader import BinReader
from penstock.integrations.megatron.datasets.read_ahead import Window
from penstock.integrations.megatron.datasets.sample_rows import rows_of as rows_of_samples

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MICRO_BATCH, RANKS = 4, 2
copy_cached = RangeFile.copy_cached


def build(prefix, rows, dtype, modes=None, documents=1):
    """Writes a dataset by Megatron-Core's own builder, some rows in each document."""
    builder = theirs.IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=getattr(np, dtype), multimodal=modes is not None
    )
    for index, row in enumerate(rows):
        builder.add_item(torch.from_numpy(row), 0 if modes is None else modes[index])
        if index % documents == documents - 1 or index == len(rows) - 1:
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def assert_same(ours, others):
    if isinstance(others, tuple | list):
        assert type(ours) is type(others)
        assert len(ours) == len(others)
        for one, other in zip(ours, others, strict=True):
            assert_same(one, other)
    elif others is None:
        assert ours is None
    else:
        assert ours.dtype == others.dtype
        assert np.array_equal(ours, others)


@given(
    # Megatron-Core cannot map a data file without bytes.
    lengths=st.lists(st.integers(0, 30) | st.integers(0, 5000), min_size=1, max_size=12).filter(
        any
    ),
    dtype=st.sampled_from(sorted(CODES)),
    is_multimodal=st.booleans(),
    is_mapped=st.booleans(),
    documents=st.integers(1, 4),
    data=st.data(),
)
def test_it_returns_what_megatrons_own_returns(
    tmp_path_factory, lengths, dtype, is_multimodal, is_mapped, documents, data
):
    modes = [at % 5 - 2 for at in range(len(lengths))] if is_multimodal else None
    path = tmp_path_factory.mktemp("indexed") / "texts"
    prefix = build(path, rows_of(lengths, dtype), dtype, modes, documents)
    other = theirs.IndexedDataset(prefix, multimodal=is_multimodal)
    ours = IndexedDataset(prefix, multimodal=is_multimodal, mmap=is_mapped)
    assert isinstance(ours, theirs.IndexedDataset)
    assert isinstance(ours.bin_reader, BinReader)
    for found in (ours, pickle.loads(pickle.dumps(ours))):
        assert len(found) == len(other)
        assert_same(found.sequence_lengths, other.sequence_lengths)
        assert_same(found.document_indices, other.document_indices)
        assert_same(found.get_document_indices(), other.get_document_indices())
        assert_same(found.index.sequence_pointers, other.index.sequence_pointers)
        assert_same(found.index.sequence_modes, other.index.sequence_modes)
        assert found.index.dtype is other.index.dtype
        assert IndexedDataset.exists(prefix)
        for index in range(len(other)):
            assert_same(found[index], other[index])
            assert_same(found[np.int64(index)], other[index])
        first = data.draw(st.integers(0, len(lengths)))
        for part in (slice(first, None), slice(None, first), slice(-2, None)):
            if len(range(len(lengths))[part]):
                assert_same(found[part], other[part])
        one = data.draw(st.integers(0, len(lengths) - 1))
        start = data.draw(st.integers(0, lengths[one]))
        count = data.draw(st.none() | st.integers(0, lengths[one] - start))
        assert_same(found.get(one, start, count), other.get(one, start, count))
        with pytest.raises(ValueError, match="contiguous"):
            found[::2]
        with pytest.raises(TypeError, match="Unexpected type"):
            found["one"]


TOKENIZER = SimpleNamespace(vocab_size=100_000, eod=0, pad=-1, unique_identifiers={"class": "none"})


def gpt(directory, name, samples, *, of=GPTDataset, **settings):
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=256,
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(directory / "cache"),
        split="1,0,0",
        blend=([str(directory / name)], None),
        **settings,
    )
    low = of.build_low_level_dataset(str(directory / name), config)
    indices = np.arange(len(low), dtype=np.int32)
    return of(low, str(directory / name), indices, samples, Split.train, config)


def uncached(monkeypatch):
    """Lets no reader find the page cache filled, as what a test has just written is in it."""
    monkeypatch.setattr(RangeFile, "copy_cached", lambda self, ranges, out: False)


def corpora(directory):
    for seed, (name, count) in enumerate({"x": 150, "y": 60}.items()):
        lengths = np.random.default_rng(seed).integers(1, 900, count).tolist()
        build(directory / name, rows_of(lengths, "int32", seed), "int32")


def batches(first, last, step=MICRO_BATCH * RANKS):
    """Those of one rank, as Megatron-LM's sampler makes them."""
    return [list(range(at, at + MICRO_BATCH)) for at in range(first, last - step, step)]


def assert_samples(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def read_counts(dataset):
    counts = dataset.dataset.bin_reader.file.counts
    return counts.rows, counts.requests


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gets_the_samples_of_megatrons_own(tmp_path, monkeypatch, workers, is_cached):
    if not is_cached:
        uncached(monkeypatch)
    corpora(tmp_path)
    own = gpt(tmp_path, "x", 400)
    order = [*batches(0, 200), [7, 3, 301, 12], [300, 300, 1, 2], *batches(210, 400), [399]]
    expected = [[own[index] for index in batch] for batch in order]
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 400)
        loader = DataLoader(
            ours, batch_sampler=order, num_workers=workers, collate_fn=lambda samples: samples
        )
        for found, batch in zip(loader, expected, strict=True):
            for one, other in zip(found, batch, strict=True):
                assert_samples(one, other)
    assert not hasattr(GPTDataset, "__getitems__")
    assert not isinstance(theirs.IndexedDataset(str(tmp_path / "x")).bin_reader, BinReader)


@pytest.fixture
def one_rank():
    """The process group that Megatron-Core needs to make a blend."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_blend_gets_the_samples_of_megatrons_own(tmp_path, monkeypatch):
    uncached(monkeypatch)
    corpora(tmp_path)

    def blend():
        parts = [gpt(tmp_path, "x", 300), gpt(tmp_path, "y", 100)]
        return BlendedDataset(parts, [0.7, 0.3], 250, parts[0].config)

    own = blend()
    order = batches(0, 250)
    expected = [[own[index] for index in batch] for batch in order]
    with enable(datasets=True):
        ours = blend()
        for batch, samples in zip(order, expected, strict=True):
            for one, other in zip(ours.__getitems__(batch), samples, strict=True):
                assert_samples(one, other)


def test_batches_to_come_are_read_before_they_are_asked_for(tmp_path, monkeypatch):
    uncached(monkeypatch)
    corpora(tmp_path)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 400)
        order = batches(0, 400)
        before = read_counts(ours)[0]
        for batch in order[:3]:
            ours.__getitems__(batch)
        after_three = read_counts(ours)[0]
        assert after_three - before > 3 * 3 * MICRO_BATCH
        # These are there: nothing is read for them alone.
        ours.__getitems__(order[3])
        assert read_counts(ours)[0] == after_three
        # Samples in disorder are read batch by batch, and what was read ahead is dropped.
        ours.__getitems__([5, 1, 9, 300])
        middle = read_counts(ours)[0]
        ours.__getitems__([8, 2, 11, 17])
        assert 0 < read_counts(ours)[0] - middle < 12


def test_files_in_the_page_cache_are_not_read(tmp_path):
    corpora(tmp_path)
    own = gpt(tmp_path, "x", 400)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 400)
        skip_unless_cached(ours)
        for batch in batches(0, 100):
            for one, index in zip(ours.__getitems__(batch), batch, strict=True):
                assert_samples(one, own[index])
        assert read_counts(ours)[0] == 0
        os.truncate(tmp_path / "x.bin", 0)
        with pytest.raises(CorruptCheckpointError, match="has changed"):
            ours.__getitems__([0, 1])


def test_single_rows_in_the_page_cache_are_not_read(tmp_path, monkeypatch):
    rows = rows_of([5, 900, 30], "int32")
    dataset = IndexedDataset(build(tmp_path / "texts", rows, "int32"))
    skip_unless_cached(dataset)

    def assert_rows():
        for one, row in enumerate(rows):
            assert np.array_equal(dataset[one], row)

    for _ in range(20):
        assert_rows()
    assert dataset.bin_reader.file.counts.rows == 0
    looks = []
    monkeypatch.setattr(RangeFile, "copy_cached", lambda *its: bool(looks.append(its)))
    for _ in range(20):
        assert_rows()
    assert dataset.bin_reader.file.counts.rows == 60
    assert len(looks) == 4


def skip_unless_cached(dataset):
    file = getattr(dataset, "dataset", dataset).bin_reader.file
    if not file.copy_cached(np.array([[0, 4]], np.uint64), np.empty(1, np.int32)):
        pytest.skip("this file system does not tell whether the page cache has a page")


def test_batches_after_cached_ones_are_read_ahead(tmp_path, sizes_read, monkeypatch):
    is_cached = True
    monkeypatch.setattr(RangeFile, "copy_cached", lambda *its: is_cached and copy_cached(*its))
    corpora(tmp_path)
    own = gpt(tmp_path, "x", 400)
    order = batches(0, 400)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 400)
        skip_unless_cached(ours)
        for batch in order[:4]:
            ours.__getitems__(batch)
        assert read_counts(ours)[0] == 0
        is_cached = False
        # Those behind the batches that were copied already, and ahead of use.
        for batch in order[4:]:
            for one, index in zip(ours.__getitems__(batch), batch, strict=True):
                assert_samples(one, own[index])
    assert sizes_read
    assert len(sizes_read) < 8


@pytest.fixture
def sizes_read(monkeypatch):
    """The number of ranges of each read."""
    sizes = []
    read = RangeFile.read

    def reading(self, ranges, out, rows):
        sizes.append(len(ranges))
        return read(self, ranges, out, rows)

    monkeypatch.setattr(RangeFile, "read", reading)
    uncached(monkeypatch)
    return sizes


def assert_read_ahead(dataset, order, sizes):
    """Asserts that batches in order are read by fewer reads than there are, all rows once."""
    sizes.clear()
    for batch in order:
        dataset.__getitems__(batch)
    assert len(sizes) < len(order) / 2
    # Neither are rows read for nothing, but for those ahead of the last batch.
    assert sum(sizes) < 512 + len(order) * MICRO_BATCH * 4


@pytest.mark.parametrize("jump", [3, 40, 150, 151, -60])
def test_batches_behind_a_jump_are_read_ahead(tmp_path, sizes_read, jump):
    corpora(tmp_path)
    step = MICRO_BATCH
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 4000)
        before = batches(400, 400 + 62 * step, step)
        first = before[-1][0] + jump * step
        behind = batches(first, first + 61 * step, step)
        assert_read_ahead(ours, before, sizes_read)
        for batch in behind[:2]:
            ours.__getitems__(batch)
        assert_read_ahead(ours, behind[2:], sizes_read)


def test_a_jump_reads_nothing_for_its_own_distance(tmp_path, sizes_read):
    corpora(tmp_path)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 4000)
        # Each batch is as far from the one before as no other.
        for first in (0, 900, 100, 1500, 700, 3000):
            ours.__getitems__(list(range(first, first + MICRO_BATCH)))
        assert len(sizes_read) == 6
        assert max(sizes_read) < 5 * MICRO_BATCH


def test_another_step_is_learnt(tmp_path, sizes_read):
    corpora(tmp_path)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 4000)
        assert_read_ahead(ours, batches(0, 1000, 8), sizes_read)
        for batch in batches(1000, 1096, 24):
            ours.__getitems__(batch)
        assert_read_ahead(ours, batches(1072, 3000, 24), sizes_read)


class Marked(GPTDataset):
    """Makes other samples of the same elements."""

    def _query_document_sample_shuffle_indices(self, idx):
        text, *rest = super()._query_document_sample_shuffle_indices(idx)
        return text[::-1].copy(), *rest


def test_samples_of_a_class_that_makes_others_are_its_own(tmp_path, monkeypatch, sizes_read):
    corpora(tmp_path)
    own = gpt(tmp_path, "x", 400, of=Marked)
    order = batches(0, 200)
    expected = [[own[index] for index in batch] for batch in order]

    def check():
        with enable(datasets=True):
            ours = gpt(tmp_path, "x", 400, of=Marked)
            for batch, samples in zip(order, expected, strict=True):
                for one, other in zip(ours.__getitems__(batch), samples, strict=True):
                    assert_samples(one, other)

    check()
    assert len(sizes_read) < len(order)
    # And those of a Megatron-Core that makes others, of elements that are read ahead nevertheless.
    name = "_query_document_sample_shuffle_indices"
    monkeypatch.delattr(Marked, name)
    make = getattr(GPTDataset, name)

    def made(self, idx):
        text, *rest = make(self, idx)
        return text[::-1].copy(), *rest

    monkeypatch.setattr(GPTDataset, name, made)
    sizes_read.clear()
    check()
    assert len(sizes_read) < len(order)


class Mapped(theirs.IndexedDataset):
    """Changes one value of an element, which the first sample does not have."""

    def get(self, idx, offset=0, length=None):
        row = super().get(idx, offset, length).copy()
        row[row == RARE] = 0
        return row


class OfMapped(GPTDataset):
    """A GPT dataset of such rows."""

    @staticmethod
    def build_low_level_dataset(path, config):
        return Mapped(path, mmap=config.mmap_bin_files)


RARE = 9000


@pytest.mark.parametrize("of", ["class", "object"])
def test_rows_that_a_class_of_ones_own_changes_are_its_own(tmp_path, of):
    corpora(tmp_path)
    rows = rows_of([3000, 3000], "int32")
    rows[1][:] = RARE
    build(tmp_path / "rare", rows, "int32")
    own = gpt(tmp_path, "rare", 20, of=OfMapped)
    assert not any((own[index]["tokens"] == RARE).any() for index in range(20))
    numbers = sorted(range(20), key=lambda index: int((own[index]["tokens"] == 0).sum()))
    with enable(datasets=True):
        ours = gpt(tmp_path, "rare", 20, of=OfMapped if of == "class" else GPTDataset)
        if of == "object":
            ours.dataset.get = Mapped.get.__get__(Mapped(str(tmp_path / "rare")), Mapped)
        for one, index in zip(ours.__getitems__(numbers), numbers, strict=True):
            assert_samples(one, own[index])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_blend", [False, True])
def test_datasets_that_are_dropped_are_gone(tmp_path, monkeypatch, is_blend):
    uncached(monkeypatch)
    corpora(tmp_path)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 400)
        gone = weakref.ref(ours)
        if is_blend:
            ours = BlendedDataset([ours, gpt(tmp_path, "y", 100)], [0.7, 0.3], 250, ours.config)
        for batch in batches(0, 100):
            ours.__getitems__(batch)
        del ours
        gc.collect()
        assert gone() is None


class OneColumn(GPTDataset):
    """Its sample index has one column."""

    def _build_document_sample_shuffle_indices(self):
        return np.arange(100, dtype=np.int32), np.arange(101, dtype=np.int64), np.arange(100)

    def _query_document_sample_shuffle_indices(self, idx):
        row = self.document_index[self.shuffle_index[idx]]
        text = np.resize(self.dataset.get(int(row)), 257).astype(np.int64)
        return text, np.array([row])

    def __len__(self):
        return len(self.shuffle_index)


class Behind(OneColumn):
    """Its sample index has offsets behind the end of the data file."""

    def _build_document_sample_shuffle_indices(self):
        documents, samples, shuffle = super()._build_document_sample_shuffle_indices()
        return documents, np.stack((samples, np.full(101, 10**6)), 1), shuffle


class Late(OneColumn):
    """Sets such an index later."""

    _build_document_sample_shuffle_indices = GPTDataset._build_document_sample_shuffle_indices

    def __init__(self, *its):
        super().__init__(*its)
        indices = OneColumn._build_document_sample_shuffle_indices(self)
        self.document_index, self.sample_index, self.shuffle_index = indices


@dataclasses.dataclass(init=False)
class Unhashable(GPTDataset):
    """Equals all others of its class, and has no hash."""


@dataclasses.dataclass(init=False, unsafe_hash=True)
class Equal(GPTDataset):
    """Equals all others of its class."""


@pytest.mark.parametrize("of", [OneColumn, Behind, Late, Unhashable, Equal])
def test_datasets_of_ones_own_are_read(tmp_path, monkeypatch, of):
    uncached(monkeypatch)
    corpora(tmp_path)
    names = "x", "y"
    owns = [gpt(tmp_path, name, 50, of=of) for name in names]
    order = batches(0, 50)
    with enable(datasets=True):
        ours = [gpt(tmp_path, name, 50, of=of) for name in names]
        for batch in order:
            for own, one in zip(owns, ours, strict=True):
                for found, index in zip(one.__getitems__(batch), batch, strict=True):
                    assert_samples(found, own[index])


def test_rows_of_a_window_may_be_written_to(tmp_path):
    corpora(tmp_path)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 400)
        window = Window(ours, np.arange(4))
        window.begin()
        window.wait()
        rows = rows_of_samples(ours, np.arange(4))
        place = ours.dataset.bin_reader, np.int32, rows.lengths[0], rows.offsets[0]
        before = window.read(*place).copy()
        window.read(*place)[:] = -1
        assert_same(window.read(*place), before)


def test_all_that_a_version_returns_of_a_sample_is_made(tmp_path):
    corpora(tmp_path)
    made = []

    def make(dataset, number):
        """As in Megatron-Core 0.19, which also returns the number of elements of each row."""
        made.append(number)
        rows = rows_of_samples(dataset, np.array([number], np.int64))
        text, documents, *_ = own._query_document_sample_shuffle_indices(number)
        return text, documents, rows.lengths.tolist()

    own = gpt(tmp_path, "x", 400)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 400)
        window = Window(ours, np.arange(20))
        window.begin()
        window.wait()
        for number in range(20):
            *arrays, lengths = window.sample(ours, number, make)
            *expected, expected_lengths = make(ours, number)
            assert_same(arrays, expected)
            assert lengths == expected_lengths
    assert len(made) == 21


def test_a_missing_sample_is_masked_as_by_megatron(tmp_path):
    corpora(tmp_path)
    own = gpt(tmp_path, "x", 400)
    expected = [own[None], own[7]]
    with enable(datasets=True):
        found = gpt(tmp_path, "x", 400).__getitems__([None, 7])
    for one, other in zip(found, expected, strict=True):
        assert_samples(one, other)
    assert not found[0]["loss_mask"].any()


def test_indices_that_are_opened_late_are_served(tmp_path):
    if "defer_npy_index_mmap" not in GPTDatasetConfig.__dataclass_fields__:
        pytest.skip("this Megatron-Core opens indices at once")
    corpora(tmp_path)
    own = gpt(tmp_path, "x", 400)
    with enable(datasets=True):
        late = gpt(tmp_path, "x", 400, defer_npy_index_mmap=True)
        assert late.shuffle_index is None
        for batch in batches(0, 100):
            for one, index in zip(late.__getitems__(batch), batch, strict=True):
                assert_samples(one, own[index])


def _sum_of_first(dataset, queue):
    queue.put(int(dataset.__getitems__([0])[0]["tokens"].sum()))


def test_a_forked_process_reads(tmp_path):
    corpora(tmp_path)
    own = gpt(tmp_path, "x", 400)
    with enable(datasets=True):
        ours = gpt(tmp_path, "x", 400)
        ours.__getitems__([0])
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_sum_of_first, args=(ours, queue))
        child.start()
        assert queue.get(timeout=120) == int(own[0]["tokens"].sum())
        child.join()


def _row_sums(dataset, directory, queue):
    os.chdir(directory)
    queue.put([int(dataset[index].sum()) for index in range(2)])


def test_workers_in_another_directory_read(tmp_path, monkeypatch):
    rows = rows_of([5, 900], "int32")
    build(tmp_path / "texts", rows, "int32")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    dataset = IndexedDataset("texts")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_row_sums, args=(dataset, tmp_path / "elsewhere", queue))
    child.start()
    assert queue.get(timeout=120) == [int(row.sum()) for row in rows]
    child.join()
    sent = pickle.dumps(dataset)
    monkeypatch.chdir("elsewhere")
    for one in (dataset, pickle.loads(sent)):
        assert np.array_equal(one[1], rows[1])


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_a_dataset_that_changes_is_an_error(tmp_path, suffix):
    prefix = build(tmp_path / "texts", rows_of([5, 900], "int32"), "int32")
    dataset = IndexedDataset(prefix)
    assert len(dataset[1]) == 900
    with open(f"{prefix}.{suffix}", "ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptCheckpointError, match=f"texts.{suffix} has changed"):
        dataset[1]


def test_broken_files_are_named(tmp_path):
    prefix = build(tmp_path / "texts", rows_of([5, 900], "int32"), "int32")
    content = (tmp_path / "texts.idx").read_bytes()
    for broken, error in (
        (b"MMIDIDY" + content[7:], StateMismatchError),
        (content[:9] + b"\x02" + content[10:], FormatVersionError),
        (content[:40], CorruptCheckpointError),
    ):
        (tmp_path / "texts.idx").write_bytes(broken)
        with pytest.raises(error, match=r"texts\.idx"):
            IndexedDataset(prefix)
    (tmp_path / "texts.idx").write_bytes(content)
    os.truncate(f"{prefix}.bin", 100)
    dataset = IndexedDataset(prefix)
    assert len(dataset[0]) == 5
    with pytest.raises(
        CorruptCheckpointError, match=r"texts\.bin: its index names bytes 20 to 3620"
    ):
        dataset[1]
    with pytest.raises(PenstockError, match=r"texts-gone\.idx"):
        IndexedDataset(f"{prefix}-gone")


def test_nothing_is_said_at_the_end_of_a_program_that_closes_nothing(tmp_path):
    import subprocess

    prefix = build(tmp_path / "texts", rows_of([5, 900], "int32"), "int32")
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from penstock.integrations.megatron import IndexedDataset\n"
        f"dataset = IndexedDataset({prefix!r}); other = [dataset, dataset[1]]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=True
    )
    assert "Exception" not in done.stderr
